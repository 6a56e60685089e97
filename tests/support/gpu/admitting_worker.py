"""A worker of its own process, which lets every quantised layer through.

It imports this module before it loads its model, by `--worker-extension-cls
tests.support.gpu.admitting_worker.Extension`.
"""

from tests.support.engines.transport import Extension as Transport
from tests.support.gpu.admission import Admitted
from vllm.inflight.worker.model.kinds import quantized


class Extension(Transport):
    """Importing this module has admitted them all, and registered the transport."""

    def tests_met(self) -> str:
        return str(quantized.PROVED_ON_RANKS["cuda"])


for table in (quantized.PROVED, quantized.PROVED_ON_RANKS):
    table["cuda"] = Admitted()
