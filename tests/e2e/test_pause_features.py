"""Pauses in the middle of what else vLLM can do: the output is as if there were none.

Engines in this process, stepped by hand, so that a pause comes exactly in the middle.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from tests.support.engines.probe import prompts
from tests.support.engines.script import run_script
from tests.support.waiting import until
from vllm.inflight.update import PAUSE_MOVES, PauseMode

pytestmark = pytest.mark.engine

GREEDY = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
MODES = ["in_place", "retract"]
REGEX = r"([0-9]{3}-){8}[a-f]{12}"


def lived(
    llm: Any,
    params: SamplingParams,
    meanwhile: Callable[[], Any] | None = None,
    **request: Any,
) -> list[Any]:
    """The choices of two requests, with something happening after 12 steps of both."""
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    texts = prompts(2)
    llm.reset_prefix_cache()
    for index, text in enumerate(texts):
        mine = params.clone()
        mine.output_kind = RequestOutputKind.FINAL_ONLY  # all choices at once
        engine.add_request(f"r{index}", text, mine, **request)

    def can_begin() -> bool:
        # Grammars are compiled beside the steps, one after another.
        asked = [r.structured_output_request for r in scheduler.requests.values()]
        return all(each is None or each.is_grammar_ready for each in asked)

    until(can_begin)
    finished: dict[str, Any] = {}
    num_steps, deadline = 0, time.monotonic() + 60
    while engine.has_unfinished_requests():
        assert time.monotonic() < deadline, "requests did not finish"
        if num_steps == 12 and meanwhile is not None:
            meanwhile()
            meanwhile = None
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
        num_steps += len(scheduler.running) >= 2
    assert meanwhile is None, "they ended before anything could happen"
    assert sorted(finished) == ["r0", "r1"]
    return [choice for name in sorted(finished) for choice in finished[name].outputs]


def tokens(choices: list[Any]) -> list[list[int]]:
    return [list(choice.token_ids) for choice in choices]


def pause(llm: Any, mode: str) -> Callable[[], None]:
    """A pause of three steps in which no token may be sampled.

    The requests put out all they have at their end, so their outputs cannot show it.
    """
    requests = llm.llm_engine.engine_core.engine_core.scheduler.requests

    def counts() -> dict[str, int]:
        return {name: request.num_output_tokens for name, request in requests.items()}

    def paused() -> None:
        reply = llm.pause_generation(mode=mode, flush_cache=False)
        assert reply["num_running"] + reply["num_waiting"] >= 2
        before = counts()
        assert all(llm.llm_engine.step() == [] for _ in range(3))
        assert counts() == before and any(before.values())
        llm.continue_generation()

    return paused


# ----------------------------------------------------------------- structured output
# What compiles grammars warns when it is imported, and an error there ends requests.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("mode", MODES)
def test_structured_output_continues_after_a_pause_or_an_update(
    llm: Any, new: Path, mode: str
) -> None:
    structure = StructuredOutputsParams(regex=REGEX)
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=structure)
    alone = lived(llm, params)
    assert {choice.finish_reason for choice in alone} == {"stop"}
    assert tokens(lived(llm, params, pause(llm, mode))) == tokens(alone)
    updated = lived(
        llm, params, lambda: llm.update_weights_from_disk(str(new), "new", mode=mode)
    )
    for text in [choice.text for choice in updated]:
        assert re.fullmatch(REGEX, text), text
    assert all(len(choice.weight_versions) == 2 for choice in updated)


# ------------------------------------------------------------------------- n > 1
@pytest.mark.parametrize("mode", MODES)
def test_every_choice_of_a_request_with_n_3_continues_after_a_pause_or_an_update(
    llm: Any, new: Path, mode: str
) -> None:
    params = SamplingParams(**GREEDY | {"n": 3, "temperature": 1.0, "seed": 5})
    alone = lived(llm, params)
    assert tokens(lived(llm, params, pause(llm, mode))) == tokens(alone)
    updated = lived(
        llm, params, lambda: llm.update_weights_from_disk(str(new), "new", mode=mode)
    )
    assert len(updated) == 6
    for choice in updated:
        spans = [
            (span.version, span.start, span.end) for span in choice.weight_versions
        ]
        (_, _, middle), _ = spans
        assert spans == [("old", 0, middle), ("new", middle, 60)]


# ----------------------------------------------------------- EOS still ends a stream
@pytest.mark.parametrize("mode", MODES)
def test_an_eos_token_still_ends_a_stream_after_an_update(
    llm: Any, new: Path, mode: str
) -> None:
    eos = llm.get_tokenizer().eos_token_id
    # Not before the update, and not only by chance after it: numbers differ by machine.
    ends = {"min_tokens": 30, "logit_bias": {eos: 4.0}}
    params = SamplingParams(temperature=1.5, seed=4, max_tokens=900, **ends)

    def update() -> None:
        llm.pause_generation(mode=mode, flush_cache=mode == "retract")
        llm.update_weights_from_disk(str(new), "new")
        llm.continue_generation()

    for choice in lived(llm, params, update):
        assert choice.finish_reason == "stop"
        assert choice.token_ids[-1] == eos
        assert any(choice.token_ids), "nothing but zeros"
        assert choice.weight_versions[-1].version == "new"


# -------------------------------------------------------------------- aborted ones
def test_an_aborted_request_goes_on_from_prompt_and_tokens(llm: Any) -> None:
    params = SamplingParams(**GREEDY)
    whole = tokens(lived(llm, params))
    cut = lived(llm, params, lambda: llm.pause_generation(mode="abort"))
    llm.continue_generation()
    assert {choice.finish_reason for choice in cut} == {"abort"}
    assert all(choice.weight_versions[-1].end == 12 for choice in cut)
    for text, choice, expected in zip(prompts(2), cut, whole, strict=True):
        had = list(choice.token_ids)
        again = {"prompt_token_ids": text["prompt_token_ids"] + had}
        left = SamplingParams(**GREEDY | {"max_tokens": 60 - len(had)})
        (output,) = llm.generate([again], left, use_tqdm=False)
        assert had + list(output.outputs[0].token_ids) == expected


# ------------------------------------------------------- pauses renewed and changed
def queued(llm: Any, first: str, *, has_running: bool) -> Any:
    """Pause in a mode, maybe in the middle of a request; then another one arrives."""
    engine = llm.llm_engine
    llm.reset_prefix_cache()
    before, late = prompts(2)
    params = SamplingParams(**GREEDY)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    if has_running:
        engine.add_request("before", before, params)
        for _ in range(12):
            engine.step()
    reply = llm.pause_generation(mode=first, flush_cache=False, lease_s=600)
    engine.add_request("late", late, params)
    return reply


def ended(llm: Any) -> dict[str, Any]:
    """Step until no request is left; the choice of each."""
    found: dict[str, Any] = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                (found[output.request_id],) = output.outputs
    return found


@pytest.mark.parametrize("mode", PauseMode)
def test_a_renewal_changes_nothing_but_the_lease(llm: Any, mode: PauseMode) -> None:
    alone = tokens(lived(llm, SamplingParams(**GREEDY)))
    # An engine that steps in this process cannot let requests run on in `wait`.
    has_running = mode is not PauseMode.WAIT
    queued(llm, mode, has_running=has_running)
    for lease_s in (300, 30):
        reply = llm.pause_generation(mode=mode, flush_cache=False, lease_s=lease_s)
        assert (reply["num_aborted"], reply["num_retracted"]) == (0, 0)
        assert lease_s - 20 < reply["lease_s"] <= lease_s
        # An aborted request has its last output in the step after the pause.
        assert all(output.request_id == "before" for output in llm.llm_engine.step())
    llm.continue_generation()
    found = ended(llm)
    assert found["late"].finish_reason == "length"
    assert list(found["late"].token_ids) == alone[1]
    if has_running and mode is not PauseMode.ABORT:
        assert list(found["before"].token_ids) == alone[0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (first, second)
        for first in PauseMode
        for second in sorted(PAUSE_MOVES[first] - {first})
    ],
)
def test_a_stricter_pause_treats_what_was_queued_since_as_its_mode_says(
    llm: Any, first: PauseMode, second: PauseMode
) -> None:
    alone = tokens(lived(llm, SamplingParams(**GREEDY)))
    queued(llm, first, has_running=first is not PauseMode.WAIT)
    reply = llm.pause_generation(mode=second, flush_cache=False)
    num_there = 1 if first is PauseMode.WAIT else 2
    ends = second is PauseMode.ABORT
    assert reply["num_aborted"] == (num_there if ends else 0)
    assert reply["num_waiting"] + reply["num_running"] == (0 if ends else num_there)
    llm.continue_generation()
    late = ended(llm)["late"]
    assert late.finish_reason == ("abort" if ends else "length")
    assert list(late.token_ids) == ([] if ends else alone[1])


# --------------------------------------------------------------------- KV's versions
def test_a_request_may_ask_which_version_computed_the_kv_that_it_read(
    llm: Any, new: Path
) -> None:
    params = SamplingParams(**GREEDY | {"extra_args": {"kv_versions": 1}})
    kept = lived(llm, params, lambda: llm.update_weights_from_disk(str(new), "new"))
    for index, choice in enumerate(kept):
        read = [(span.version, span.start, span.end) for span in choice.kv_versions]
        length = len(prompts(2)[index]["prompt_token_ids"])
        assert read == [("old", 0, length + 11), ("new", length + 11, length + 59)]
    assert not hasattr(lived(llm, SamplingParams(**GREEDY))[0], "kv_versions")


@pytest.mark.parametrize(
    ("asked", "mode", "num_retracted", "num_aborted", "is_dropped"),
    [
        ("in_place", "in_place", 0, 0, False),
        ("retract", "retract", 2, 0, False),
        # Upstream's own drop the caches, as they do there.
        ("keep", "retract", 2, 0, True),
        ("abort", "abort", 0, 2, True),
    ],
)
def test_a_pause_with_only_a_mode_uses_the_defaults_of_that_mode(
    llm: Any,
    asked: str,
    mode: str,
    num_retracted: int,
    num_aborted: int,
    is_dropped: bool,
) -> None:
    seen: dict[str, Any] = {}

    def paused() -> None:
        seen.update(llm.pause_generation(mode=asked))
        llm.continue_generation()

    lived(llm, SamplingParams(**GREEDY), paused)
    assert seen["mode"] == mode
    assert (seen["num_retracted"], seen["num_aborted"]) == (num_retracted, num_aborted)
    assert (seen["dropped"] is not None) == is_dropped


# ------------------------------------------- engines of their own, from here on
def test_arrivals_are_rejected_where_that_is_configured(
    start: Callable[..., Any], old: Path
) -> None:
    from vllm.inflight.errors import EnginePaused

    reject = {"inflight": {"when_paused": "reject"}}
    llm = start(old, additional_config=reject)
    llm.pause_generation(mode="in_place", flush_cache=False)
    with pytest.raises(EnginePaused, match="in_place"):
        llm.generate(prompts(1), SamplingParams(**GREEDY), use_tqdm=False)
    llm.continue_generation()
    assert llm.generate(prompts(1), SamplingParams(**GREEDY), use_tqdm=False)


# ---------------------------------------------------- in processes of their own
@pytest.fixture(scope="module")
def drafted(old: Path, new: Path) -> dict[str, Any]:
    return run_script("drafts", old, new)


@pytest.mark.lacking("0.30.0")  # vLLM's own CPU build cannot sample drafts there
def test_drafts_of_speculative_decoding_go_on(drafted: dict[str, Any]) -> None:
    assert drafted["drafts"] > 0, "nothing was drafted"
    for mode in MODES:
        assert drafted[mode] == drafted["alone"]


@pytest.mark.lacking("0.30.0")
def test_an_engine_that_looks_drafts_up_is_updated(
    drafted: dict[str, Any], start: Callable[..., Any], new: Path
) -> None:
    for spans in drafted["spans"]:
        middle = spans[0][2]
        assert spans == [["default", 0, middle], ["new", middle, 150]]
    params = SamplingParams(**GREEDY | {"max_tokens": 150})
    assert drafted["new"] == tokens(lived(start(new, dtype="float32"), params))
    assert drafted["back"] == drafted["alone"]


def test_requests_of_an_adapter_go_on(old: Path, tmp_path: Path) -> None:
    seen = run_script("adapters", old, tmp_path)
    assert seen["alone"] != seen["without"], "the adapter does nothing"
    for mode in MODES:
        assert seen[mode] == seen["alone"]


@pytest.mark.parametrize("mode", MODES)
def test_prompt_logprobs_are_of_the_weights_that_computed_the_prompt(
    start: Callable[..., Any], old: Path, new: Path, mode: str
) -> None:
    """A commit in the middle of a prompt, which is computed four tokens at a time."""
    llm = start(old, max_num_batched_tokens=4, max_num_seqs=1)
    engine = llm.llm_engine
    asked = SamplingParams(
        prompt_logprobs=0, max_tokens=1, extra_args={"kv_versions": 1}
    )
    text = "a prompt of several chunks"

    def told(commit_after: int | None = None) -> Any:
        engine.add_request("r", text, asked)
        for number in range(100):
            if number == commit_after:
                llm.update_weights_from_disk(str(new), "new", mode=mode)
            for output in engine.step():
                if output.finished:
                    rows = [row for row in output.prompt_logprobs if row is not None]
                    values = [next(iter(row.values())).logprob for row in rows]
                    return values, output.outputs[0].kv_versions
        raise AssertionError("it did not end")

    before, _ = told()
    values, spans = told(commit_after=2)
    after, _ = told()
    if mode == "retract":
        assert values == pytest.approx(after, abs=1e-4)
        assert [span.version for span in spans] == ["new"]
        return
    assert [(s.version, s.start) for s in spans] == [("default", 0), ("new", 8)]
    assert values[:8] == pytest.approx(before[:8], abs=1e-4)
    assert values[8:] != pytest.approx(before[8:], abs=1e-2)
