"""The file that keeps a published version while no trainer runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.trainers.fake_engine import weights
from vllm.inflight.errors import ConfigError
from vllm.inflight.trainer.deltas.kept_file import KeptFile
from vllm.inflight.trainer.deltas.published import PublishedVersion
from vllm.inflight.trainer.snapshot import Snapshot


def taken(kept: KeptFile, folder: Path, value: float = 1.0) -> PublishedVersion:
    snapshot = Snapshot.pack(weights(value).items(), folder)
    manifest = snapshot.manifest(step=None, digests=True)
    return kept.take(snapshot, manifest)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "kept").mkdir()
    return tmp_path / "kept" / "last.safetensors"


def test_a_version_is_found_again_with_its_digests(file: Path, tmp_path: Path) -> None:
    kept = KeptFile(file)
    assert kept.read() is None
    for value in (1.0, 2.0):
        version = taken(kept, tmp_path, value)
    kept.close()
    again = KeptFile(file).read()
    assert again is not None and again.digest == version.digest
    found = dict(again.pairs())
    assert found.keys() == weights().keys()
    assert torch.equal(found["a.weight"], weights(2.0)["a.weight"])
    assert list(file.parent.iterdir()) == [file]


def test_what_is_written_into_a_version_is_in_the_file(
    file: Path, tmp_path: Path
) -> None:
    kept = KeptFile(file)
    version = taken(kept, tmp_path)
    dict(version.pairs())["a.weight"][0, 0] = 5.0
    kept.close()
    again = KeptFile(file).read()
    assert again is not None and again.digest != version.digest
    assert dict(again.pairs())["a.weight"][0, 0] == 5.0


@pytest.mark.parametrize("content", [b"", b"text", b"\xff" * 100, b"\x02" + b"\0" * 9])
def test_a_file_that_is_none_is_replaced(
    file: Path, tmp_path: Path, content: bytes
) -> None:
    file.write_bytes(content)
    kept = KeptFile(file)
    assert kept.read() is None
    taken(kept, tmp_path)
    kept.close()
    assert KeptFile(file).read() is not None


def test_a_file_that_was_cut_off_is_replaced(file: Path, tmp_path: Path) -> None:
    kept = KeptFile(file)
    taken(kept, tmp_path)
    kept.close()
    file.write_bytes(file.read_bytes()[:-3])
    assert KeptFile(file).read() is None


def test_a_file_of_another_writer_with_odd_offsets_is_replaced(
    file: Path, tmp_path: Path
) -> None:
    entries = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "BF16", "shape": [1], "data_offsets": [1, 3]},
    }
    header = json.dumps(entries).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    kept = KeptFile(file)
    assert kept.read() is None
    taken(kept, tmp_path)  # and nobody has it
    kept.close()


def test_a_publisher_has_its_file_for_itself(file: Path, tmp_path: Path) -> None:
    kept, other = KeptFile(file), KeptFile(file)
    version = taken(kept, tmp_path)
    for call in (other.read, lambda: taken(other, tmp_path, 3.0)):
        with pytest.raises(ConfigError, match="in use by another publisher"):
            call()
    kept.close()  # although its memory is still there
    assert other.read() is not None
    assert version.digest


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no directory"):
        KeptFile(tmp_path / "nowhere" / "file")
