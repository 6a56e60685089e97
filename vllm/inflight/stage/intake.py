"""What a new version must pass on its way in, tensor by tensor.

Every transport, ours or somebody else's, hands its tensors to the shadow's
`load_weights`. The intake stands in that door: it renames, compares with the
manifest, digests, refuses NaN, counts bytes for the progress report, and stops
the stream when the update was cancelled. Behind the door it watches which part
of which parameter each tensor fills, so that at the end a missing shard of a
fused parameter is as visible as a missing tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any

import torch

from vllm.inflight import ops, upstream
from vllm.inflight.errors import Cancelled, InflightError, WeightsMismatch
from vllm.inflight.names import checkpoint_names
from vllm.inflight.stage.audit import Audit, Pair
from vllm.inflight.stage.coverage import Fill
from vllm.inflight.stage.drift import Sampler
from vllm.inflight.stage.plan import Entry, Writes, replay
from vllm.inflight.stage.refusal import refusal
from vllm.inflight.stage.shadow import Shadow
from vllm.inflight.update import Manifest


class Intake:
    """The door of one update on one rank."""

    def __init__(
        self,
        shadow: Shadow,
        manifest: Manifest,
        *,
        verify: bool,
        allow_nonfinite: bool,
        cancelled: Callable[[], bool],
        progress: Callable[[int, int], None],
    ) -> None:
        self._shadow = shadow
        self._manifest = manifest
        self._verify = verify
        self._allow_nonfinite = allow_nonfinite
        self._cancelled = cancelled
        self._progress = progress
        self.fills = {n: Fill(s.numel()) for n, s in shadow.required.items()}
        """What has been written of each parameter."""
        self._known = shadow.known_names()
        self._seen: dict[str, ops.Digest] = {}
        self._entries: dict[str, tuple[tuple[int, ...], str]] = {}
        self._wrong: dict[str, str] = {}
        self._unknown: dict[str, tuple[list[int], str]] = {}
        self._audit = Audit(shadow.device, shadow.tables)
        self.sampler = Sampler(shadow.views)
        self._filling = 0
        self._handed: torch.Tensor | None = None
        self._entry: Entry | None = None  # recorded of the tensor the loader has
        self._broken: Exception | None = None
        self._watching: list[tuple[Any, Any]] = []
        self.unfilled: list[str] = []
        """Tensors that filled nothing on this rank; another stage may use them."""
        self.num_bytes = 0

    # ------------------------------------------------------------ the door
    def load_weights(self, weights: Iterable[Pair]) -> Any:
        """Stands in for the shadow's own `load_weights`."""
        module = self._shadow.module
        assert module is not None
        current: list[str] = []
        try:
            # The class's: the instance's own is this method.
            load: Callable[..., Any] = type(module).load_weights  # type: ignore[attr-defined]
            return load(module, self._admit(weights, current))
        except (InflightError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if error is self._broken:
                raise
            # Upstream's loaders refuse by assertion, KeyError or ValueError,
            # without the tensor's name: it is the one handed over last.
            if not current:
                raise
            name = current[0]
            shape, dtype = self._entries.get(name, ((), ""))
            if name not in self._known:
                self._unknown[name] = (list(shape), dtype)
                raise self._mismatch() from error
            self._wrong[name] = (
                f"the model cannot take it with shape {list(shape)} and dtype "
                f"{dtype}: {str(error) or type(error).__name__}"
            )
            raise self._mismatch() from error

    def _admit(self, weights: Iterable[Pair], current: list[str]) -> Iterator[Pair]:
        """What the model's loader has to see; what the plan knows is done here."""
        for batch in self._drawn(weights):
            if self._cancelled():
                raise Cancelled("the update was aborted")
            fresh = self._replay(self._accepted(batch))
            while fresh:
                name, tensor = fresh.pop(0)
                if name.endswith(self._shadow.spares):
                    continue
                current[:] = [name]
                before = self._filling
                self._handed, self._entry = tensor, Entry(tensor.shape, tensor.dtype)
                yield name, tensor
                if self._filling == before:
                    self.unfilled.append(name)
                if self._shadow.plan is not None:
                    self._shadow.plan.keep(name, self._entry)
                # A transport uses memory again that nobody looks into.
                self._handed = None
                del tensor
            self._progress(self.num_bytes, len(self._seen))
        current.clear()

    def _accepted(self, batch: list[Pair]) -> list[Pair]:
        """Those of a batch that may go on, under the model's names."""
        accepted: list[Pair] = []
        staying: list[Pair] = []
        plan = self._shadow.plan
        while batch:
            sent_name, tensor = batch.pop(0)
            name = self._manifest.name_map.get(sent_name, sent_name)
            if self._accept(name, tensor):
                is_home = plan is not None and plan.is_home(name, tensor)
                (staying if is_home else accepted).append((name, tensor))
                self.num_bytes += tensor.nbytes
        self.sampler.add(accepted)
        self.sampler.add_staying(staying)
        accepted += staying
        if self._verify and accepted and accepted[0][1].is_cuda:
            # Judged with the verdict: asking now would wait for the GPU.
            self._audit.add(accepted)
        return accepted

    def _replay(self, pairs: list[Pair]) -> list[Pair]:
        """Load what the plan knows, in one call; returns the others."""
        plan = self._shadow.plan
        if plan is None:
            return pairs
        fresh, known = [], []
        for name, tensor in pairs:
            entry = plan.entry(name, tensor)
            if entry is None:
                fresh.append((name, tensor))
                continue
            known.append((entry, tensor))
            for param, view in entry.filled:
                self.fills[param].views[view] = prod(view[1])
        replay(known)
        return fresh

    def _drawn(self, weights: Iterable[Pair]) -> Iterator[list[Pair]]:
        """`weights`, as many at once as their transport has."""
        batches = getattr(weights, "batches", None)
        if (into := getattr(weights, "into", None)) is not None:
            own = self._manifest.name_map
            into(lambda name, *form: self._shadow.place(own.get(name, name), *form))
        try:
            yield from batches() if batches else ([pair] for pair in weights)
        except Exception as error:
            # Remembered as a failure of the transport, and not the model's.
            self._broken = error
            raise

    def _accept(self, name: str, tensor: torch.Tensor) -> bool:
        """Check one tensor; what is wrong is kept, so a refusal lists it all."""
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if name in self._seen:
            self._wrong[name] = "it was sent twice"
            return False
        self._entries[name] = (shape, dtype)
        spec = self._manifest.tensors.get(name)
        if self._manifest.tensors and spec is None:
            self._wrong[name] = "the manifest does not announce it"
            return False
        if spec is not None and (spec.shape, spec.dtype) != (shape, dtype):
            self._wrong[name] = (
                f"announced as {list(spec.shape)} {spec.dtype}, "
                f"arrived as {list(shape)} {dtype}"
            )
            return False
        if not self._is_known(name, shape, dtype):
            return False
        self._seen[name] = ops.Digest.ZERO
        if not self._verify or tensor.is_cuda:
            return True
        bad = 0 if self._allow_nonfinite else ops.count_nonfinite([tensor])[0]
        return self._judge(name, ops.digest([tensor])[0], bad)

    def _judge(self, name: str, digest: ops.Digest, num_nonfinite: int) -> bool:
        """Whether the content of a tensor is what was announced, and can be served."""
        self._seen[name] = digest
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

    def _is_known(self, name: str, shape: tuple[int, ...], dtype: str) -> bool:
        if self._shadow.asks_loader or name.endswith(self._shadow.spares):
            return True
        if name not in self._known:
            self._unknown[name] = (list(shape), dtype)
            return False
        # The shape is known to the loaders, for every shard; they refuse.
        expected = self._known[name][1] or dtype
        kinds = [
            getattr(torch, d, torch.int8).is_floating_point for d in (dtype, expected)
        ]
        if kinds[0] != kinds[1]:
            self._wrong[name] = f"it is {dtype}, the model's is {expected}"
            return False
        return True

    # ------------------------------------------------------ behind the door
    def watch(self) -> None:
        """Put the intake into the shadow, once its transport has started."""
        module = self._shadow.module
        assert module is not None
        module.load_weights = self.load_weights  # type: ignore[assignment]
        for prefix, layer in module.named_modules():
            for key, tensor in (*layer._parameters.items(), *layer._buffers.items()):
                name = f"{prefix}.{key}" if prefix else key
                if tensor is None or name not in self.fills:
                    continue
                loader = getattr(tensor, "weight_loader", None)
                self._watching.append((tensor, loader))
                tensor.weight_loader = self._watched(
                    name, loader or upstream.default_weight_loader
                )

    def unwatch(self) -> None:
        """Take the intake out of the shadow again."""
        module = self._shadow.module
        assert module is not None
        vars(module).pop("load_weights", None)
        # Upstream keeps these tensors for the next reload, loaders and all.
        for tensor, loader in self._watching:
            if loader is None:
                del tensor.weight_loader
            else:
                tensor.weight_loader = loader
        self._watching.clear()

    def _watched(self, name: str, loader: Callable[..., Any]) -> Callable[..., Any]:
        fill = self.fills[name]

        def online_process_loader(*args: Any, **kwargs: Any) -> Any:
            param = args[0] if args else kwargs["param"]
            with Writes(name, param, self._handed, self._entry) as writes:
                result = loader(*args, **kwargs)
            self._filling += 1
            fill.views.update(writes.views)
            return result

        # Upstream's reload wraps a loader unless it finds its own name on it.
        online_process_loader.__wrapped__ = loader  # type: ignore[attr-defined]
        return online_process_loader

    def verdict(self) -> str:
        """The manifest digest of what arrived; raises `WeightsMismatch`.

        Completeness is judged on the parameters: every element of every one has
        been written, whatever the checkpoint tensors are called.
        """
        for name, digest, bad in self._audit.results():
            self._judge(name, digest, bad)
        missing = [name for name, fill in self.fills.items() if fill.missing]
        announced = self._manifest.tensors.keys() - self._seen.keys()
        if missing or announced or self._wrong or self._unknown:
            raise self._mismatch(missing, sorted(announced - self._wrong.keys()))
        return ops.manifest_digest(
            (name, dtype, shape, self._seen[name])
            for name, (shape, dtype) in self._entries.items()
            if name in self._seen
        )

    def _mismatch(
        self, missing: Iterable[str] = (), announced: Iterable[str] = ()
    ) -> WeightsMismatch:
        absent = [n for p in missing for n in self._absent(p)]
        absent += [n for n in announced if n not in absent]
        return refusal(self._unknown, self._wrong, absent, self._known)

    def _absent(self, param: str) -> list[str]:
        fused = getattr(self._shadow.module, "packed_modules_mapping", {}) or {}
        names = checkpoint_names(param, fused)
        return [n for n in names if n not in self._seen] or names
