"""Random lives of an engine, held against what must be true of every one.

The engine is the real scheduler, block pool, gate and ledger; the worker is simulated
and checks every KV slot that it reads. What must be true:

- every token that was sampled comes out, once, in order, with the version that sampled
  it, and spans cover the tokens exactly;
- requests are served in the order in which they came;
- a request reads no KV older than the policy allows at the time it looks for some, and
  none but that of the weights then live if it was retracted;
- a pause becomes stricter or stays as it is, and nothing is sampled while it freezes;
- what was refused has changed nothing; in the end every block is free again.
"""

from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.output_processor import OutputProcessor

from tests.support.engines.bare_core import call, request
from tests.support.simulated.core import stage_weights
from tests.support.simulated.load import KINDS
from vllm.inflight.update import PAUSE_MOVES, PauseMode

pytestmark = pytest.mark.engine

POLICIES: dict[str, int | None] = {"versioned": 0, "versioned:2": 2, "shared": None}
"""A prefix-cache policy → how many generations old the KV of a new request may be."""


class Life(RuleBasedStateMachine):
    """One life of one engine."""

    fresh: Callable[[], EngineCore]
    most: int | None

    @initialize()
    def begin(self) -> None:
        self.core = self.fresh()
        self.worker = self.core.model_executor
        self.front = OutputProcessor(None, log_stats=False)
        self.outputs: dict[str, Any] = {}
        self.arrived: list[str] = []
        self.length: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.retracted: dict[str, int] = {}
        self.waiting: list[Future[Any]] = []
        self.committing: Future[Any] | None = None
        self.labels = 0
        self.label_of = {"default": 0}

    # ------------------------------------------------------------------ moves
    @rule(
        prefix=st.integers(0, 2),
        length=st.integers(3, 90),
        tail=st.integers(0, 3),
        most=st.integers(1, 30),
        salt=st.sampled_from([None, None, "a"]),
    )
    def add(
        self, prefix: int, length: int, tail: int, most: int, salt: str | None
    ) -> None:
        name = f"{len(self.arrived)}"
        prompt = [(prefix + 3 * i) % 199 for i in range(length)] + [tail]
        made = request(name, prompt, max_tokens=most)
        made.external_req_id, made.cache_salt = f"user-{name}", salt
        self.front.add_request(made, None)
        self.core.add_request(*self.core.preprocess_add_request(made))
        self.arrived.append(name)
        self.length[name] = most

    @rule(which=st.integers(0, 30))
    @precondition(lambda self: self.alive())
    def abort(self, which: int) -> None:
        name = self.alive()[which % len(self.alive())]
        self.core.abort_requests([name])
        self.front.abort_requests([name], internal=True)
        self.aborted.add(name)

    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        is_frozen = self.core.scheduler.pause_state.name == "PAUSED_ALL"
        is_frozen &= not self.core.batch_queue
        before = self.num_sampled()
        [self.one_step() for _ in range(times)]
        assert not is_frozen or self.num_sampled() == before

    @rule(mode=st.sampled_from(PauseMode), flush=st.booleans())
    def pause(self, mode: PauseMode, flush: bool) -> None:
        state, alive = call(self.core, "paused"), self.alive()
        answer = self.ask("pause", mode=mode, flush_cache=flush)
        is_legal = mode in PAUSE_MOVES[state["mode"] and PauseMode(state["mode"])]
        assert is_legal or self.is_refused(answer)
        if self.is_refused(answer):
            assert call(self.core, "paused") == state
        elif mode is PauseMode.ABORT:
            self.aborted.update(alive)

    @rule()
    def resume(self) -> None:
        self.ask("resume")

    @rule(times=st.integers(1, 12))
    def go_on(self, times: int) -> None:
        self.ask("resume")
        self.step(times)

    @rule(weights=st.integers(0, 5))
    @precondition(lambda self: call(self.core, "status")["active"] is None)
    def stage(self, weights: int) -> None:
        stage_weights(self.core, weights)
        # One that still waits for its answer was for an update that was given up.
        self.staged, self.committing = weights, None

    @rule(mode=st.sampled_from([*PauseMode, *PauseMode, None]), flush=st.booleans())
    @precondition(lambda self: call(self.core, "status")["active"] is not None)
    def commit(self, mode: PauseMode | None, flush: bool) -> None:
        label = f"v{self.labels}"
        alive, running = self.alive(), self.running()
        body = {"weight_version": label, "mode": mode, "flush_cache": flush}
        is_asked = self.committing is not None and not self.committing.done()
        answer = self.ask("commit", **body)
        if is_asked:
            return  # the commit that waits, whatever mode it is asked for in now
        self.committing = answer if isinstance(answer, Future) else None
        if self.is_refused(answer):
            assert call(self.core, "status")["active"]["phase"] == "staged"
            return
        self.labels += 1
        self.label_of[label] = self.staged
        mode = mode or (PauseMode.RETRACT if flush else PauseMode.IN_PLACE)
        if mode is PauseMode.ABORT:
            self.aborted.update(alive)
        if mode is PauseMode.RETRACT:
            self.retracted |= {name: self.worker.generation for name in running}

    @rule(
        weights=st.integers(0, 5),
        mode=st.sampled_from(PauseMode),
        times=st.integers(1, 6),
    )
    @precondition(lambda self: call(self.core, "status")["active"] is None)
    def publish(self, weights: int, mode: PauseMode, times: int) -> None:
        """In the middle of things: right after some requests were let go on."""
        self.go_on(times)
        self.stage(weights)
        self.commit(mode, False)
        self.go_on(times)

    @rule()
    @precondition(lambda self: call(self.core, "status")["active"] is not None)
    def give_up(self) -> None:
        call(self.core, "abort")

    @rule(mode=st.sampled_from([PauseMode.IN_PLACE, PauseMode.RETRACT]))
    def rollback(self, mode: PauseMode) -> None:
        running = self.running()
        answer = self.ask("rollback", mode=mode)
        if not self.is_refused(answer) and mode is PauseMode.RETRACT:
            self.retracted |= {name: self.worker.generation for name in running}

    @rule()
    def flush(self) -> None:
        self.ask("flush")

    # ------------------------------------------------------------- must be true
    @invariant()
    def every_token_came_once_in_order_with_its_version(self) -> None:
        for name, output in self.outputs.items():
            made, told = self.worker.sampled.get(name, []), output.outputs[0]
            tokens = list(told.token_ids)
            assert [s.token for s in made[: len(tokens)]] == tokens
            spans = told.weight_versions
            ends = [s.end for s in spans]
            assert [s.start for s in spans] == [0, *ends][: len(spans)]
            assert ends[-1:] == [len(tokens)][: len(tokens)]
            assert all(a.epoch < b.epoch for a, b in pairwise(spans))
            for span in spans:
                by = {s.weights for s in made[span.start : span.end]}
                assert by == {self.label_of[span.version]}

    @invariant()
    def every_output_knows_whose_kv_was_read(self) -> None:
        spoken = [(n, o.outputs[0]) for n, o in self.outputs.items()]
        for name, told in [each for each in spoken if each[1].token_ids]:
            made = self.worker.sampled[name][len(told.token_ids) - 1]
            read = [
                self.label_of[span.version]
                for span in told.kv_versions
                for _ in range(span.start, span.end)
            ]
            assert read == list(made.kv), name

    @invariant()
    def requests_keep_their_order(self) -> None:
        scheduler = self.core.scheduler
        queue = [*scheduler.running, *scheduler.waiting]
        assert [r.request_id for r in queue] == [
            n for n in self.arrived if n in {r.request_id for r in queue}
        ]

    @invariant()
    def no_request_reads_older_kv_than_it_may(self) -> None:
        for name, made in self.worker.sampled.items():
            for sample in made[-3:]:
                oldest = min(sample.generations)
                if self.most is not None:
                    assert oldest >= sample.admitted - self.most
                since = self.retracted.get(name, -1)
                if since != -1 and sample.admitted >= since:
                    assert oldest >= sample.admitted, (name, since, sample)
                    assert oldest >= since

    def teardown(self) -> None:
        """Everything that was not aborted ends, with all of its tokens."""
        if not hasattr(self, "worker"):
            return
        if call(self.core, "status")["active"] is not None:
            call(self.core, "abort")
        self.one_step()
        call(self.core, "resume")
        for _ in range(2000):
            if not self.alive() and not self.core.batch_queue:
                break
            self.one_step()
        assert self.alive() == []
        for name in self.arrived:
            if name not in self.aborted:
                told = self.outputs[name].outputs[0]
                assert len(told.token_ids) == self.length[name]
                assert told.finish_reason == "length"
        self.every_token_came_once_in_order_with_its_version()
        assert self.core.scheduler.get_kv_cache_usage() == 0
        assert all(future.done() for future in self.waiting)

    # ---------------------------------------------------------------- helpers
    def alive(self) -> list[str]:
        return list(self.core.scheduler.requests)

    def running(self) -> list[str]:
        return [r.request_id for r in self.core.scheduler.running]

    def num_sampled(self) -> int:
        return sum(len(made) for made in self.worker.sampled.values())

    def ask(self, method: str, **body: Any) -> Any:
        answer = self.core.inflight(method, body)
        if isinstance(answer, Future):
            self.waiting.append(answer)
        return answer

    def is_refused(self, answer: Any) -> bool:
        return isinstance(answer, dict) and "error" in answer

    def one_step(self) -> None:
        for group in self.core.round():
            stamp = getattr(group, "weight_version", None)  # from 0.32 on
            done = self.front.process_outputs(
                group.outputs, **({} if stamp is None else {"weight_version": stamp})
            )
            assert done.reqs_to_abort == []
            for output in done.request_outputs:
                name = output.request_id.removeprefix("user-")
                self.outputs[name] = output
                if output.finished:
                    assert output.outputs[0].finish_reason in ("length", "abort")


@pytest.mark.parametrize("seed", ["", pytest.param("any", marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [k for k in KINDS if "in process" not in k])
def test_invariants_hold_in_random_lives_of_an_engine(
    make: Callable[..., EngineCore], kind: str, policy: str, seed: str
) -> None:
    options = KINDS[kind] | {"inflight": {"prefix_cache": policy, "kv_versions": "on"}}

    class Example(Life):
        fresh = staticmethod(lambda: make(**options))
        most = POLICIES[policy]

    lives = settings(
        max_examples=200 if seed else 25,
        derandomize=not seed,  # others, and more of them, with `make test-slow`
        stateful_step_count=40,
        deadline=None,
        phases=[Phase.generate],  # to look for a shorter life takes minutes
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Example, settings=lives)
