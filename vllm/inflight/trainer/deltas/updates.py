"""Updates of a trainer engine as deltas, from the version that it published last.

The last version is kept in memory. It becomes the next one when a commit is confirmed.
A whole version is first copied over the kept one, and sent from there. So the source
is read once for an update, whatever the engines answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from vllm.inflight.delta.parts import named
from vllm.inflight.errors import BaseMismatch
from vllm.inflight.trainer.deltas.batches import WHOLE_FROM, require_share
from vllm.inflight.trainer.deltas.chain import KEPT_DELTAS, DeltaChain
from vllm.inflight.trainer.deltas.delta import OF_A_DELTA, Delta, DeltaSearch
from vllm.inflight.trainer.deltas.policy import DeltaPolicy, Sent
from vllm.inflight.trainer.deltas.published import (
    SCRUB_EVERY,
    KeptScrubs,
    PublishedVersion,
    digests_of,
)
from vllm.inflight.trainer.snapshot import check_tensor
from vllm.inflight.trainer.sources.stream import Pair
from vllm.inflight.update import Manifest, TensorSpec

logger = logging.getLogger(__name__)

Transfer = Callable[[Manifest, list[Pair]], str | None]
"""Has the engines commit one update: its manifest, and the tensors to send. Returns the
digest of what they serve then, if they told it."""


class DeltaUpdates:
    """Sends versions, as deltas where it can.

    Args:
        client: the inference side.
        policy: `auto`, `always` or `off`.
        memory: where the last version is kept: `device`, or `host`.
        device: the device of the trainer's weights.
        transfer: runs one update.
        scrub_every: deltas from one scrub of the kept version to the next; 0: none.
        chain_length: committed deltas that are kept for engines that missed them.
        whole_from: share of a version's bytes from which `auto` sends it whole.

    Raises:
        ConfigError: the policy or the memory is none of these, or deltas are to be sent
            `always` and the client takes no manifest.

    """

    def __init__(
        self,
        client: Any,
        policy: str,
        memory: str,
        device: torch.device,
        transfer: Transfer,
        scrub_every: int = SCRUB_EVERY,
        chain_length: int = KEPT_DELTAS,
        whole_from: float = WHOLE_FROM,
    ) -> None:
        require_share(whole_from)
        self._whole_from = whole_from
        self._policy = DeltaPolicy(policy, memory, client)
        self._chain = DeltaChain(chain_length)
        self._scrubs = KeptScrubs(scrub_every)
        self.last: Sent | None = None
        """The last update that was committed with a manifest; None: there is none."""
        self._client = client
        self.device = torch.device("cpu") if memory == "host" else device
        """Where the last version is kept."""
        self._is_pinned = device.type == "cuda" and memory == "host"
        self._transfer = transfer
        self._tensors: dict[str, torch.Tensor] = {}
        """The memory of the kept version; its content may be one that is not served."""
        self._base: PublishedVersion | None = None
        """The kept version, if the engines have confirmed it."""

    @property
    def policy(self) -> str:
        """`auto`, `always` or `off`; may be changed between two updates."""
        return self._policy.name

    @policy.setter
    def policy(self, name: str) -> None:
        self._policy.name = name

    @property
    def are_wanted(self) -> bool:
        """Whether the next update goes through here.

        The parameters of a subset are no version, so no delta starts from them.
        """
        is_subset = getattr(self._client, "is_subset_announced", False)
        return self.policy != "off" and not is_subset

    def forget(self) -> None:
        """Keep no version: another one than the kept one is sent now."""
        self._base, self._tensors = None, {}
        self._chain.clear()

    def send(self, gathered: Iterable[Pair]) -> None:
        """Run one update: a delta, or the whole version.

        Args:
            gathered: all tensors; each may change once the next one is taken.

        Raises:
            InflightError: what an engine refused. It serves what it served.

        """
        began = time.perf_counter()
        base = self._base
        found: Delta | Iterable[Pair] = gathered
        if base is not None:
            found = DeltaSearch(base, self.policy, self._whole_from).find(gathered)
        if isinstance(found, Delta):
            search_s = time.perf_counter() - began
            if self._send_delta(found, search_s):
                return
            self._base = None
            whole = found.commit()
        else:
            self._base = None
            whole = self._keep(found)
            search_s = time.perf_counter() - began
        self._chain.clear()
        pairs = list(whole.pairs())
        served = self._transfer(Manifest(whole.specs), pairs)
        self._confirm(whole, served, is_delta=False, pairs=pairs, search_s=search_s)

    def _send_delta(self, delta: Delta, search_s: float) -> bool:
        """Send a delta; False if the version has to be sent whole."""
        try:
            served, pairs = self._transferred(delta)
        except OF_A_DELTA as error:
            self._policy.note_rejected(error)
            return False
        self._policy.note_committed()
        self._base = None  # until the kept version is the one that is served
        version = delta.commit()
        self._chain.note(delta)
        self._confirm(version, served, is_delta=True, pairs=pairs, search_s=search_s)
        return True

    def _transferred(self, delta: Delta) -> tuple[str | None, list[Pair]]:
        """Send a delta, from an older version if that is what the engines serve.

        Returns the digest that is served then, and what was sent.
        """
        pairs = list(named(delta.body.parts))
        try:
            return self._transfer(delta.manifest(None), pairs), pairs
        except BaseMismatch as error:
            served = () if error.served is None else (error.served,)
            longer = None
            if served:
                asked = served, delta, self.policy
                longer = self._chain.since(*asked, self._whole_from)
            if longer is None:
                raise
            logger.info("a delta from an older version is sent: %s", error)
        pairs = list(named(longer.body.parts))
        return self._transfer(longer.manifest(None), pairs), pairs

    def _confirm(
        self,
        version: PublishedVersion,
        served: str | None,
        *,
        is_delta: bool,
        pairs: list[Pair],
        search_s: float,
    ) -> None:
        """The engines serve this version now."""
        num_bytes = sum(tensor.nbytes for _, tensor in pairs)
        self.last = Sent(is_delta, num_bytes, search_s)
        # Where an engine digests other tensors than were sent, no delta has its base.
        is_served = served in (None, version.digest)
        is_sound = is_served and self._scrubs.is_sound(version, is_delta=is_delta)
        self._base = version if is_sound else None

    def _keep(self, pairs: Iterable[Pair]) -> PublishedVersion:
        """Copy a whole version over the kept one."""
        before, self._tensors = self._tensors, {}
        for name, tensor in pairs:
            check_tensor(name, tensor, self._tensors)
            kept = before.get(name)
            if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
                kept = torch.empty(
                    tensor.shape,
                    dtype=tensor.dtype,
                    device=self.device,
                    pin_memory=self._is_pinned,
                )
            if kept is not tensor:
                kept.copy_(tensor.detach())
            self._tensors[name] = kept
        del before
        digests = digests_of(list(self._tensors.items()))
        specs = {
            name: TensorSpec(name, tuple(t.shape), _dtype_name(t), digest.hex())
            for (name, t), digest in zip(self._tensors.items(), digests, strict=True)
        }
        return PublishedVersion(self._tensors, specs)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
