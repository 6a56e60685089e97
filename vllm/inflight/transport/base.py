"""What the receiving engines of every backend have in common, and which may receive.

A backend receives while the engine decodes, in the same process. So it has to give
every tensor, whole and under its name in a checkpoint, to the model's `load_weights`.
It may write nothing else, and has to leave the process as it is. A class says so by an
attribute `hands_whole_tensors = True`. Of vLLM's own classes those that were read and
run are named here. Others replace `torch.Tensor.copy_` for the whole process, or write
into the model past its loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar

from vllm.inflight import upstream
from vllm.inflight.errors import Cancelled, TransferFault
from vllm.inflight.transport.buckets.tensor_list import Pair, TensorList
from vllm.inflight.transport.waiting import never

USABLE = "nccl, ipc, local, inflight_nccl, inflight_ipc or inflight_gloo"


def transport_obstacle(backend: str) -> str | None:
    """Why a backend of upstream's register may not receive here; None if it may.

    Args:
        backend: of `--weight-transfer-config`.

    """
    load = upstream.WeightTransferEngineFactory._registry.get(backend)
    if load is None:
        return None  # upstream says so itself, and names those there are
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
    """Whether a class says so, or was read and is vLLM's own."""
    if (declared := getattr(kind, "hands_whole_tensors", None)) is not None:
        return declared is True
    return kind in (upstream.NCCLWeightTransferEngine, upstream.IPCWeightTransferEngine)


class StagedEngine(upstream.WeightTransferEngine):
    """Receives into whatever model it is given, whose layers are packed as they fill.

    Attributes:
        hands_whole_tensors: whether it may receive beside decoding; see `obstacle`.
        cancelled: whether the update that is being received is not wanted any more;
            set by whoever receives, asked between two waits.

    """

    hands_whole_tensors: ClassVar[bool] = True

    cancelled: Callable[[], bool] = staticmethod(never)

    def load_all(self, incoming: Iterator[Pair]) -> None:
        """Give the model all that arrives, whatever it makes of it.

        What it does not ask for, and what comes after an error of its own, is received
        all the same: buckets are in flight, and a group left early would break.
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

    def folder_of(self, update_info: Any) -> Path | None:
        """Of the checkpoint that a chunk comes from, if it comes from one."""
        del update_info
        return None

    def preview(self, update_info: Any) -> AbstractContextManager[TensorList | None]:
        """Around the receipt of a chunk: what can be read of it before is, on entry.

        It enters into the announcement of the chunk if that was read and not sent, as
        of files; else into None.

        Raises:
            InflightError: it cannot be received, and nothing has been written.

        """
        del update_info
        return nullcontext()

    @property
    def gauges(self) -> dict[str, float]:
        """What a status report says of the wire."""
        return {}

    def start_weight_update(self) -> None:
        """Let layers be packed as soon as they are complete."""
        upstream.initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Pack the layers that wait for the end."""
        upstream.finalize_layerwise_reload(self.model, self.model_config)
