"""In the trainer's process: weights → parcel → every engine, and no engine imported.

`Publisher("http://127.0.0.1:8000", model).publish(version="step-7", step=7)`, or a
`ServerClient` for vLLM's own trainer interface.
"""

from vllm.inflight.trainer.outcome import Outcome
from vllm.inflight.trainer.publisher import Publisher
from vllm.inflight.trainer.sync_client import ServerClient

__all__ = ["Outcome", "Publisher", "ServerClient"]
