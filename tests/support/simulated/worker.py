"""A worker that computes nothing and remembers everything.

Scheduler, block pool, gate and ledger are the real ones; only the forward is not. It
keeps what a real KV cache would hold as facts: which token, at which position, was
written by which weights. So whoever samples can say exactly what it attended to, and a
block that is read by the wrong request, or too late, is found at once.
"""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

from vllm.inflight.messages import Status
from vllm.inflight.worker.integrity.tripwire import WriteReport
from vllm.inflight.worker.status_board import StatusBoard

BLOCK = 16
WINDOW = 40


@dataclass
class Row:
    """A request as the worker knows it."""

    tokens: list[int]
    blocks: list[list[int]]
    admitted: int
    """The generation in which it last looked for KV."""


@dataclass
class Sampled:
    """One token, and what was attended to when it was sampled."""

    token: int
    weights: int
    kv: tuple[int, ...]
    """The weights that wrote the KV of every position before it."""
    generations: tuple[int, ...]
    """The same by generation, which counts flips and never comes back."""
    admitted: int


@dataclass
class Memory:
    """The KV cache of one group: (block, offset) → (token, position, generation)."""

    window: int | None
    slots: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)


class SimulatedExecutor(UniProcExecutor):
    """Executes by the book: every slot that is read must hold what it should."""

    supports_pp = True
    windowed = False
    """Whether there is a second group of layers, with a sliding window."""
    drafts = 0

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def _init_executor(self) -> None:
        self.live, self.second = 0, 0
        self.generation = 0
        self.weights_of = [0]
        """Generation → weights."""
        self.rows: dict[str, Row] = {}
        self.sampled: dict[str, list[Sampled]] = {}
        self.memories = [Memory(None), Memory(WINDOW)][: 1 + self.windowed]
        self.board: StatusBoard | None = None
        self.is_written = self.is_loading = False
        self.displaced: list[str] = []
        """What its tripwire has noticed of writes past any update."""
        self.drowsy = 0
        """The level of a sleep that it is prepared for."""
        self.proposals: dict[str, list[int]] = {}
        self.result: ModelRunnerOutput | None = None

    # -------------------------------------------------------------- one step
    def execute_model(self, scheduled: SchedulerOutput, non_block: bool = False) -> Any:
        self.result = self._forward(scheduled)
        answer = None if scheduled.total_num_scheduled_tokens else self.result
        return done(answer) if non_block else answer

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        return done(self.result) if non_block else self.result

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        if not self.proposals:
            return None
        return DraftTokenIds(list(self.proposals), list(self.proposals.values()))

    def _forward(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        self._update_rows(scheduled)
        ids = list(scheduled.num_scheduled_tokens)
        computed = {
            n.req_id: n.num_computed_tokens for n in scheduled.scheduled_new_reqs
        }
        cached = scheduled.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self.proposals = {}
        tokens = [
            self._run(
                name,
                computed[name],
                scheduled.num_scheduled_tokens[name],
                scheduled.scheduled_spec_decode_tokens.get(name, []),
            )
            for name in ids
        ]
        index = {name: i for i, name in enumerate(ids)}
        return ModelRunnerOutput(ids, index, sampled_token_ids=tokens)

    def _update_rows(self, scheduled: SchedulerOutput) -> None:
        for name in scheduled.finished_req_ids:
            self.rows.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            known = list(new.prefill_token_ids or new.prompt_token_ids)
            blocks = [list(b) for b in new.block_ids]
            self.rows[new.req_id] = Row(known, blocks, self.generation)
        cached = scheduled.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            row, blocks = self.rows[name], cached.new_block_ids[index]
            if name in cached.resumed_req_ids:
                assert cached.all_token_ids[name] == row.tokens, f"{name} forgot tokens"
                row.blocks, row.admitted = [list(b) for b in blocks], self.generation
            elif blocks is not None:
                for mine, more in zip(row.blocks, blocks, strict=True):
                    mine.extend(more)

    def _run(self, name: str, start: int, count: int, drafts: list[int]) -> list[int]:
        row = self.rows[name]
        drafts = [d for d in drafts if d >= 0]
        known = len(row.tokens)
        text = row.tokens + drafts
        for position in range(start, min(start + count, len(text))):
            for group, memory in enumerate(self.memories):
                block = row.blocks[group][position // BLOCK]
                slot = (block, position % BLOCK)
                memory.slots[slot] = (text[position], position, self.generation)
        if start + count < known:
            return []  # a part of a prompt
        new: list[int] = []
        for draft in [*drafts, None]:
            token = self._sample(name, row)
            row.tokens.append(token)
            new.append(token)
            if token != draft:
                break
        if self.drafts:
            right = next_token(self.live, row.tokens)
            self.proposals[name] = [right, *([0] * (self.drafts - 1))]
        return new

    def _sample(self, name: str, row: Row) -> int:
        last = len(row.tokens) - 1
        written: tuple[int, ...] = ()
        for group, memory in enumerate(self.memories):
            first = 0 if memory.window is None else max(0, last - memory.window + 1)
            seen = []
            for position in range(first, last + 1):
                block = row.blocks[group][position // BLOCK]
                slot = memory.slots.get((block, position % BLOCK))
                assert slot is not None, f"{name} reads a slot nobody wrote"
                token, where, generation = slot
                assert (token, where) == (row.tokens[position], position), (
                    f"{name} reads KV of another token at {position}"
                )
                seen.append(generation)
            written = written or tuple(seen)
        token = next_token(self.live, row.tokens)
        weights = tuple(self.weights_of[generation] for generation in written)
        made = Sampled(token, self.live, weights, written, row.admitted)
        self.sampled.setdefault(name, []).append(made)
        return token

    # ------------------------------------------------------------------ calls
    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        ranks = self.parallel_config.world_size
        answer = getattr(self, f"_{method}", lambda *_: None)(*args)
        return done([answer] * ranks) if non_block else [answer] * ranks

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def _get_kv_cache_spec(self) -> dict[str, Any]:
        shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 32}
        shape["dtype"] = torch.float32
        specs: dict[str, Any] = {"layers.0.attn": FullAttentionSpec(**shape)}
        if self.windowed:
            windowed = SlidingWindowSpec(**shape, sliding_window=WINDOW)
            specs["layers.1.attn"] = windowed
        return specs

    def _determine_available_memory(self) -> int:
        return 1 << 24

    def _get_supported_kv_cache_layouts(self) -> list[str]:
        return ["NHD"]

    def _compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def _inflight_attach(self, path: str, num_ranks: int) -> Any:
        self.board = StatusBoard(path, num_ranks)
        return {"ok": {"reason": None, "bytes": 1, "is_reversible": True}}

    def _inflight_overwrite(self, move: str, *_: Any) -> Any:
        if move == "put_back":
            self.is_loading = False
        elif move == "overwritten":
            self.is_written = False
        report = WriteReport(
            is_written=self.is_written,
            is_loading=self.is_loading,
            num_required=1,
            displaced=self.displaced,
        )
        return {"ok": report.to_dict() if move in ("look", "put_back") else None}

    def _tests_write(self, weights: int, then: str = "") -> None:
        """A worker extension's method: writes in place, and may not come to its end."""
        self.live = weights
        self.generation += 1
        self.weights_of.append(weights)
        self.is_written = True
        if then:
            raise RuntimeError(then)

    def _tests_start_load(self) -> None:
        """Another one's, that takes layers aside."""
        self.is_loading = True

    def _tests_finish_load(self, weights: int) -> None:
        self.is_loading = False
        self._tests_write(weights)

    _reload_weights = _tests_write
    """Upstream's, with arguments of ours."""

    def _inflight_command(self, serial: int, command: str, values: Any) -> Any:
        if command == "receive":
            self.second = values["update_info"]["weights"]
        commands = {"start": 1, "receive": 2, "prepare": 3}[command]
        status = Status(
            serial,
            "staged" if command == "prepare" else "staging",
            orders=commands,
            bytes=1,
            opened=command != "start",
            digest=f"{self.second:032x}",
            unfilled=[],
        )
        for rank in range(self.board.num_ranks):
            self.board.post(rank, status.to_dict())
        return {"ok": None}

    def _inflight_prepare_sleep(self, level: int) -> Any:
        self.drowsy = level
        return {"ok": None}

    def _inflight_adapter(self, move: str, request: Any, *_: Any) -> Any:
        return {"ok": False}  # it has all there are

    def _inflight_flip(self, *_: Any) -> Any:
        self.live, self.second = self.second, self.live
        self.generation += 1
        self.weights_of.append(self.live)
        return {"ok": 0.0}


class Windowed(SimulatedExecutor):
    """With a second KV-cache group, of layers with a sliding window."""

    windowed = True


class Drafting(SimulatedExecutor):
    """With drafts, half of them right."""

    drafts = 2


class DraftingAhead(Drafting):
    """With drafts that the scheduler learns of when they have been judged.

    As on a GPU: it counts on all of them, and the worker goes on from those that it has
    taken.
    """

    def _init_executor(self) -> None:
        super()._init_executor()
        self.ahead: dict[str, list[int]] = {}

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return None

    def _run(self, name: str, start: int, count: int, drafts: list[int]) -> list[int]:
        known = len(self.rows[name].tokens)
        if start + count >= known:  # it samples
            proposed = self.ahead.pop(name, [])[: len(drafts)]
            drafts = proposed + drafts[len(proposed) :]
            start = min(start, known - 1)
        told = super()._run(name, start, count, drafts)
        if name in self.proposals:
            self.ahead[name] = self.proposals.pop(name)
        return told


def next_token(weights: int, text: list[int]) -> int:
    """What `weights` say after `text`."""
    mixed = weights * 7919 + len(text) * 104729 + sum(text[-7:]) * 31
    return mixed % 199


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
