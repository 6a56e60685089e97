"""The transport "other", in workers that tell how their staging rests."""

import time
from types import SimpleNamespace
from typing import Any

import torch

from tests.engine.transport import Extension
from vllm.inflight.stage import pace

RESTS: list[float] = []
"""The seconds of every rest of this process's staging, once somebody listens."""


class Listening(Extension):
    """`--worker-extension-cls tests.engine.listening.Listening`."""

    def tests_listen(self) -> None:
        """Note rests from here on; they last as long as they do."""

        def sleep(seconds: float) -> None:
            RESTS.append(seconds)
            time.sleep(seconds)

        clocks: Any = SimpleNamespace(**vars(time) | {"sleep": sleep})
        pace.time = clocks

    def tests_rests(self) -> list[float]:
        """The rests since this was asked last."""
        rests, RESTS[:] = RESTS[:], []
        return rests

    def tests_spoil(self) -> None:
        """Change a bit of what the second rank alone has, and of a copy; or back."""
        if self.rank == 1:
            for name in ("embed_tokens.weight", "norm.weight"):
                param = self.model_runner.model.model.get_parameter(name)
                param.data.view(-1).view(torch.int16)[3] ^= 1
