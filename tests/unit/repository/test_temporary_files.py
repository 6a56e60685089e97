"""Temporary files of the tests are in one folder, which goes with the session."""

import os
import tempfile
from multiprocessing.util import _finalizer_registry
from pathlib import Path
from uuid import uuid4

import pytest

from tests import conftest

LONGEST = 107
"""Bytes of the path of a socket in Linux."""

LAST = -200
"""Priority of the removal; multiprocessing removes its own folder before, with -100."""


def test_a_socket_of_vllm_fits_into_the_folder_of_the_session(tmp_path: Path) -> None:
    folder = tempfile.gettempdir()
    assert folder == os.environ["TMPDIR"]
    assert len(f"{folder}/{uuid4()}") <= LONGEST
    assert not tmp_path.is_relative_to(folder), "pytest's own stay for three runs"


def test_the_folder_goes_with_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = tempfile.gettempdir()
    monkeypatch.setattr(tempfile, "tempdir", usual)
    monkeypatch.setenv("TMPDIR", usual)
    monkeypatch.setattr(conftest, "LANE", "")  # as in the process that starts lanes
    conftest.pytest_configure()
    folder = Path(tempfile.gettempdir())
    assert str(folder) != usual and folder.is_dir()
    (folder / "left").touch()
    _, newest = max(key for key in _finalizer_registry if key[0] == LAST)
    _finalizer_registry[LAST, newest]()  # as when the process ends
    assert not folder.exists()
