"""The base class of our transport engines, and the check of upstream's backends.

A backend receives in the process that decodes, while it decodes. It must hand every
tensor to the model's `load_weights`, whole and under its checkpoint name. It must write
nothing else and change nothing in the process. A class declares this with the attribute
`hands_whole_tensors = True`. Two classes of vLLM were read and tested, and are accepted
without it. Other classes replace `torch.Tensor.copy_` for the whole process, or write
into the model without its loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import ClassVar

from vllm.inflight import upstream
from vllm.inflight.errors import Cancelled, TransferFault
from vllm.inflight.transport.buckets.tensor_list import Pair, TensorList
from vllm.inflight.transport.waiting import never
from vllm.inflight.wording import nearest

USABLE = "nccl, ipc, local, inflight_nccl, inflight_ipc or inflight_gloo"


def unknown_field(info_cls: type, info: str, given: object) -> str | None:
    """Say which field of an info a backend does not know; None if it knows all.

    Args:
        info_cls: the backend's class of the info.
        info: the name of the info in the request.
        given: the fields that were sent.

    """
    known = getattr(info_cls, "__dataclass_fields__", {})
    for name in given if isinstance(given, Mapping) else ():
        if name not in known:
            return (
                f"unknown field {name!r} of {info}{nearest(name, known)}; this backend "
                f"takes {', '.join(known) or 'none'}"
            )
    return None


def transport_obstacle(backend: str) -> str | None:
    """Why a registered backend cannot be used here; None if it can.

    Args:
        backend: the backend's name in `--weight-transfer-config`.

    """
    # Upstream has no public look-up; its `create_engine` would open the transport.
    load = upstream.WeightTransferEngineFactory._registry.get(backend)
    if load is None:
        return None  # upstream rejects the name and lists the known ones
    try:
        kind = load()
    except ImportError as error:
        return f"the weight transfer backend {backend!r} cannot be loaded: {error}"
    if _hands_whole_tensors(kind):
        return None
    name = f"{kind.__module__}.{kind.__qualname__}"
    remedy = f"configure {USABLE}"
    if not kind.__module__.startswith("vllm."):
        remedy += (
            ", or set hands_whole_tensors = True on the class if that is what it does"
        )
    return (
        f"its weight transfer backend {backend!r} ({name}) does not say that it hands "
        f"whole tensors to load_weights and writes nothing else; {remedy}"
    )


def _hands_whole_tensors(kind: type) -> bool:
    """Whether the class declares it, or is one of the two accepted classes of vLLM."""
    if (declared := getattr(kind, "hands_whole_tensors", None)) is not None:
        return declared is True
    return kind in (upstream.NCCLWeightTransferEngine, upstream.IPCWeightTransferEngine)


class StagedEngine(upstream.WeightTransferEngine):
    """Loads what it receives into `self.model`, whose layers are packed as they fill.

    Attributes:
        hands_whole_tensors: whether the engine may receive during decoding; see
            `transport_obstacle`.
        cancelled: returns True once the update is cancelled. The staging thread sets
            it; every wait calls it.
        most_bucket_bytes: of a bucket, if the worker has one set of weights. Memory
            beside it is scarce, so buckets are few and small. None with two sets. The
            staging thread sets it.

    """

    hands_whole_tensors: ClassVar[bool] = True

    cancelled: Callable[[], bool] = staticmethod(never)
    most_bucket_bytes: int | None = None

    def load_all(self, incoming: Iterator[Pair]) -> None:
        """Give every tensor to the model, and receive the rest when the model stops.

        The model may stop early or raise. The remaining tensors are received and
        dropped, because buckets are in flight and leaving early would break the group.
        """
        try:
            self.model.load_weights(incoming)
            for _ in incoming:
                pass
        except Exception:
            with suppress(TransferFault, Cancelled):
                for _ in incoming:
                    pass
            raise

    def folder_of(self, update_info: upstream.WeightTransferUpdateInfo) -> Path | None:
        """The folder of the checkpoint that a chunk comes from, if there is one."""
        del update_info
        return None

    def preview(
        self, update_info: upstream.WeightTransferUpdateInfo
    ) -> AbstractContextManager[TensorList | None]:
        """A context around receiving a chunk; on entry, its headers are read.

        The context gives the tensor list of the chunk if it was read from files. If the
        trainer sent the list, the context gives None.

        Raises:
            InflightError: the chunk cannot be received; nothing was written.

        """
        del update_info
        return nullcontext()

    def unmap(self) -> None:
        """Remove mappings of a trainer's memory, which are kept between updates."""

    def abort_weight_update(self) -> None:
        """End an update that has failed, also one that has received nothing yet."""

    @property
    def gauges(self) -> dict[str, float]:
        """What a status report says of this transport."""
        return {}

    def start_weight_update(self) -> None:
        """Let layers be packed as soon as they are complete."""
        upstream.initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Pack the layers that wait for the end."""
        upstream.finalize_layerwise_reload(self.model, self.model_config)
