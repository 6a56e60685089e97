"""An engine whose weights are in upstream pools, asleep.

They are there if the second set is in host memory, and with delta staging. In a process
of its own, because these pools refuse a second engine in one.
"""

import sys
from pathlib import Path

from vllm import LLM
from vllm.lora.request import LoRARequest

from tests.e2e.test_adapters import ADAPTERS, adapted
from tests.support.engines.probe import greedy
from tests.support.engines.script import OPTIONS, tell


def main(
    old: Path, new: Path, eager: bool, staging: str, folder: str | None = None
) -> None:
    """Tell what it says before it sleeps, after level 1, and updated after level 2.

    With the adapter in `folder`, if there is one, which is loaded once.
    """

    def said() -> list[list[int]]:
        if folder is None:
            return greedy(llm)
        return adapted(llm, LoRARequest("adapter", 1, folder))

    llm = LLM(
        str(old),
        **OPTIONS | {"enforce_eager": eager, "gpu_memory_utilization": 0.3},
        enable_sleep_mode=True,
        additional_config={"inflight": {"staging": staging}},
        **({} if folder is None else ADAPTERS),
    )
    seen = {"before": said()}
    llm.sleep(level=1)
    llm.wake_up()
    seen["level_1"] = said()
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.update_weights_from_disk(str(new), "new")
    llm.wake_up(tags=["kv_cache"])
    seen["level_2"] = said()
    tell(seen)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), bool(int(sys.argv[3])), *sys.argv[4:])
