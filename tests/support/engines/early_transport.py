"""A transport and a worker extension that were imported before vLLM loaded its plugins,
run as a script.

A trainer's main module imports them, and a spawned process imports that module again
before anything else. So they have upstream's own functions by name. Prints as JSON what
the engine says after each update, and what fresh engines say.

Usage: python -m tests.support.engines.early_transport OLD NEW EMPTY CAST

EMPTY is OLD without tensors. CAST is NEW with one shard of a fused parameter in another
dtype. The engines have shadow parameters, as on a GPU.
"""

import os
import sys
from typing import Any

from tests.support.engines import transport
from tests.support.engines.mirrored import mirrored
from tests.support.engines.mixtures import said
from tests.support.engines.script import OPTIONS, tell
from vllm.inflight.patch.records.record import MARK


def main(old: str, new: str, empty: str, cast: str) -> None:
    from vllm import LLM
    from vllm.config.weight_transfer import WeightTransferConfig

    kept = transport.initialize_layerwise_reload, transport.finalize_layerwise_reload
    seen: dict[str, Any] = {
        "is_early": not hasattr(transport.initialize_layerwise_reload, MARK)
    }

    def start(folder: str, backend: str = "other", **options: Any) -> Any:
        config = WeightTransferConfig(backend=backend)
        return LLM(folder, weight_transfer_config=config, **(OPTIONS | options))

    def fresh(folder: str) -> Any:
        llm = start(folder)
        says = said(llm)
        llm.llm_engine.engine_core.shutdown()
        return says

    def send(llm: Any, folder: str, **faults: Any) -> Any:
        llm.start_weight_update()
        llm.update_weights({"update_info": {"path": folder} | faults})
        llm.finish_weight_update()
        return said(llm)

    def fail(act: Any, llm: Any, folder: str, **faults: Any) -> Any:
        try:
            act(llm, folder, **faults)
        except Exception as error:
            return str(error), said(llm)

    def from_disk(llm: Any, folder: str) -> Any:
        llm.update_weights_from_disk(folder)
        return said(llm)

    def adopted(llm: Any, folder: str) -> Any:
        llm.collective_rpc("update_weights_from_path", args=(folder,))
        return said(llm)

    seen["old"], seen["new"] = fresh(old), fresh(new)
    extension = f"{transport.__name__}.{transport.Reloading.__name__}"
    llm = start(empty, load_format="dummy", worker_extension_cls=extension)
    seen["first"] = send(llm, new)
    seen["adopted"] = adopted(llm, old)
    seen["from disk"] = from_disk(llm, new)
    seen["failed"] = fail(send, llm, old, fail_after=5)
    seen["after a failure"] = from_disk(llm, old)
    seen["cast"] = send(llm, cast)
    seen["last"] = send(llm, old)
    llm.llm_engine.engine_core.shutdown()
    transport.Reloading.kept = kept
    llm = start(old, "keeping", worker_extension_cls=extension)
    seen["kept by a transport"] = fail(send, llm, cast)
    seen["kept by an extension"] = fail(adopted, llm, cast)
    seen["after what was kept"] = from_disk(llm, new)
    llm.llm_engine.engine_core.shutdown()
    tell(seen)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with mirrored():
        main(*sys.argv[1:])
