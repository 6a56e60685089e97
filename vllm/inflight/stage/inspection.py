"""The inspection of what arrives: each tensor against the manifest and the model.

What is wrong is kept and not raised, so that one refusal names all of it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import zip_longest
from math import prod

import torch

from vllm.inflight import ops
from vllm.inflight.errors import WeightsMismatch
from vllm.inflight.names import matcher
from vllm.inflight.stage.content import Facts
from vllm.inflight.stage.origin import Origin, Shape
from vllm.inflight.stage.refusal import refusal, require_matches
from vllm.inflight.stage.shadow import Known
from vllm.inflight.stage.spares import Spares
from vllm.inflight.update import Manifest

PLAIN = {"bfloat16", "float16", "float32", "float64"}
"""Dtypes of one number in several lengths: what comes in one can be kept in another."""

IS_TIED = (
    "it is tied to the embedding here, and is not what came as that; "
    "an engine that is started from these weights can serve both"
)
"""What is wrong with a head that is not the embedding it is tied to."""

NO_SUCH = (KeyError, AttributeError, ValueError)
"""What loaders raise that do not know a name."""


class Inspection:
    """The tensors of one update on one rank, under the model's names.

    Args:
        manifest: what was announced.
        known: the names that the model's parameters have in a checkpoint.
        spares: what may come and is of no use.
        origin: the tensors of the checkpoint that the engine started from.
        asks_loader: whether the model's loader alone can tell what a name is.
        allow_nonfinite: whether NaN and Inf are served.

    """

    def __init__(
        self,
        manifest: Manifest,
        known: Known,
        spares: Spares,
        origin: Origin,
        *,
        asks_loader: bool,
        allow_nonfinite: bool,
    ) -> None:
        self._manifest = manifest
        self._known = known
        self._spares = spares
        self._origin = origin
        self._asks_loader = asks_loader
        self._allow_nonfinite = allow_nonfinite
        self._is_declared = matcher(manifest.subset)
        self._entries: dict[str, tuple[tuple[int, ...], str]] = {}
        """Shape and dtype of all that came."""
        self._digests: dict[str, ops.Digest] = {}
        """Of what was admitted."""
        self._wrong: dict[str, str] = {}
        self._unknown: dict[str, tuple[list[int], str]] = {}

    @property
    def num_seen(self) -> int:
        """How many tensors were admitted."""
        return len(self._digests)

    @property
    def num_unknown(self) -> int:
        """How many the model has no place for."""
        return len(self._unknown)

    @property
    def objects(self) -> bool:
        """Whether anything is wrong, or announced and not there."""
        return bool(self._wrong or self._unknown or self._announced())

    def may_come(self, name: str) -> bool:
        """Whether the update may have such a tensor: a subset declares its own."""
        return not self._manifest.subset or self._is_declared(name)

    def is_spare(self, name: str) -> bool:
        """Whether it may come, and this engine has no use for it."""
        is_part = bool(self._manifest.subset)
        return name in self._spares or (not is_part and self._spares.has_left_out(name))

    def is_strange(self, name: str) -> bool:
        """Whether the model has no such name, though most of its others are known."""
        return name not in self._known and not self._asks_loader

    def is_renamed(self, name: str, params: Container[str]) -> bool:
        """Whether what such a tensor fills has another name in a checkpoint.

        A loader that maps names takes a fused parameter by the engine's name of it, one
        of `params`, and its parts by theirs.
        """
        return self.is_strange(name) or (name not in self._known and name in params)

    def admits(self, name: str, tensor: torch.Tensor) -> bool:
        """Check all but the content of a tensor; whether it may go on to the loader."""
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if name in self._digests:
            self._wrong[name] = "it was sent twice"
            return False
        self._entries[name] = (shape, dtype)
        spec = self._manifest.tensors.get(name)
        if not self.may_come(name):
            self._wrong[name] = "no pattern of the subset declares it"
            return False
        if self._manifest.tensors and spec is None:
            self._wrong[name] = "the manifest does not announce it"
            return False
        if spec is not None and (spec.shape, spec.dtype) != (shape, dtype):
            self._wrong[name] = (
                f"announced as {list(spec.shape)} {spec.dtype}, "
                f"arrived as {list(shape)} {dtype}"
            )
            return False
        if tensor.is_complex() or tensor.is_quantized:
            # Not even its content can be looked at (ops.py), whatever it is called.
            self._wrong[name] = f"it is {dtype}, which no model has"
            return False
        misfit = self._misfit(name, shape, dtype)
        # Asked of what does not fit alone: to map a name takes microseconds.
        if misfit is not None and not self.is_spare(name):
            self._wrong[name] = misfit
            return False
        self._digests[name] = ops.Digest.ZERO
        return True

    def judge(self, name: str, digest: ops.Digest, num_nonfinite: int) -> bool:
        """Whether the content of a tensor is what was announced, and can be served."""
        self._digests[name] = digest
        spec = self._manifest.tensors.get(name)
        if spec is not None and spec.digest not in (None, digest.hex()):
            self._wrong[name] = (
                f"its digest is {digest.hex()}, announced was {spec.digest}"
            )
            return False
        if num_nonfinite and not self._allow_nonfinite:
            self._wrong[name] = f"{num_nonfinite} of its elements are NaN or Inf"
            return False
        return True

    def note_unknown(self, name: str) -> None:
        """The model has no place for a tensor that came."""
        shape, dtype = self._entries[name]
        self._unknown[name] = (list(shape), dtype)

    def note_wrong(self, name: str, why: str) -> None:
        """A tensor, or a parameter, cannot be served as it came."""
        self._wrong[name] = why

    def note_cut(self, name: str, num_unread: int) -> None:
        """A loader has used a part of a tensor, and no other rank has the rest."""
        shape, _ = self._entries[name]
        self._wrong[name] = (
            f"its shape is {list(shape)}, and the model has no place for {num_unread} "
            f"of its {prod(shape)} elements"
        )

    def note_refused(self, name: str, error: Exception) -> None:
        """The model's loader has refused a tensor."""
        if name not in self._known and isinstance(error, NO_SUCH):
            self.note_unknown(name)
            return
        shape, dtype = self._entries[name]
        self._wrong[name] = (
            f"the model cannot take it with shape {list(shape)} and dtype "
            f"{dtype}: {str(error) or type(error).__name__}"
        )

    def compare_heads(self) -> None:
        """A tied head has no place of its own: what comes of it is the embedding."""
        if not self._spares.has_tied_head:
            return
        facts = self.facts()
        for name in filter(self._spares.is_tied, facts):
            if not any(facts[n] == facts[name] for n in facts if n != name):
                self._wrong[name] = IS_TIED

    def require_subset(self) -> None:
        """Raise `WeightsMismatch` if nothing came of a subset, or it names what is not.

        Known by now, and not before: a loader may rename, and takes names that the
        model does not have.
        """
        if not (subset := self._manifest.subset):
            return
        require_matches(subset, {**self._known, **self._entries})
        if all(name in self._spares for name in self._digests):
            raise WeightsMismatch(
                f"nothing was sent of the subset {', '.join(subset[:8])}",
                tensors=subset,
            )

    def refusal(
        self, missing: Mapping[str, list[str]], *, is_end: bool
    ) -> WeightsMismatch:
        """The error that names all that is wrong.

        Args:
            missing: each parameter that is not full, and what it is made of. If that
                is not how it was when the engine started, the parameter is named.
            is_end: whether what was announced should have come by now.

        """
        absent: list[str] = []
        for param, names in missing.items():
            if self._origin and not any(n in self._origin for n in names):
                absent.append(param)
                continue
            absent += [n for n in names if n not in self._digests] or names
        if is_end:
            absent += [n for n in self._announced() if n not in absent]
        return refusal(self._unknown, self._wrong, absent, self._known)

    def hollow(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Of those that came, tensors of their shapes and dtypes with no content."""
        for name in names:
            shape, dtype = self._entries[name]
            yield name, torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    def facts(self) -> dict[str, Facts]:
        """What was admitted, with its content."""
        return {
            name: (dtype, shape, (digest.a, digest.b))
            for name, (shape, dtype) in self._entries.items()
            if (digest := self._digests.get(name)) is not None
        }

    def _misfit(self, name: str, shape: Shape, dtype: str) -> str | None:
        """Why the model has no use for such a tensor; None if it may have."""
        expected = self._known.get(name, (None, None))[1] or dtype
        if dtype != expected and not {dtype, expected} <= PLAIN:
            return f"it is {dtype}, the model's is {expected}"
        whole = self._origin.shape(name)
        if whole is None or shape == whole or _is_alike(shape, whole):
            return None
        return (
            f"its shape is {list(shape)}; in the checkpoint that the engine was "
            f"started from it is {list(whole)}"
        )

    def _announced(self) -> list[str]:
        """What was announced, did not come, and is not wrong by another count."""
        missing = self._manifest.tensors.keys() - self._digests.keys()
        return sorted(missing - self._wrong.keys())


def _is_alike(shape: Shape, whole: Shape) -> bool:
    """Whether they differ in nothing but ones at the end: a scale is [] or [1, 1]."""
    longest = zip_longest(shape, whole, fillvalue=1)
    return all(came == expected for came, expected in longest)
