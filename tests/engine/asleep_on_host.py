"""An engine with its second set in host memory, asleep: upstream pools hold the first.

In a process of its own, because these pools refuse a second engine in one.
"""

import sys
from pathlib import Path

from vllm import LLM

from tests.engine.probe import greedy
from tests.engine.script import OPTIONS, tell


def main(old: Path, new: Path, eager: bool) -> None:
    """Tell what it says before it sleeps, after level 1, and updated after level 2."""
    llm = LLM(
        str(old),
        **OPTIONS | {"enforce_eager": eager, "gpu_memory_utilization": 0.3},
        enable_sleep_mode=True,
        additional_config={"inflight": {"staging": "host"}},
    )
    seen = {"before": greedy(llm)}
    llm.sleep(level=1)
    llm.wake_up()
    seen["level_1"] = greedy(llm)
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.update_weights_from_disk(str(new), "new")
    llm.wake_up(tags=["kv_cache"])
    seen["level_2"] = greedy(llm)
    tell(seen)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), bool(int(sys.argv[3])))
