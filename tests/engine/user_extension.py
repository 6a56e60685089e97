"""A worker extension of a user's, which has some of PipelineRL's names for itself."""

from typing import Any

CALLED: list[str] = []


class Extension:
    """What verl, TRL and PipelineRL give through `worker_extension_cls`."""

    def tests_double(self, number: int) -> int:
        return 2 * number

    def init_actor_update_group(self, *args: Any) -> str:
        CALLED.append("init")
        return "the user's"

    def receive_weight_update(self, request: Any) -> str:
        CALLED.append("receive")
        return "the user's"

    def close_communicator(self) -> str:
        CALLED.append("close")
        return "the user's"
