"""The benchmark of frameworks' own updates: what it compares."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.frameworks.__main__ import WAYS, compared
from benchmarks.frameworks.arm import IN_PAUSE, WITHOUT_PAUSE
from benchmarks.frameworks.on_host import lend
from benchmarks.frameworks.packages import OWN
from benchmarks.frameworks.trainer import SENDERS, write_files
from benchmarks.record import OURS, UPSTREAM
from benchmarks.shapes import write_shape


def figures(gap_ms: float) -> dict[str, Any]:
    names = "gap_update_median_ms", "gap_update_max_ms", "lost_s", "update_s"
    return dict.fromkeys(names, gap_ms)


def test_arms_are_compared_only_where_both_make_the_same_calls() -> None:
    arms = {
        f"{OURS}, {IN_PAUSE}": figures(50),
        f"{OURS}, {WITHOUT_PAUSE}": figures(10),
    }
    assert compared("openrlhf", arms) is None
    arms[f"{UPSTREAM}, {IN_PAUSE}"] = figures(200)
    assert set((compared("openrlhf", arms) or {}).values()) == {4.0}


def test_plain_vllm_is_never_updated_by_parts_while_it_decodes() -> None:
    """verl makes one call, which holds the engine; OpenRLHF makes one per parameter."""
    for of_openrlhf in ("openrlhf", "openrlhf_ipc"):
        assert WAYS[of_openrlhf][UPSTREAM] == (IN_PAUSE,)
    assert all(ways[OURS][0] == ways[UPSTREAM][0] for ways in WAYS.values())


def test_every_trainer_has_its_package_and_one_alone_needs_a_second_gpu() -> None:
    assert WAYS.keys() == SENDERS.keys()
    assert {sender.package for sender in SENDERS.values()} <= OWN.keys()
    apart = [name for name, sender in SENDERS.items() if not sender.is_beside]
    assert apart == ["openrlhf"]


def test_versions_in_files_differ_in_one_tensor_and_share_the_other_file(
    tmp_path: Path,
) -> None:
    folder = write_shape("tiny", tmp_path)
    versions = write_files(folder, torch.device("cpu"))
    first, second = (load(version) for version in versions)
    assert first.keys() == second.keys() == load(folder).keys()
    differing = [name for name in first if not torch.equal(first[name], second[name])]
    assert differing == ["lm_head.weight"]
    assert all(
        torch.equal(tensor, first[name]) for name, tensor in load(folder).items()
    )
    files = [version / "rest.safetensors" for version in versions]
    assert files[0].samefile(files[1])
    assert write_files(folder, torch.device("cpu")) == versions, "they are written once"


def load(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def test_what_is_lent_on_the_host_is_the_memory_of_the_lender() -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    function, arguments = lend(tensor)
    assert torch.equal(function(*arguments), tensor)
    assert len(arguments) == 7, "OpenRLHF writes its own device into the last one"
    kept = function(*arguments)
    lend(tensor * 2)
    assert torch.equal(kept, tensor * 2)
