"""Parameters of the shadow model that a method of a worker extension writes itself.

Some frameworks know the engine's parameters by name, and copy into them without
`load_weights` of the model. Such a copy is let through if it can be accounted for: it
writes elements of one parameter that nothing else has written in this update. An update
is complete when every element was written, as with `load_weights`.

The tensors have no names of a checkpoint, and a rank gets its own part of them. So what
is digested is the content of the parameters, when all is written: what will be served.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from vllm.inflight import ops, upstream
from vllm.inflight.errors import Cause, Conflict
from vllm.inflight.ops.gpu_digest import GpuDigest
from vllm.inflight.tensor_names import PLAIN
from vllm.inflight.worker.replay_plan import View, are_apart
from vllm.inflight.worker.shadow.parameters import is_mirrored
from vllm.inflight.worker.shadow.shadow_model import ShadowModel
from vllm.inflight.worker.staging.coverage import Coverage

Problems = Iterator[tuple[str, Cause, str]]
"""Parameter, cause, and a clause that says why."""


class ParameterWrites:
    """The parameters that one update's method writes itself, on one rank.

    Args:
        shadow: the shadow model.
        coverage: of the update.

    """

    def __init__(self, shadow: ShadowModel, coverage: Coverage) -> None:
        self._shadow, self._coverage = shadow, coverage

    @property
    def names(self) -> list[str]:
        """The parameters that were begun so, sorted."""
        return sorted(self._coverage.written)

    @property
    def _are_in_place(self) -> bool:
        """Whether parameters stay where they are during a load."""
        assert self._shadow.module is not None
        return is_mirrored(self._shadow.module)

    def obstacle(self, name: str) -> str | None:
        """Why a method may not write a parameter itself, as a clause; None if it may.

        With delta staging it has no memory to write to. A quantised layer is processed
        from the tensors of a checkpoint, and may keep more than its parameters.
        """
        if name in self._shadow.quantised:
            return (
                "whose layer is quantised, so its content is made from the tensors of "
                "a checkpoint and from nothing else"
            )
        if self._shadow.log is not None:
            return "which has no memory with --inflight-staging delta"
        if not self._coverage.lets_write or name not in self._coverage.fills:
            return "and no version of the engine has it"
        return None

    def may_be_read(self, name: str) -> bool:
        """Whether a parameter has the content that this update has written."""
        # Such a layer has its content when its load is complete, which is later.
        is_late = not self._are_in_place or name in self._shadow.quantised
        fill = self._coverage.fills.get(name)
        return not is_late and fill is not None and not fill.missing

    def write(
        self,
        name: str,
        view: View,
        known: torch.Tensor,
        source: torch.Tensor,
        *,
        non_blocking: bool,
    ) -> None:
        """Copy `source` into a view of a parameter.

        Args:
            name: of the parameter.
            view: the elements to write.
            known: the parameter as the method knows it. Its layer may have been given
                other memory since.
            source: as many numbers as the view has.
            non_blocking: whether a copy from host memory need not have ended.

        Raises:
            Conflict: the update has filled these elements already, or the copy would
                not only copy.

        """
        self._require_copy(name, view, known, source)
        home = self._home(name, known)
        offset, shape, stride = view
        self._coverage.overwrite(name, view)
        target = home.as_strided(shape, stride, home.storage_offset() + offset)
        target.copy_(source, non_blocking=non_blocking)

    def problems(self) -> Problems:
        """What is wrong with parameters that were written so."""
        for name in self.names:
            views = [
                v for v, count in self._coverage.fills[name].views.items() if count
            ]
            if name in self._coverage.loaded:
                why = "load_weights has filled it, and the worker extension itself"
                yield name, Cause.DUPLICATE, why
            elif not are_apart(views):
                why = "the worker extension has written some of its elements twice"
                yield name, Cause.DUPLICATE, why

    def nonfinite(self, digests: Mapping[str, tuple[ops.Digest, int]]) -> Problems:
        """The parameters with numbers that are NaN or Inf."""
        for name, (_, bad) in digests.items():
            if bad:
                size = self._coverage.fills[name].numel
                are = "is" if bad == 1 else "are"
                why = f"{bad} of its {size} elements {are} NaN or Inf"
                yield name, Cause.NOT_FINITE, why

    def digests(self) -> dict[str, tuple[ops.Digest, int]]:
        """Of each parameter: the digest of its content, and its non-finite numbers."""
        params = self._params()
        on_gpu = GpuDigest(self._shadow.device, {})
        on_gpu.add([(name, t) for name, t in params.items() if t.is_cuda])
        found = {name: (digest, bad) for name, digest, bad in on_gpu.results()}
        # The CPU build, and shadow weights in host memory.
        on_host = {name: t for name, t in params.items() if not t.is_cuda}
        tensors, num = list(on_host.values()), self._shadow.num_threads
        digests = ops.digest(tensors, num_threads=num)
        bad = ops.count_nonfinite(tensors, num_threads=num)
        found |= zip(on_host, zip(digests, bad, strict=True), strict=True)
        return {name: found[name] for name in params}

    def digest(self, digests: Mapping[str, tuple[ops.Digest, int]]) -> str:
        """One digest of these parameters, with their forms."""
        return ops.manifest_digest(
            (name, _name_of(param.dtype), tuple(param.shape), digests[name][0])
            for name, param in self._params().items()
        )

    def _params(self) -> dict[str, torch.Tensor]:
        assert self._shadow.module is not None
        module = self._shadow.module
        return {name: module.get_parameter(name).data for name in self.names}

    def _require_copy(
        self, name: str, view: View, known: torch.Tensor, source: torch.Tensor
    ) -> None:
        shape = view[1]
        dtypes = [_name_of(t.dtype) for t in (source, known)]
        if tuple(source.shape) != shape:
            why = f"a tensor of shape {list(source.shape)} into {list(shape)} of it"
        elif dtypes[0] != dtypes[1] and not PLAIN.issuperset(dtypes):
            why = f"{dtypes[0]} into it, which is {dtypes[1]}"
        elif name in self._coverage.loaded:
            why = "into it after load_weights has filled it"
        elif view in self._coverage.fills[name].views:
            why = "the same elements of it twice"
        else:
            return
        raise conflict(name, why)

    def _home(self, name: str, known: torch.Tensor) -> torch.Tensor:
        """The parameter as it is loaded, with memory."""
        assert self._shadow.module is not None
        path, _, key = name.rpartition(".")
        layer = self._shadow.module.get_submodule(path)
        info = upstream.get_layerwise_info(layer)
        if info.can_load():
            upstream.materialize_layer(layer, info)
            # The layer does not count this write, so it is processed at the end of the
            # load. One with a single number would not be.
            info.load_numel = max(1, info.load_numel)
            if info.load_numel_total == 1:
                raise conflict(name, "the only number of its layer")
        elif not self._are_in_place:
            raise conflict(name, "into it after its layer was complete")
        home = layer.get_parameter(key).data
        forms = [(t.shape, t.stride(), t.dtype) for t in (home, known)]
        if forms[0] != forms[1]:
            why = f"{list(known.shape)} into it, which is loaded as {list(home.shape)}"
            raise conflict(name, why)
        return home


def conflict(name: str, what: str) -> Conflict:
    """The error of a write that is not let through; `what` follows "writes"."""
    return Conflict(
        f"the worker extension fills {name} of the shadow model itself, and writes "
        f"{what}; an adopted method copies each element once, as the parameter has it, "
        "or gives its tensors to load_weights. Start the engine with --inflight-adopt "
        "off if this one cannot"
    )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
