"""Memory that a trainer has lent does not stay mapped when an update has failed.

Host memory takes the place of a GPU's, on a real engine with backend `inflight_ipc`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines.sent_tensors import tensors
from tests.support.transports.host_memory import HostMemory
from tests.support.waiting import until
from tests.unit.transport.test_ipc import lent
from vllm.inflight.errors import WeightsMismatch
from vllm.inflight.transport.cuda_ipc.receiver_engine import IpcEngine

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(start: Callable[..., Any], old: Path) -> Any:
    return start(old, weight_transfer_config={"backend": "inflight_ipc"})


@pytest.fixture
def memory(llm: Any, monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    made = HostMemory()
    monkeypatch.setattr(
        IpcEngine, "init_transfer_engine", lambda self, info: self._open(info, made)
    )
    llm.init_weight_transfer_engine({"init_info": {"bucket_bytes": 1 << 20}})
    return made


def rejected(llm: Any, named: dict[str, torch.Tensor], memory: HostMemory) -> None:
    """An update that lacks the rest of the model."""
    llm.start_weight_update()
    llm.update_weights({"update_info": lent(named, memory)})
    with pytest.raises(WeightsMismatch, match="missing"):
        llm.finish_weight_update()


def aborted(llm: Any, named: dict[str, torch.Tensor], memory: HostMemory) -> None:
    """An update that its trainer gives up."""
    llm.start_weight_update()
    llm.update_weights({"update_info": lent(named, memory)})
    llm.abort_weight_update()


@pytest.mark.parametrize("fail", [rejected, aborted])
def test_a_failed_update_unmaps_memory_that_the_trainer_has_no_more(
    llm: Any,
    memory: HostMemory,
    new: Path,
    fail: Callable[[Any, dict[str, torch.Tensor], HostMemory], None],
) -> None:
    llm.start_weight_update()
    llm.update_weights({"update_info": lent(tensors(new), memory)})
    llm.finish_weight_update()
    name, norm = next(i for i in tensors(new).items() if i[0].endswith("norm.weight"))
    named = {name: norm.clone()}
    fail(llm, named, memory)
    left = {named[name].untyped_storage().data_ptr()}
    until(lambda: memory.mapped == left, "memory of an earlier version is mapped")
