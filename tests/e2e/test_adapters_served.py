"""LoRA behind a real server: adapters come and go by its routes, and weights change."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import gentle
from tests.support.engines.adapters import RANK, make_adapter
from tests.support.event_stream import events
from tests.support.serving import Server

pytestmark = pytest.mark.engine

PROMPT = list(range(3, 103))


@pytest.fixture(scope="module")
def server(old: Path) -> Iterator[Server]:
    flags = ("--enable-lora", "--max-lora-rank", str(RANK))
    # The base folder of all checkpoints and adapters of this run.
    fence = ("--inflight-allowed-paths", str(old.parents[1]))
    with Server(
        old,
        *flags,
        *fence,
        "--enable-prompt-tokens-details",
        *("--logits-processors", gentle.NAME),
        env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
    ) as server:
        yield server


def said(server: Server) -> tuple[str, int]:
    """What the adapter says, and how many tokens were found in the prefix cache."""
    body = {"model": "adapter", "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    reply = server.post("/v1/completions", body | {"ignore_eos": True})
    details: dict[str, Any] = reply["usage"]["prompt_tokens_details"] or {}
    return reply["choices"][0]["text"], details.get("cached_tokens") or 0


def load(server: Server, folder: Path | str, **more: Any) -> None:
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


def test_the_rollout_route_uses_the_adapter_of_its_lora_path(
    server: Server, old: Path, tmp_path: Path
) -> None:
    make_adapter(old, tmp_path)
    load(server, tmp_path, load_inplace=True)
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling}
    plain = server.post("/generate", body)
    adapted = server.post("/generate", body | {"lora_path": "adapter"})
    assert adapted["text"] == said(server)[0] != plain["text"]
    (span,) = adapted["meta_info"]["weight_versions"]
    assert span["adapter"] == "adapter"
    both = server.post(
        "/generate",
        body | {"input_ids": [PROMPT, PROMPT], "lora_path": ["adapter", None]},
    )
    spans = [each["meta_info"]["weight_versions"][0] for each in both]
    assert [each.get("adapter") for each in spans] == ["adapter", None]


def test_an_adapter_of_a_stream_outlives_its_files(
    server: Server, old: Path, tmp_path: Path
) -> None:
    """`--max-loras` is 1: each load makes the one before go."""
    folders = [tmp_path / f"v{number}" for number in range(3)]
    for number, folder in enumerate(folders):
        folder.mkdir()
        make_adapter(old, folder, number)
    first, second, third = ({"lora_name": f"v{number}"} for number in range(3))
    load(server, folders[0], **first)
    body = {"model": "v0", "prompt": PROMPT, "max_tokens": 200, "temperature": 0}
    body |= {"ignore_eos": True}
    alone = server.post("/v1/completions", body)["choices"][0]["text"]
    text, num_chunks = "", 0
    stream = {"stream": True}
    with server.client.stream("POST", "/v1/completions", json=body | stream) as reply:
        for event in events(reply):
            text += event["choices"][0]["text"]
            num_chunks += 1
            if num_chunks == 1:
                load(server, folders[1], **second)
                unload = server.client.post("/v1/unload_lora_adapter", json=first)
                assert unload.status_code == 200
                shutil.rmtree(folders[0])
                load(server, folders[2], **third)
    assert text == alone
    shutil.rmtree(folders[1])
    load(server, folders[2], lora_name="v3")  # v1 is not one of the last any more
    late = server.client.post("/v1/completions", json=body | {"model": "v1"})
    assert late.status_code == 500
    assert "adapter 'v1' cannot be loaded" in late.json()["error"]["message"]
    late = server.client.post("/v1/completions", json=body | stream | {"model": "v1"})
    assert "adapter 'v1' cannot be loaded" in late.text
    assert server.client.get("/health").status_code == 200
    assert server.post("/v1/completions", body | {"model": "v2"})["choices"]


def test_an_adapter_outside_of_the_allowed_folders_is_forbidden(
    server: Server, old: Path
) -> None:
    for path in ("/etc", "~/adapter", "someone/adapter"):
        body = {"lora_name": "other", "lora_path": path}
        reply = server.client.post("/v1/load_lora_adapter", json=body)
        assert reply.status_code == 403, reply.text
        assert "--inflight-allowed-paths" in reply.json()["error"]["message"]
