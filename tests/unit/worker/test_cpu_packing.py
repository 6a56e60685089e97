"""A matrix that a thread with other settings packs is multiplied correctly."""

import threading

import pytest
import torch
from vllm import _custom_ops

from vllm.inflight.patch import apply_all
from vllm.inflight.worker.model.kinds.cpu_packing import set_threads

pytestmark = pytest.mark.skipif(
    not _custom_ops._supports_onednn, reason="this build of vLLM packs nothing"
)


@pytest.fixture(autouse=True)
def applied() -> None:
    apply_all()


@pytest.mark.parametrize("rows", [192, 320])
def test_a_matrix_packed_by_a_thread_of_its_own_is_multiplied_alike(rows: int) -> None:
    """oneDNN packs 192 rows otherwise for two threads than for one."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(4, 128, generator=random)
    own, kept = torch.get_num_threads(), []

    def pack(number: int) -> None:
        set_threads(number)
        weight = torch.randn(rows, 128, generator=random)
        kept.append((weight, _custom_ops.create_onednn_mm(weight.t(), 32)))

    try:
        for number in (2, 1, 2, 1):
            packing = threading.Thread(target=pack, args=(number,))
            packing.start()
            packing.join()
            set_threads(2)
            weight, handler = kept[-1]
            product = _custom_ops.onednn_mm(handler, x, None)
            torch.testing.assert_close(product, x @ weight.t())
    finally:
        set_threads(own)
