"""The proof of a plan: what it replays is what the loaders do.

A loader is recorded at one update. At the next one its tensors are replayed and then
loaded once more, and what is in the parameters after the one has to be, bit for bit,
what is there after the other. So whatever the record or the copying got wrong, the
version that is served is the loaders'. Only what was proved is replayed alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm.inflight import ops, upstream
from vllm.inflight.stage.audit import Audit
from vllm.inflight.stage.plan import Entry, Plan, replay

logger = upstream.init_logger(__name__)

NEITHER = 3
"""What is nobody's weight, and in the place of one shows that nothing was copied."""

Known = tuple[str, Entry, torch.Tensor]
"""A tensor's name, what was recorded for it, and the tensor."""


class Sums:
    """Digests of parameters as they are now, on the current stream."""

    def __init__(self, params: Mapping[str, torch.Tensor]) -> None:
        self._audit: Audit | None = None
        self._digests: list[ops.Digest] = []
        (device,) = {param.device for param in params.values()}
        if device.type == "cuda":
            # Asked for at the end of the update: to ask now would wait for the GPU.
            self._audit = Audit(device, {})
            self._audit.add(list(params.items()))
        else:
            self._digests = ops.digest(list(params.values()))

    def results(self) -> list[ops.Digest]:
        """One for each parameter, in order."""
        if self._audit is None:
            return self._digests
        found = {name: digest for name, digest, _ in self._audit.results()}
        return [found[name] for name in sorted(found)]


@dataclass(frozen=True, slots=True)
class Trial:
    """Some tensors that were replayed, and the parameters that it wrote to."""

    known: list[tuple[str, Entry]]
    params: dict[str, torch.Tensor]
    replayed: Sums


class Proof:
    """The trials of one update.

    Args:
        plan: what is to be proved.
        module: the tree that is loaded.

    """

    def __init__(self, plan: Plan, module: torch.nn.Module) -> None:
        self._plan = plan
        self._params = dict(module.named_parameters())
        self._open: Trial | None = None
        self._ended: list[tuple[Trial, Sums]] = []

    def replay(self, known: Sequence[Known]) -> None:
        """Replay these tensors, which are about to be loaded as well."""
        for _, entry, _ in known:
            for target in (*(target for target, _ in entry.copies), *entry.zeros):
                target.fill_(NEITHER)
        replay([(entry, tensor) for _, entry, tensor in known])
        names = {param for _, entry, _ in known for param, _ in entry.filled}
        params = {name: self._params[name].data for name in sorted(names)}
        entries = [(name, entry) for name, entry, _ in known]
        self._open = Trial(entries, params, Sums(params))

    def loaded(self) -> None:
        """What was replayed last has been loaded."""
        if self._open is not None:
            sums = Sums(self._open.params)
            self._ended.append((self._open, sums))
            self._open = None

    def judge(self) -> None:
        """Let the plan replay what was proved, and never again what was not."""
        for trial, loaded in self._ended:
            if trial.replayed.results() == loaded.results():
                for _, entry in trial.known:
                    entry.is_proved = True
                continue
            names = [name for name, _ in trial.known]
            self._plan.refuse(names)
            logger.error(
                "what was recorded of the model's loaders is not what they do, for one "
                "of %d tensors (%s, ...); these are loaded by them at every update, "
                "which is slower",
                len(names),
                ", ".join(names[:4]),
            )
        self._ended.clear()
