"""SGLang's trainers and checkpoint-engines lend memory of the GPU that they share.

The trainer is this process. What it lends must give the digests and the tokens that
the same checkpoint gives when it is read from files.
"""

import base64
import io
import json
import sys
from collections.abc import Iterator
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing import reductions

from tests.support.engines.probe import prompts
from tests.support.engines.sent_tensors import flattened, halves
from tests.support.serving import Server
from tests.support.transports.lending_process import LendingProcess

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

FLAGS = {
    "--dtype": "float32",
    "--gpu-memory-utilization": 0.05,
    "--kv-cache-memory-bytes": 1 << 30,
    "--inflight-pickled-tensors": "on",
}
WHERE = "sglang.srt.weight_sync.tensor_bucket"
NUM_WARM, NUM_ROUNDS = 3, 20


@pytest.fixture(scope="module")
def server(old: Path) -> Iterator[Server]:
    words = [str(word) for flag in FLAGS.items() for word in flag]
    with Server(old, *words) as running:
        yield running


def served(server: Server) -> tuple[Any, Any]:
    """The digest of what is served, and tokens of it."""
    asked = {"action": "checksum"}
    checked = server.post("/weights_checker", asked)
    body = {"model": "tiny", "temperature": 0, "max_tokens": 16}
    (prompt, *_) = prompts(1)
    said = server.post("/v1/completions", body | {"prompt": prompt["prompt_token_ids"]})
    assert "choices" in said, said
    return checked["per_engine_checksum"], said["choices"][0]["text"]


@pytest.fixture(scope="module")
def expected(server: Server, old: Path, new: Path) -> dict[str, Any]:
    """What is served when the files of both checkpoints have been read."""
    found = {}
    for label, folder in (("new", new), ("old", old)):
        body = {"path": str(folder), "weight_version": label}
        assert server.post("/update_weights_from_disk", body)["success"]
        found[label] = served(server)
    assert found["old"][0] != found["new"][0]
    return found


@pytest.fixture(scope="module")
def held(old: Path, new: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of both checkpoints, on the GPU of the server."""
    folders = {"old": old, "new": new}
    return {
        label: load_file(folder / "model.safetensors", device="cuda:0")
        for label, folder in folders.items()
    }


def pickled(payload: Any) -> str:
    """As SGLang's `MultiprocessingSerializer` writes it."""
    file = io.BytesIO()
    ForkingPickler(file).dump(payload)
    return base64.b64encode(file.getvalue()).decode()


def bucket(named: dict[str, torch.Tensor], patched: pytest.MonkeyPatch) -> str:
    """A flattened bucket with SGLang's record of each part."""
    record = type("FlattenedTensorMetadata", (), {"__module__": WHERE})
    module = ModuleType(WHERE)
    module.FlattenedTensorMetadata = record  # type: ignore[attr-defined]
    for each in ("sglang", "sglang.srt", "sglang.srt.weight_sync", WHERE):
        patched.setitem(sys.modules, each, module)
    flat, facts = flattened(named)
    parts = []
    for fact in facts:
        part = record()
        dtype = getattr(torch, fact["dtype"].removeprefix("torch."))
        vars(part).update(fact | {"shape": torch.Size(fact["shape"]), "dtype": dtype})
        parts.append(part)
    return pickled({"flattened_tensor": flat, "metadata": parts})


def send(server: Server, entry: str | list[str], label: str, **more: Any) -> Any:
    """One entry for all ranks, or a list with one for each."""
    entries = [entry] if isinstance(entry, str) else entry
    body = {"serialized_named_tensors": entries, "weight_version": label} | more
    reply = server.post("/update_weights_from_tensor", body)
    assert reply["success"], json.dumps(reply)
    return reply


def test_a_list_of_handles_is_served_as_the_files_are(
    server: Server, expected: dict[str, Any], held: dict[str, Any]
) -> None:
    for label in ("new", "old"):
        send(server, pickled(list(held[label].items())), label)
        assert served(server) == expected[label]
    server.post("/rollback_weights")
    assert served(server) == expected["new"]


def test_flattened_buckets_in_several_calls_are_served_as_the_files_are(
    server: Server,
    expected: dict[str, Any],
    held: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for label in ("old", "new"):
        for part in halves(held[label]):
            entry = bucket(part, monkeypatch)
            send(server, entry, label, load_format="flattened_bucket")
        assert served(server) == expected[label]


def test_the_trainer_has_its_memory_back_after_each_call(
    server: Server, held: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    for number in range(NUM_WARM + NUM_ROUNDS):
        entry = bucket(held["new" if number % 2 else "old"], monkeypatch)
        send(server, entry, str(number), load_format="flattened_bucket")
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        if number >= NUM_WARM:
            used.append((torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]))
    assert {allocated for allocated, _ in used} == {used[0][0]}
    free = [free for _, free in used]
    assert min(free) > free[0] - (192 << 20), free


def test_work_that_the_trainers_gpu_has_not_done_yet_is_waited_for(
    server: Server, expected: dict[str, Any], held: dict[str, Any]
) -> None:
    send(server, pickled(list(held["old"].items())), "old")
    late = {name: torch.zeros_like(tensor) for name, tensor in held["new"].items()}
    torch.cuda.synchronize()
    work = torch.cuda.Event()
    torch.cuda._sleep(3_000_000_000)
    for name, tensor in held["new"].items():
        late[name].copy_(tensor)
    work.record()
    entry = pickled(list(late.items()))
    assert not work.query(), "the work was over before the call"
    send(server, entry, "late")
    assert served(server) == expected["new"]


def test_a_checkpoint_engine_fills_its_buffer_again_and_again(
    server: Server, expected: dict[str, Any], held: dict[str, Any], tmp_path: Path
) -> None:
    size = sum(tensor.nbytes for tensor in held["new"].values())
    gpu = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    for label in ("old", "new"):
        buffer = torch.zeros(size, dtype=torch.uint8, device="cuda:0")
        (tmp_path / label).mkdir()
        process = LendingProcess(tmp_path / label, buffer)
        try:
            fills = [partial(process.put, part) for part in halves(held[label])]
            process.send(reductions.reduce_tensor(buffer), *fills, None, None)
            body = {"zmq_handles": {gpu: process.address}, "weight_version": label}
            reply = server.post("/update_weights_from_ipc", body)
        finally:
            process.close()
        assert reply["success"], json.dumps(reply)
        assert process.has_ended
        assert process.replies == [b""] * 5
        assert served(server) == expected[label]


def test_a_version_that_lacks_a_tensor_is_rejected_and_its_sender_ends(
    server: Server, expected: dict[str, Any], held: dict[str, Any], tmp_path: Path
) -> None:
    send(server, pickled(list(held["old"].items())), "old")
    gpu = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    buffer = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda:0")
    process = LendingProcess(tmp_path, buffer)
    part, _ = halves(held["new"])
    try:
        lent = reductions.reduce_tensor(buffer)
        process.send(lent, partial(process.put, part), None, None)
        body = {"zmq_handles": {gpu: process.address}}
        reply = server.client.post("/update_weights_from_ipc", json=body)
    finally:
        process.close()
    assert reply.status_code == 422, reply.text
    assert process.has_ended
    assert served(server) == expected["old"]


def test_memory_of_a_rejected_call_is_given_back(
    server: Server, held: dict[str, Any]
) -> None:
    before = torch.cuda.memory_allocated()
    tensor = torch.zeros(1 << 26, dtype=torch.uint8, device="cuda:0")
    body = {"serialized_named_tensors": [pickled([("a", tensor)])], "selector": "draft"}
    reply = server.client.post("/update_weights_from_tensor", json=body)
    assert reply.status_code == 400, reply.text
    del tensor
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == before
