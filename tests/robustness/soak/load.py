"""The load: clients that ask without a break, and leave now and then.

Greedy and sampled, short and long, with shared beginnings and without; some clients
leave in the middle, some take their request back.
"""

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.robustness.soak.histogram import Histogram
from tests.robustness.soak.history import History
from tests.robustness.soak.judge import Answer

NUM_PREFIXES = 4
VOCABULARY = 250
LIMIT_S = 120.0
"""A request without an end by then is lost."""

STOP = 7
"""A token at which some requests end."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One request, and what its client does."""

    name: str
    prompt: list[int]
    params: SamplingParams
    leave_after: int | None
    """Tokens after which the client goes."""
    takes_back: bool
    """Whether it says so, instead of only closing the stream."""


class Load:
    """The clients of one run, and what they have seen."""

    def __init__(
        self,
        engine: Any,
        history: History,
        *,
        seed: str,
        judged_share: float,
        judge: Callable[[Answer], None],
    ) -> None:
        self._engine = engine
        self._history = history
        self._rng = random.Random(f"load {seed}")
        self._judged_share = judged_share
        self._judge = judge
        self._prefixes = [self._text(n) for n in (48, 96, 160, 224)][:NUM_PREFIXES]
        self.ends: dict[str, int] = {}
        self.num_tokens = self.num_requests = 0
        self.gaps, self.gaps_stopped = Histogram(), Histogram()
        self._closed = False

    async def run(self, num_clients: int) -> None:
        """Ask until `close`; returns when every request has ended."""
        await asyncio.gather(*(self._client() for _ in range(num_clients)))

    def close(self) -> None:
        """Begin no more requests."""
        self._closed = True

    async def _client(self) -> None:
        while not self._closed:
            plan = self._plan()
            self.num_requests += 1
            aborts = self._history.aborts_over
            answer = Answer(plan.name, plan.prompt)
            try:
                async with asyncio.timeout(LIMIT_S):
                    end = await self._ask(plan, answer)
            except TimeoutError:
                end = f"no end within {LIMIT_S:g} s"
            except Exception as error:
                end = f"{type(error).__name__}: {error}"
            self.ends[end] = self.ends.get(end, 0) + 1
            self.num_tokens += len(answer.tokens)
            if not self._is_right(plan, answer, end, aborts):
                self._history.num_lost += 1
                self._history.wrong.append(
                    f"{plan.name}: ended {end!r} after {len(answer.tokens)} of "
                    f"{plan.params.max_tokens} tokens"
                )
            self._judge(answer)

    def _is_right(self, plan: Plan, answer: Answer, end: str, aborts: int) -> bool:
        """Whether what was done to a request accounts for its end."""
        count = len(answer.tokens)
        if end == "length":
            return count == plan.params.max_tokens
        if end == "stop":
            return STOP in plan.params.stop_token_ids and answer.tokens[-1] == STOP
        if end == "left":
            return plan.leave_after is not None and count >= plan.leave_after
        if end == "abort":
            has_left = plan.leave_after is not None and count >= plan.leave_after
            return (plan.takes_back and has_left) or self._history.was_aborted(aborts)
        return False

    async def _ask(self, plan: Plan, answer: Answer) -> str:
        """Read a stream until its end, or until its client goes; says why it ended."""
        stream = self._engine.generate(
            {"prompt_token_ids": plan.prompt}, plan.params, plan.name
        )
        last, stops, is_gone = time.perf_counter(), self._history.stops, False
        async with aclosing(stream):
            async for output in stream:
                choice, now = output.outputs[0], time.perf_counter()
                if answer.tokens and len(choice.token_ids) > len(answer.tokens):
                    self._note_gap(now - last, stops)
                last, stops = now, self._history.stops
                answer.take(choice)
                if choice.finish_reason is not None:
                    return str(choice.finish_reason)
                if plan.leave_after is not None and not is_gone:
                    is_gone = len(answer.tokens) >= plan.leave_after
                    if is_gone and not plan.takes_back:
                        return "left"
                    if is_gone:
                        await self._engine.abort(plan.name)
        return "nothing"

    def _note_gap(self, seconds: float, stops: int) -> None:
        is_stopped = self._history.is_stopping or stops != self._history.stops
        (self.gaps_stopped if is_stopped else self.gaps).add(seconds * 1e3)

    def _plan(self) -> Plan:
        draw = self._rng
        prompt = self._text(draw.choice((8, 24, 64, 130)))
        if draw.random() < 0.5:
            prompt = draw.choice(self._prefixes) + prompt
        is_greedy = draw.random() < 0.4
        is_judged = draw.random() < self._judged_share
        params = SamplingParams(
            temperature=0.0 if is_greedy else 1.0,
            seed=None if is_greedy else draw.randrange(1 << 31),
            max_tokens=draw.choice((1, 8, 24, 60, 60, 120, 300)),
            ignore_eos=True,
            stop_token_ids=[STOP] if draw.random() < 0.3 else [],
            logprobs=0 if is_judged else None,
            output_kind=RequestOutputKind.CUMULATIVE,
            extra_args={"kv_versions": 1} if is_judged else None,
        )
        leave_after = draw.randint(1, 40) if draw.random() < 0.12 else None
        return Plan(
            f"request-{self.num_requests}",
            prompt,
            params,
            leave_after,
            draw.random() < 0.5,
        )

    def _text(self, length: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(length)]
