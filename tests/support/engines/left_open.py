"""A script that publishes to an engine of its own process, and closes nothing.

As a script: python -m tests.support.engines.left_open MODEL; tells what is served at
its end.
"""

import atexit
import sys
from pathlib import Path

from safetensors.torch import load_file

from tests.support.engines.script import OPTIONS, tell
from vllm.inflight.trainer import Publisher, publish_queue

publish_queue.EXIT_S = 60.0  # on a busy machine, two publishes take longer than 5 s


def main(folder: str) -> None:
    """Publish twice, and wait for neither."""
    from vllm import LLM
    from vllm.config.weight_transfer import WeightTransferConfig

    local = WeightTransferConfig(backend="local")
    llm = LLM(folder, weight_transfer_config=local, **OPTIONS)
    publisher = Publisher(llm, load_file(Path(folder) / "model.safetensors"))
    # Before the publisher's own, so that it is called after it.
    atexit.register(lambda: tell({"last": llm.weight_info()}))
    publisher.publish("first", block=False)
    publisher.publish("last", block=False)


if __name__ == "__main__":
    main(sys.argv[1])
