"""An engine core whose workers have a framework's extension."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor

from tests.support.engines.bare_core import Streams
from tests.support.engines.script import OPTIONS


@contextmanager
def extended_core(
    folder: Path, extension: str, *, is_async: bool = False, **options: Any
) -> Iterator[EngineCore]:
    """An engine core of this process, with `extension` in its worker.

    With `is_async` a step is in flight between two steps of the CPU build too, as on a
    GPU.
    """
    options = OPTIONS | {"max_num_seqs": 4} | options
    config = EngineArgs(
        str(folder), worker_extension_cls=extension, **options
    ).create_engine_config()
    if is_async:  # the CPU platform turns it off
        config.scheduler_config.async_scheduling = True
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    worker = type(core.model_executor.driver_worker.worker)
    added = resolve_obj_by_qualname(extension)
    try:
        yield core
    finally:
        core.shutdown()
        # vLLM adds the extension to its own class, for good.
        worker.__bases__ = tuple(b for b in worker.__bases__ if b is not added)


def beside_steps(streams: Streams, act: Callable[[], Any]) -> Any:
    """What `act` returns or raises, in a thread, while the core takes steps.

    Each rest between two steps is a hundredth longer than the one before. So a request
    of some hundred tokens outlasts an act of minutes, and hardly delays a short one.
    """
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(act())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    queue = streams.core.vllm_inflight.step_queue
    rest_s = 0.001
    while thread.is_alive():
        with queue.stepping():
            streams.step()
        thread.join(rest_s)
        rest_s *= 1.01
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]
