"""The proof of a plan: what it replays is what the loaders do.

A loader is recorded at one update. At the next one its tensors are replayed and then
loaded once more, and where a tensor went there has to be, bit for bit, the same after
both. So whatever the record or the copying got wrong, the version that is served is the
loaders'. Only what was proved is replayed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm.inflight import ops, upstream
from vllm.inflight.stage.audit import Audit, Pair, Tables
from vllm.inflight.stage.plan import Entry, Plan, replay

NEITHER = 3
"""What is nobody's weight, and in the place of one shows that nothing was written."""

logger = upstream.init_logger(__name__)

Known = tuple[str, Entry, torch.Tensor]
"""A tensor's name, what was recorded for it, and the tensor."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One tensor that was replayed, and is loaded as well."""

    number: int
    name: str
    entry: Entry

    @property
    def targets(self) -> list[torch.Tensor]:
        """Where it goes."""
        return [*(target for target, _ in self.entry.copies), *self.entry.zeros]

    def keys(self, when: str) -> list[str]:
        """What the digests of its targets are kept under."""
        return [f"{when} {self.number} {n}" for n in range(len(self.targets))]


class Proof:
    """The trials of one update."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._trials: list[Trial] = []
        self._open: list[Trial] = []
        self._digests: dict[str, ops.Digest] = {}
        self._audit: Audit | None = None
        self._tables: Tables = {}

    def replay(self, known: Sequence[Known]) -> None:
        """Replay these tensors, which are about to be loaded as well."""
        first = len(self._trials)
        self._open = [
            Trial(first + number, name, entry)
            for number, (name, entry, _) in enumerate(known)
        ]
        self._trials += self._open
        self._clear()
        replay([(entry, tensor) for _, entry, tensor in known])
        self._sum("replayed")
        # Of what was not loaded after all, nothing would be proved.
        self._clear()

    def loaded(self) -> None:
        """What was replayed last has been loaded."""
        self._sum("loaded")
        self._open = []

    def judge(self) -> None:
        """Let the plan replay what was proved, and never again what was not."""
        if self._audit is not None:
            results = self._audit.results()
            self._digests |= {key: digest for key, digest, _ in results}
        found = self._digests
        wrong = []
        for trial in self._trials:
            replayed, loaded = (
                [found.get(key) for key in trial.keys(when)]
                for when in ("replayed", "loaded")
            )
            trial.entry.is_proved = replayed == loaded
            if not trial.entry.is_proved:
                wrong.append(trial.name)
        self._plan.refuse(wrong)
        if wrong:
            logger.error(
                "what was recorded of the model's loaders is not what they do with %d "
                "tensors (%s): these go through them at every update, which is slower",
                len(wrong),
                ", ".join(wrong[:4]),
            )
        self._trials = []

    def _clear(self) -> None:
        for trial in self._open:
            for target in trial.targets:
                target.fill_(NEITHER)

    def _sum(self, when: str) -> None:
        """Digests of the targets as they are now, on the current stream."""
        pairs: list[Pair] = []
        for trial in self._open:
            pairs += zip(trial.keys(when), trial.targets, strict=True)
        if not pairs:
            return
        device = pairs[0][1].device
        if device.type == "cuda":
            # Asked for at the end of the update: to ask now would wait for the GPU.
            if self._audit is None:
                self._audit = Audit(device, self._tables)
            self._audit.add(pairs)
            return
        digests = ops.digest([target for _, target in pairs])
        self._digests |= dict(zip((key for key, _ in pairs), digests, strict=True))
