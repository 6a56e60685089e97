"""Looking for changes in batches of tensors: one is compared while another is encoded.

A GPU compares a batch while the host chooses the forms of the one before. So it always
has something to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, Literal, TypeVar

import torch

from vllm.inflight.delta.encode import Encoder, Search
from vllm.inflight.delta.part import Part
from vllm.inflight.errors import ConfigError

WHOLE_FROM = 0.25
"""Share of a version's bytes from which the policy `auto` sends the version whole: over
wires where most of the time is that of the bytes."""

WHOLE_FROM_OVER_NCCL = 0.06
"""The same over NCCL between GPUs. A whole version comes fast there, and an engine
writes an element of a delta more slowly than one of a whole tensor. On H200 of one
host, 3 % of an 8B model took 0.55 of a whole version, and each percent 14 ms of 200."""

WHOLE_FROM_OVER_IPC = 0.04
"""The same where a GPU lends its memory. On an H200 that trainer and engine share, 3 %
of an 8B model took 0.79 of a whole version, and 10 % took 1.9."""

LOOKED_AT_BYTES = 16 << 20
"""Bytes that are compared before anything is said of the others."""

LOOKED_AT_SHARE = 1 / 256
"""Share of a version's bytes that is compared before anything is said of a layer."""

FIRST_LAYERS = 4
"""So many layers are compared on a GPU in batches of their own."""

BATCH_BYTES = 1 << 30
"""Bytes of tensors that a GPU compares at once. Two such batches are there at a time.
"""

T = TypeVar("T")


class BatchedSearch(Generic[T]):
    """Compares batches of tensors, and encodes what has changed.

    Tensors that have changed are numbered from 0 on, over all batches.

    Args:
        policy: with `auto` a delta may be too dear.
        values: the form of the values, as of `Encoder`.
        whole_from: share of the bytes from which a delta is too dear.
        num_bytes: bytes of all tensors that will come; 0 if that is not known.

    Attributes:
        parts: of the delta, so far.

    """

    def __init__(
        self,
        policy: str,
        values: Literal["auto", "difference"] = "auto",
        *,
        whole_from: float = WHOLE_FROM,
        num_bytes: int = 0,
    ) -> None:
        self.parts: list[Part] = []
        self._num_all = num_bytes
        self._policy, self._whole_from = policy, whole_from
        self._encoder = Encoder(values=values)
        self._begun: tuple[Sequence[T], Search, str | None] = [], Search([], None), None
        """The batch that is compared now, and its layer."""
        self._num_changed = 0
        self._num_full = 0
        """Bytes of the parts."""
        self._num_compared = 0
        """Bytes of the tensors of the batches that are finished."""
        self._layers: dict[str, tuple[int, int]] = {}
        """Of each layer, bytes that were compared, and bytes of the delta."""

    def compare(
        self,
        batch: Sequence[T],
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        layer: str | None = None,
    ) -> tuple[Sequence[T], list[T]]:
        """Begin to compare a batch, and finish the one before.

        Args:
            batch: what the caller calls these tensors.
            pairs: each before and now, as for `Encoder.search`. None may change before
                the batch is finished.
            layer: that the tensors are of, if they are of one.

        Returns:
            as `finish`, of the batch before.

        """
        search = self._encoder.search(pairs)
        finished = self.finish()
        self._begun = batch, search, layer
        return finished

    def finish(self) -> tuple[Sequence[T], list[T]]:
        """Finish the batch that was begun.

        Returns:
            the batch, and those of it that have changed. Without one, both are empty.

        """
        batch, search, layer = self._begun
        self._begun = [], Search([], None), None
        num_bytes = self._num_bytes
        self._note(self._encoder.add_found(self._num_changed, search))
        has_changed = self._encoder.have_changed
        changed = [one for one, has in zip(batch, has_changed, strict=True) if has]
        self._num_changed += len(changed)
        size = sum(now.nbytes for _, now in search.pairs)
        self._num_compared += size
        if layer is not None:
            compared, found = self._layers.get(layer, (0, 0))
            found += self._num_bytes - num_bytes
            self._layers[layer] = compared + size, found
        return batch, changed

    def add_nothing(self, tensor: torch.Tensor) -> None:
        """Have the delta change an element of a tensor to what it is: the next one."""
        first = tensor.view(-1)[:1]
        place = torch.zeros(1, dtype=torch.int64, device=first.device)
        self._note(self._encoder.add_places(self._num_changed, place, first, first))

    def close(self) -> None:
        """Have all parts, once every batch is finished."""
        self._note(self._encoder.finish())

    @property
    def is_dear(self) -> bool:
        """Whether the whole version would cost less than the delta so far."""
        is_dear = self._num_bytes >= self._whole_from * self._num_compared
        return is_dear and self._policy == "auto"

    @property
    def is_given_up(self) -> bool:
        """Whether a delta of all tensors is believed to cost more than the whole.

        One layer may have changed much more than the others, and an embedding much
        less. So the rest is believed to change like one of the layers that were
        compared, of which a third at most has changed less.
        """
        most = self._whole_from * self._num_all
        if self._policy != "auto" or not most:
            return False
        if self._num_bytes >= most:
            return True  # whatever comes
        least = LOOKED_AT_SHARE * self._num_all
        rates = [num / size for size, num in self._layers.values() if size >= least]
        if self._num_compared < LOOKED_AT_BYTES or len(rates) < 2:
            return False
        rate = sorted(rates)[(len(rates) - 1) // 3]
        return self._num_bytes + rate * (self._num_all - self._num_compared) >= most

    @property
    def is_unsure(self) -> bool:
        """Whether a batch should have tensors of one layer alone.

        Then little is compared in vain.
        """
        return self._policy == "auto" and len(self._layers) < FIRST_LAYERS

    @property
    def _num_bytes(self) -> int:
        """Bytes of the delta so far."""
        return self._num_full + self._encoder.num_bytes

    def _note(self, parts: Iterable[Part]) -> None:
        for part in parts:
            self.parts.append(part)
            self._num_full += part.num_bytes


def require_share(whole_from: float) -> None:
    """Raise `ConfigError` if this is no share from which a version is sent whole."""
    if not 0 < whole_from <= 1:
        raise ConfigError(
            "delta_whole_from is a share of a version's bytes, more than 0 and at "
            f"most 1, got {whole_from!r}"
        )


def batch_bytes(device: torch.device) -> int:
    """Bytes of tensors that are compared at once on a device."""
    return 0 if device.type == "cpu" else BATCH_BYTES
