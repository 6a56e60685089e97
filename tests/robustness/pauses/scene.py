"""A cell, played: requests that run and wait, a pause or a commit, and all checks."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from threading import Event
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from tests.robustness.pauses import cells
from tests.robustness.pauses.cells import Cell
from tests.robustness.pauses.live import PATIENCE_S, Choice, Stream
from tests.robustness.pauses.replay import Stretch
from tests.robustness.pauses.subjects import (
    MAX_MODEL_LEN,
    NEW,
    NUM_AT_ONCE,
    OLD,
    Subject,
)
from tests.support.preloaded_process import IS_ON_CPU
from tests.support.waiting import until
from vllm.inflight.calls import StartUpdate
from vllm.inflight.transport.waiting import in_background

WATCHED_S = 0.3
"""How long no token may come in a pause."""
GROUPS = 40
REGEX = rf"([0-9]{{3}}-){{{GROUPS}}}[a-f]{{12}}"
EOS = 256
NUM_TOKENS = {cells.LONG: 900 if IS_ON_CPU else 1600, cells.SHARED_OUT: 400}
USUAL_NUM_TOKENS = 160 if IS_ON_CPU else 480
"""A GPU takes a millisecond or two for each, and a busy host as long for a call."""
BEGUN = {cells.LONG: 500, cells.PROMPT: 1}
"""Tokens of each running request when the pause or the commit comes."""
USUAL_BEGUN = 12
LONGEST_PAUSE = {"cpu": (30, 2.0), "cuda": (10, 0.3)}
"""Steps and seconds within which a pause replies, on a machine that others use too."""


def params_of(workload: str, number: int) -> SamplingParams:
    """The sampling of one request of a workload."""
    kinds = (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE)
    common: dict[str, Any] = {
        "temperature": 0,
        "max_tokens": NUM_TOKENS.get(workload, USUAL_NUM_TOKENS),
        "ignore_eos": True,
        "logprobs": 0,
        "output_kind": kinds[number % 2],
        "extra_args": {"kv_versions": 1},
    }
    if workload == cells.STRUCTURED:
        structure = StructuredOutputsParams(regex=REGEX)
        common |= {"structured_outputs": structure, "max_tokens": 400}
        common |= {"ignore_eos": False}
    if workload == cells.SEVERAL:
        # Without a seed: upstream's CPU build ends at a seeded prompt in chunks.
        common |= {"n": 2, "temperature": 1.0}
    if workload == cells.PROMPT:
        common |= {"prompt_logprobs": 0}
    if workload == cells.SHORT and number % NUM_AT_ONCE == NUM_AT_ONCE - 1:
        # Ends by itself, after the change and before the most that it may have.
        common |= {"temperature": 1.5, "max_tokens": 900}
        common |= {"min_tokens": USUAL_NUM_TOKENS * 3 // 8}
        common |= {"logit_bias": {EOS: 8.0}, "ignore_eos": False}
    return SamplingParams(**common)


def prompt_of(workload: str, number: int) -> list[int]:
    """Different texts for all requests."""
    length = 600 + number if workload == cells.PROMPT else 20 + 3 * number
    return [(11 * number + 5 * i + i * i % 7) % 250 for i in range(length)]


def allowed(workload: str) -> Callable[[int], Sequence[int] | None]:
    """Which tokens, which are bytes, the grammar lets through at which index."""
    if workload != cells.STRUCTURED:
        return lambda index: None

    def at(index: int) -> Sequence[int]:
        if index < 4 * GROUPS:
            return b"-" if index % 4 == 3 else b"0123456789"
        return b"abcdef" if index < 4 * GROUPS + 12 else (EOS,)

    return at


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature == 0


class Scene:
    """One cell on the engine of its model.

    Args:
        subject: the engine, and what its cells need.
        cell: what happens.
        record: takes the name and the value of each thing that is measured.

    """

    def __init__(
        self, subject: Subject, cell: Cell, record: Callable[[str, object], None]
    ) -> None:
        self.subject, self.cell, self._record = subject, cell, record
        self.live = subject.live
        self.treated: dict[str, Any] = {}
        """What the pause or the commit said of itself."""
        # Choices take a turn each, and chunks of one long prompt fill every step.
        at_once = {cells.SEVERAL: NUM_AT_ONCE // 2, cells.PROMPT: 1}
        self.running: list[Stream] = []
        self.waiting: list[Stream] = []
        self.had: list[int] = []
        """Tokens of those that ran, before the pause or the commit."""
        self._num_at_once = at_once.get(cell.workload, NUM_AT_ONCE)

    def play(self) -> None:
        """All of it; raises what does not hold."""
        self._begin()
        if self.cell.when == cells.PAUSE:
            self._send_all()
            self._in_a_pause()
        else:
            with self._staged() as commit:
                self._send_all()
                self.treated = commit()
        self.live.wait(self.all)
        assert not self.live.call("is_paused")
        self._judge()
        if self.cell.mode == "abort":
            self._go_on_where_they_were()
        self._serves_on()

    def _send_all(self) -> None:
        """Returns when those that run have begun, and the others wait."""
        self.running = [self._send(n) for n in range(self._num_at_once)]
        late = NUM_AT_ONCE if self.cell.workload != cells.LONG else 1
        self.live.until_begun(self.running, 1)
        self.waiting = [self._send(NUM_AT_ONCE + n) for n in range(late)]
        self.live.until_begun(self.running, BEGUN.get(self.cell.workload, USUAL_BEGUN))
        assert not any(s.future.done() for s in self.running), "they ended before"
        self.had = [s.num_tokens for s in self.running]

    @property
    def all(self) -> list[Stream]:
        return [*self.running, *self.waiting]

    @property
    def after(self) -> str:
        """The version that is live after the change."""
        return OLD if self.cell.change == cells.NONE else NEW

    # ------------------------------------------------------------------ its parts
    def _send(self, number: int) -> Stream:
        workload = self.cell.workload
        prompt, params = prompt_of(workload, number), params_of(workload, number)
        if workload == cells.LONG and number >= NUM_AT_ONCE:
            params.max_tokens = USUAL_NUM_TOKENS
        return self.live.send(prompt, params, self.subject.lora)

    def _begin(self) -> None:
        """Serve the old weights, with the new ones behind them for a rollback."""
        if self.live.call("is_paused"):
            self.live.call("continue_generation")
        if self.live.call("weight_update_status")["active"] is not None:
            self.live.call("abort_weight_update")
        order = (NEW, OLD) if self.cell.change == cells.ROLLBACK else (OLD,)
        for label in order:
            self._load(label)
        self.live.call("reset_prefix_cache")

    def _load(self, label: str, **commit: Any) -> Any:
        folder = str(self.subject.folders[label])
        return self.live.call("update_weights_from_disk", folder, label, **commit)

    @contextmanager
    def _staged(self) -> Iterator[Callable[[], Any]]:
        """What makes the cell's change, which is staged before, and has its reply.

        To stage takes longer than a request runs, on a machine that decodes fast.
        """
        is_staged, goes_on = Event(), Event()

        def gate() -> None:
            is_staged.set()
            assert goes_on.wait(PATIENCE_S)

        def change() -> Any:
            if self.cell.change == cells.ROLLBACK:  # nothing is to be staged
                gate()
            return self._change(self.cell.mode, self.cell.flush)

        def commit() -> Any:
            goes_on.set()
            return changing.result(timeout=PATIENCE_S)

        self.live.gate = gate
        changing = in_background(change)
        try:
            until(
                lambda: is_staged.is_set() or changing.done(),
                "it was not staged",
                PATIENCE_S,
            )
            yield commit
        finally:
            goes_on.set()
            self.live.gate = None

    def _change(self, mode: str | None, flush: bool) -> Any:
        """The cell's change of the weights; its reply."""
        commit: dict[str, Any] = {} if mode is None else {"mode": mode}
        if self.cell.change == cells.ROLLBACK:
            return self.live.call("rollback_weights", NEW, **commit)
        commit |= {"flush_cache": True} if flush else {}
        is_of_files = self.cell.change == cells.FILES
        if is_of_files and self.live.gate is None:
            return self._load(NEW, **commit)
        with self.live.committing(weight_version=NEW, **commit):
            folder = self.subject.folders[NEW]
            if self.subject.trainer is not None and not is_of_files:
                self.subject.trainer.send(folder)
            else:
                start = StartUpdate(transport="local" if is_of_files else "configured")
                self.live.control("start", start)
                self.live.update_weights({"update_info": {"path": str(folder)}})
                self.live.finish_weight_update()
            return self.live.reply

    def _in_a_pause(self) -> None:
        live, cell = self.live, self.cell
        asked = time.monotonic()
        pausing = in_background(lambda: live.pause(cell.mode, flush_cache=cell.flush))
        if cell.mode == "wait":
            until(lambda: live.call("is_paused"), "the pause did not begin")
        self.treated = pausing.result(timeout=180)
        took = time.monotonic() - asked
        assert live.call("is_paused")
        live.settle()
        before = self._counts()
        if cell.mode == "wait":
            assert all(s.future.done() for s in self.running)
        else:
            self._was_prompt(took)
        if cell.mode == "abort":
            assert all(s.future.done() for s in self.all)
        if cell.change != cells.NONE:
            reply = self._change(None, False)
            assert reply["weight_version"] == NEW
            assert live.call("is_paused"), "the commit has ended the pause"
        time.sleep(WATCHED_S)
        assert self._counts() == before, "tokens came in the pause"
        self.paused = (asked, time.monotonic())
        live.call("continue_generation")

    def _counts(self) -> list[int]:
        return [len(c.tokens) for s in self.all for c in s.choices]

    def _was_prompt(self, took: float) -> None:
        """A pause replies after the steps in flight."""
        times = sorted(
            b - a
            for s in self.running
            for c in s.choices
            for (a, _), (b, _) in pairwise(c.arrivals)
        )
        step = median(times) if times else 0.0
        self._record("pause_s", round(took, 4))
        if step:
            self._record("pause_steps", round(took / step, 1))
        steps, slack = LONGEST_PAUSE[self.subject.device]
        most = steps * step + slack
        assert took < most, f"the pause took {took:.3f} s"

    # ----------------------------------------------------------------- judgements
    def _judge(self) -> None:
        cell = self.cell
        found = []
        for number, stream in enumerate(self.all):
            is_running = number < len(self.running)
            for choice in stream.choices:
                found += [f"request {number}: {w}" for w in self._wrong(stream, choice)]
                found += [
                    f"request {number}: {w}"
                    for w in self._ended_otherwise(stream, choice, is_running)
                ]
            if cell.workload == cells.PROMPT:
                found += [f"request {number}: {w}" for w in self._prompt(stream)]
        assert found == [], "\n".join(found[:20])
        self._said_what_it_did()
        if cell.mode in ("in_place", "retract"):
            self._kept_their_order()
        counts = [stream.num_tokens for stream in self.running]
        assert all(a >= b for a, b in zip(counts, self.had, strict=True))

    def _wrong(self, stream: Stream, choice: Choice) -> list[str]:
        return self.subject.replay.wrong(
            stream,
            choice,
            keeps_kv=self.cell.mode == "in_place",
            is_greedy=is_greedy(stream.params),
            allowed=allowed(self.cell.workload),
        )

    def _ended_otherwise(
        self, stream: Stream, choice: Choice, is_running: bool
    ) -> list[str]:
        """How the end of a choice, or its versions, are not what the mode says."""
        cell, found = self.cell, []
        labels = [span.version for span in choice.spans]
        if cell.mode == "abort":
            if choice.finish_reason != "abort":
                found.append(f"it ended with {choice.finish_reason!r}")
            return found + ([f"its versions are {labels}"] if NEW in labels else [])
        expected = [OLD] if is_running else [self.after]
        if is_running and cell.mode != "wait" and cell.change != cells.NONE:
            expected = [OLD, NEW]
        # One that waited for its turn had none, or had it before the change came.
        fits = [expected]
        if not is_running or cell.workload == cells.PROMPT:
            fits = [[OLD], [NEW], [OLD, NEW]] if self.after == NEW else [[OLD]]
        if labels not in fits:
            found.append(f"its versions are {labels}")
        ends = not stream.params.ignore_eos
        if choice.finish_reason != ("stop" if ends else "length"):
            found.append(f"it ended with {choice.finish_reason!r}")
        if ends and choice.tokens[-1] != EOS:
            found.append("it ended without the end of the text")
        if not ends and len(choice.tokens) != stream.params.max_tokens:
            found.append(f"it has {len(choice.tokens)} tokens")
        if cell.workload == cells.STRUCTURED:
            # Not `choice.text`: the detokenizer also emits bytes of the prompt if these
            # are no whole characters. The model's tokens are bytes.
            text = bytes(token for token in choice.tokens if token != EOS).decode()
            if not re.fullmatch(REGEX, text):
                found.append(f"its grammar forbids {text!r}")
        return found

    def _prompt(self, stream: Stream) -> list[str]:
        (choice,) = stream.choices
        if not choice.tokens:
            return []
        first, length = choice.spans[0], len(stream.prompt)
        if self.cell.mode != "abort" and len(stream.prompt_logprobs) != length - 1:
            return [f"{len(stream.prompt_logprobs)} log-probabilities of its prompt"]
        stretches = [Stretch(first.version, 0, length)]
        if len(choice.spans) == 1 or self.cell.mode == "in_place":
            told = [Stretch(s.version, s.start, min(s.end, length)) for s in choice.kv]
            stretches = [s for s in told if s.start < length]
        return self.subject.replay.prompt_wrong(stream, stretches)

    def _said_what_it_did(self) -> None:
        """The reply counts those that were retracted or aborted."""
        told = self.treated
        running = sum(len(s.choices) for s in self.running)
        if self.cell.change == cells.ROLLBACK and self.cell.when == cells.COMMIT:
            return
        if self.cell.mode == "retract":
            assert told["num_retracted"] >= (
                1 if self.cell.workload == cells.PROMPT else running
            ), told
        if self.cell.mode == "abort":
            everyone = sum(len(s.choices) for s in self.all)
            assert told["num_aborted"] == everyone, told
        if self.cell.flush:
            assert told["dropped"] is not None, told

    def _kept_their_order(self) -> None:
        """Those that waited begin in their order, after those that ran."""
        begun = [s.first_token_at for s in self.waiting]
        step = 0.05 if self.subject.device == "cuda" else 0.2
        for earlier, later in pairwise(begun):
            assert earlier < later + step, "a later request has overtaken another"
        if self.cell.when != cells.PAUSE or self.cell.workload == cells.PROMPT:
            return
        _, continued = self.paused
        for stream in self.running:
            for choice in stream.choices:
                again = [at for at, _ in choice.arrivals if at > continued]
                assert again, "one that ran did not go on"
                late = again[0] - min(begun)
                assert late < step, f"one that ran had to wait {late:.3f} s longer"

    # --------------------------------------------------------------------- after it
    def _go_on_where_they_were(self) -> None:
        """An aborted request is sent again with the tokens that it has."""
        again = []
        for stream in self.all:
            for choice in stream.choices:
                params = stream.params.clone()
                params.n = 1
                left = (params.max_tokens or 0) - len(choice.tokens)
                params.max_tokens = min(left, 100)
                params.min_tokens = 0
                prompt = stream.prompt + choice.tokens
                if self.cell.workload == cells.STRUCTURED:
                    continue  # its grammar would begin anew
                assert len(prompt) + params.max_tokens <= MAX_MODEL_LEN
                again.append(self.live.send(prompt, params, self.subject.lora))
        self.live.wait(again)
        for stream in again:
            self._is_of_the_live_version(stream)

    def _serves_on(self) -> None:
        """New requests are served by the version that is now live, by each engine."""
        prompt, params = prompt_of(cells.SHORT, 40), params_of(self.cell.workload, 40)
        if self.cell.workload != cells.STRUCTURED:
            params.max_tokens = 40
        lora, num_engines = self.subject.lora, self.live.num_engines
        sent = [self.live.send(prompt, params, lora) for _ in range(num_engines)]
        self.live.wait(sent)
        for stream in sent:
            self._is_of_the_live_version(stream)

    def _is_of_the_live_version(self, stream: Stream) -> None:
        """All of a request that began after the change."""
        for choice in stream.choices:
            labels = [span.version for span in choice.spans]
            assert labels == [self.after], f"its versions are {labels}"
            found = self._wrong(stream, choice)
            assert found == [], "\n".join(found[:20])
