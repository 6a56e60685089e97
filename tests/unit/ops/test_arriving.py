"""What is read beside decoding holds no driver, and what is on the host stays there."""

import ast
from pathlib import Path

import pytest
import torch

from vllm.inflight.ops.arriving import to_host

PACKAGE = Path(__file__).parents[3] / "vllm/inflight"
ROOMS = "ops", "delta", "worker"
"""What runs in an engine's worker beside decoding."""
ON_THE_HOST = {
    "delta/part.py": 1,  # zstd is decompressed on the host, before the engine's GPU
    "delta/encode.py": 2,  # a part that is compressed, in a trainer
    "delta/file.py": 1,  # a delta that is written into a file
}
"""File → calls of `cpu` that are no reads beside decoding."""


def test_a_tensor_of_the_host_is_not_copied():
    tensor = torch.arange(3)
    assert to_host(tensor).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("room", ROOMS)
def test_reads_beside_decoding_go_through_page_locked_memory(room):
    found: dict[str, int] = {}
    for file in (PACKAGE / room).rglob("*.py"):
        calls = [
            node
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "cpu"
        ]
        if calls:
            found[str(file.relative_to(PACKAGE))] = len(calls)
    assert found == {k: n for k, n in ON_THE_HOST.items() if k.startswith(room)}
