"""Temporary files of the tests are in one folder, which goes with the session."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from tests import conftest

LONGEST = 107
"""Bytes of the path of a socket in Linux."""


def test_a_socket_of_vllm_fits_into_the_folder_of_the_session(tmp_path: Path) -> None:
    folder = tempfile.gettempdir()
    assert folder == os.environ["TMPDIR"]
    assert len(f"{folder}/{uuid4()}") <= LONGEST
    assert not tmp_path.is_relative_to(folder), "pytest's own stay for three runs"


class Config:
    """Of a session that ends when its clean-ups are called."""

    def __init__(self) -> None:
        self.cleanups: list[Callable[[], None]] = []
        self.add_cleanup = self.cleanups.append


def test_the_folder_goes_with_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = tempfile.gettempdir()
    monkeypatch.setattr(tempfile, "tempdir", usual)
    monkeypatch.setenv("TMPDIR", usual)
    monkeypatch.setattr(conftest, "LANE", "")  # as in the process that starts lanes
    config = Config()
    conftest.pytest_configure(config)  # type: ignore[arg-type]
    folder = Path(tempfile.gettempdir())
    assert str(folder) != usual and folder.is_dir()
    (folder / "left").touch()
    for cleanup in config.cleanups:
        cleanup()
    assert not folder.exists()
