"""The transport "other", in workers that tell how their staging rests."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.engines import user_extension
from tests.support.engines.transport import Extension
from tests.support.waiting import until
from vllm.inflight.worker.staging import throttle

RESTS: list[float] = []
"""The seconds of every rest of this process's staging, once somebody listens."""


class Listening(Extension, user_extension.Extension):
    """`--worker-extension-cls tests.support.engines.listening.Listening`."""

    rank: int

    def tests_start_and_fail_on_one(self) -> None:
        """Take layers aside on all ranks, and break off on one."""
        self.tests_start_load()
        if self.rank == 1:
            raise TypeError("of one rank")

    def tests_reload_and_fail_on_one(self, folder: str) -> None:
        """Reload on one rank, and break off on the other when it has written."""
        if self.rank == 1:
            self.tests_reload_and_fail(folder, 20)
        self.tests_reload(folder)

    def tests_listen(self) -> None:
        """Note rests from here on; they last as long as they do."""

        def sleep(seconds: float) -> None:
            RESTS.append(seconds)
            time.sleep(seconds)

        clocks: Any = SimpleNamespace(**vars(time) | {"sleep": sleep})
        throttle.time = clocks

    def tests_rests(self) -> list[float]:
        """The rests since this was asked last."""
        rests, RESTS[:] = RESTS[:], []
        return rests

    def tests_spoil(self, go: str, done: str) -> None:
        """Change a bit of what the second rank alone has, and of a copy; or back.

        Once there is a file `go`, after this call: what the call writes itself would be
        noticed. Then there is a file `done`.
        """

        def change() -> None:
            until(Path(go).exists)
            for name in ("embed_tokens.weight", "norm.weight"):
                param = self.model_runner.model.model.get_parameter(name)
                param.data.view(-1).view(torch.int16)[3] ^= 1
            Path(done).touch()

        if self.rank == 1:
            threading.Thread(target=change).start()
