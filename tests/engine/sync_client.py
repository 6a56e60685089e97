"""What upstream's trainers call of an engine, on an `LLM` of the same process."""

from typing import Any


class Client:
    """The four calls of upstream's trainers."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: Any) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self) -> None:
        self._llm.finish_weight_update()
