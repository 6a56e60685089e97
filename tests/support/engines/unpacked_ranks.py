"""A worker extension for CPU engines of several ranks whose matrices are not packed."""

from typing import Any

from tests.support.engines.transport import Extension
from tests.support.engines.unpacked import unpack

unpack()  # a worker imports this before it loads its model


class Unpacked(Extension):
    """It also loses the weights when it is asked to."""

    model_runner: Any

    def tests_fail_as_it_writes(self) -> None:
        """Leave the weights half written."""
        for param in list(self.model_runner.get_model().parameters())[::2]:
            param.data.fill_(7.0)
        raise RuntimeError("it broke off")
