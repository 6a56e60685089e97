"""The versioned prefix cache: no request reads KV that other weights computed."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import (
    Streams,
    add,
    call,
    prompt,
    publish,
    request,
)
from vllm.inflight.engine.scheduling.prefix_cache import NamespacePolicy
from vllm.inflight.engine.scheduling.request_state import CacheNamespace

pytestmark = pytest.mark.engine


def hit_tokens(core: EngineCore, name: str, tokens: list[int]) -> int:
    """Run a request to its end; tokens it found in the prefix cache."""
    request_hits: list[int] = []
    manager = core.scheduler.kv_cache_manager
    look_up = manager.get_computed_blocks

    def counting(request: Any, *caps: Any) -> Any:
        found = look_up(request, *caps)
        if request.request_id == name:
            request_hits.append(found[1])
        return found

    manager.get_computed_blocks = counting
    try:
        add(core, name, tokens, max_tokens=2)
        Streams(core).run()
    finally:
        manager.get_computed_blocks = look_up
    return request_hits[0]


def test_kv_of_the_same_weights_is_shared(core: EngineCore) -> None:
    assert hit_tokens(core, "first", prompt(30, 100)) == 0
    assert hit_tokens(core, "second", prompt(30, 100)) == 96


def test_kv_of_other_weights_is_never_read(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    assert hit_tokens(core, "first", prompt(31, 100)) == 0
    publish(core, folders["new"], "new")
    assert hit_tokens(core, "second", prompt(31, 100)) == 0
    publish(core, folders["old"], "old")  # the label comes back, its KV does not
    assert hit_tokens(core, "third", prompt(31, 100)) == 0
    call(core, "rollback")
    assert hit_tokens(core, "fourth", prompt(31, 100)) == 0


def test_without_our_salt_the_same_sequence_reads_stale_kv(
    core: EngineCore, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core.scheduler.vllm_inflight, "policy", NamespacePolicy(None))
    assert hit_tokens(core, "first", prompt(32, 100)) == 0
    publish(core, folders["new"], "new")
    assert hit_tokens(core, "second", prompt(32, 100)) == 96


def test_a_request_hashed_before_a_commit_and_admitted_after_it_reads_no_old_kv(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    assert hit_tokens(core, "first", prompt(33, 100)) == 0
    hashed = core.preprocess_add_request(request("late", prompt(33, 100)))
    publish(core, folders["new"], "new")
    core.add_request(*hashed)
    manager = core.scheduler.kv_cache_manager
    core.scheduler._get_local_prefix_cache_hit(hashed[0])
    assert manager.get_computed_blocks(hashed[0])[1] == 0


def test_blocks_filled_across_a_commit_are_out_of_reach(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    add(core, "mixed", prompt(34, 64), max_tokens=70)
    streams = Streams(core).step(10)
    publish(core, folders["new"], "new")
    streams.run()
    text = prompt(34, 64) + streams.tokens["mixed"]
    assert hit_tokens(core, "next", text) == 0


def test_a_salt_of_the_user_still_separates(core: EngineCore) -> None:
    salted = NamespacePolicy().salted
    assert salted("x", CacheNamespace(0)) == "x"
    roots = [CacheNamespace(epoch, load) for epoch in range(3) for load in range(3)]
    users = (None, "x", "w1\x1f", "w1\x1fx", "w0a1\x1fx")
    assert len({salted(user, root) for user in users for root in roots}) == 5 * 9


@pytest.fixture
def by_drift(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> EngineCore:
    """The core where KV may be read until the weights have moved by 5 %."""
    policy = NamespacePolicy.parse("versioned:auto", drift=0.05)
    monkeypatch.setattr(core.scheduler.vllm_inflight, "policy", policy)
    return core


def nearby(folder: Path, at: Path) -> Path:
    """The checkpoint of `folder`, moved by 2 %."""
    tensors = load_file(folder / "model.safetensors")
    moved = {name: tensor.float() * 1.02 for name, tensor in tensors.items()}
    save_file(moved, at / "model.safetensors")
    return at


def test_kv_of_weights_that_hardly_moved_may_be_read(
    by_drift: EngineCore, folders: dict[str, Path], tmp_path: Path
) -> None:
    core, near = by_drift, nearby(folders["old"], tmp_path)
    publish(core, folders["old"], "old")  # how far that is, is not known to be little
    assert hit_tokens(core, "first", prompt(35, 100)) == 0
    publish(core, near, "by 2 %")
    assert hit_tokens(core, "second", prompt(35, 100)) == 96
    call(core, "rollback")
    assert hit_tokens(core, "third", prompt(35, 100)) == 96
    # By now it may have moved 4 %; two more could be more than 5 in all.
    publish(core, near, "by 2 % again")
    assert hit_tokens(core, "fourth", prompt(35, 100)) == 0
    publish(core, folders["new"], "far away")
    assert hit_tokens(core, "fifth", prompt(35, 100)) == 0


def test_a_rollback_of_a_rollback_goes_as_far_as_the_first(
    by_drift: EngineCore, folders: dict[str, Path], tmp_path: Path
) -> None:
    core = by_drift
    publish(core, folders["old"], "old")
    publish(core, nearby(folders["old"], tmp_path), "by 2 %")
    publish(core, folders["new"], "far away")
    for way in ("back", "and forth", "and back again"):
        call(core, "rollback")
        assert hit_tokens(core, way, prompt(36, 100)) == 0
