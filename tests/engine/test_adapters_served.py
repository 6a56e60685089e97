"""LoRA behind a real server: adapters come and go by its routes, and weights change."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.adapters import RANK, make_adapter
from tests.serving import Server

pytestmark = pytest.mark.engine

PROMPT = list(range(3, 103))


@pytest.fixture(scope="module")
def server(old: Path) -> Iterator[Server]:
    flags = ("--enable-lora", "--max-lora-rank", str(RANK))
    with Server(
        old,
        *flags,
        "--enable-prompt-tokens-details",
        env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
    ) as server:
        yield server


def said(server: Server) -> tuple[str, int]:
    """What the adapter says, and how many tokens were found in the prefix cache."""
    body = {"model": "adapter", "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    reply = server.post("/v1/completions", body | {"ignore_eos": True})
    details: dict[str, Any] = reply["usage"]["prompt_tokens_details"] or {}
    return reply["choices"][0]["text"], details.get("cached_tokens") or 0


def load(server: Server, folder: Path, **more: Any) -> None:
    body = {"lora_name": "adapter", "lora_path": str(folder)} | more
    reply = server.client.post("/v1/load_lora_adapter", json=body)
    assert reply.status_code == 200, reply.text


def test_an_adapter_is_loaded_in_place_once_and_lives_through_an_update(
    server: Server, old: Path, new: Path, tmp_path: Path
) -> None:
    make_adapter(old, tmp_path)
    load(server, tmp_path)
    first, _ = said(server)
    assert said(server) == (first, 96)
    make_adapter(old, tmp_path, seed=1)
    load(server, tmp_path, load_inplace=True)
    shutil.rmtree(tmp_path)  # it has been read, and is not read again
    second, num_cached = said(server)
    assert (second != first, num_cached) == (True, 0)
    assert said(server) == (second, 96)
    server.post("/update_weights_from_disk", {"path": str(new)})
    third, num_cached = said(server)
    assert (third != second, num_cached) == (True, 0)
    server.post("/rollback_weights", {})
    assert said(server) == (second, 0)
