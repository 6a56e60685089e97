"""The colocated round of a server that gives its GPU's memory back while streams wait.

By the release of SGLang, by a pause, and by upstream's sleep. The new weights come from
files, or as CUDA IPC handles from a trainer on the same GPUs.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.test_colocated_server import (  # noqa: F401 (tests and a fixture)
    WAYS,
    check_round,
    server,
    test_a_retracting_release_is_rejected_until_a_waiting_pause_has_ended,
    test_a_stream_that_is_aborted_asleep_ends_at_once_and_the_others_go_on,
    test_requests_that_a_pause_holds_in_place_are_not_lost_by_a_release,
    test_streams_continue_with_tokens_of_the_weights_that_arrived_during_sleep,
)
from tests.gpu.test_sglang_handles import bucket, send
from tests.support.engines import gentle
from tests.support.engines.sent_tensors import halves
from tests.support.gpu.exact import EXACT
from tests.support.serving import Server

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not NUM_GPUS, reason="needs an NVIDIA GPU"),
]

FLAGS = {
    "--dtype": "float32",  # KV that is computed again is the same, but for rounding
    "--gpu-memory-utilization": 0.04,
    "--kv-cache-memory-bytes": 1 << 30,
    "--inflight-pickled-tensors": "on",
    "--logits-processors": gentle.NAME,
}


@pytest.fixture(scope="module", params=[1, 2], ids=["one-rank", "two-ranks"])
def num_ranks(request: pytest.FixtureRequest) -> int:
    ranks: int = request.param
    if ranks == 2 and NUM_GPUS < 2:
        pytest.skip("needs two GPUs")
    return ranks


@pytest.fixture(scope="module")
def running(old: Path, num_ranks: int) -> Iterator[Server]:
    flags = FLAGS | {"--tensor-parallel-size": num_ranks}
    words = [str(word) for flag in flags.items() for word in flag]
    env = {"VLLM_SERVER_DEV_MODE": "1"} | EXACT
    with Server(old, *words, "--enable-sleep-mode", env=env) as started:
        yield started


@pytest.mark.parametrize("fall_asleep", WAYS)
def test_streams_continue_with_weights_that_a_trainer_of_the_same_gpus_lends(
    server: Server,  # noqa: F811
    new: Path,
    num_ranks: int,
    fall_asleep: Callable[[Server], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = [
        halves(load_file(new / "model.safetensors", device=f"cuda:{rank}"))
        for rank in range(num_ranks)
    ]

    def lend() -> None:
        for parts in zip(*held, strict=True):
            entries = [bucket(part, monkeypatch) for part in parts]
            send(server, entries, "new", load_format="flattened_bucket")

    check_round(server, fall_asleep, lend)
