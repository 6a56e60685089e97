"""What is served and how to have it again, noted on disk at every switch.

The file is replaced as a whole, so a crash leaves the note before or the new one. A
thread of its own writes it: a disk that is slow or full holds up no step and no update.
"""

from __future__ import annotations

import json
import os
import queue
import time
from pathlib import Path
from typing import Any

import msgspec

from vllm.inflight import upstream
from vllm.inflight.background import Background
from vllm.inflight.config import InflightConfig
from vllm.inflight.engine.transaction import Update
from vllm.inflight.errors import ConfigError
from vllm.inflight.packed import resting, unpack
from vllm.inflight.transport.rank_numbers import worker_index
from vllm.inflight.update import Version

logger = upstream.init_logger(__name__)

FORMAT = 1

NOTED = {"model", "weight_version", "step", "digest", "recipe"}
STEP = {"path", "draft_path", "subset", "name_map"}
"""What there has to be in a note, and in a step of its recipe."""

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What a file raises that is none."""

REST_S = 0.0005
"""Of the thread that writes, between two slices of a step with many names."""

MAX_STEPS = 32
"""Of a recipe: whoever sends subsets for ever has to send all of it some time."""

Recipe = tuple[dict[str, Any], ...]
"""Updates from files that lead from the model's own weights to a version, each as its
`path`, `draft_path`, `subset` and `name_map`."""


def extended(
    recipe: Recipe | None, update: Update, *, has_drafter: bool
) -> Recipe | None:
    """How that is had again which `update` makes of what `recipe` leads to.

    None if files do not lead to it.
    """
    files = update.files
    if files is None:
        return None
    replaced = set() if files["subset"] else _parts(files)
    if replaced == {"path", "draft_path"} or (replaced == {"path"} and not has_drafter):
        recipe = ()
    if recipe is None:
        return None
    # What it replaces need not be read before it.
    kept = [step for step in recipe if not _parts(step) <= replaced]
    made = (*kept, files)
    return made if len(made) <= MAX_STEPS else None


def _parts(step: dict[str, Any]) -> set[str]:
    """What an update brings something for: the model, its drafter, or both."""
    return {part for part in ("path", "draft_path") if step[part]}


class Journal:
    """The file of `--inflight-journal`; of data-parallel engines the first has it.

    Raises:
        ConfigError: it cannot be read or written, or is something else.

    """

    def __init__(self, vllm_config: upstream.VllmConfig) -> None:
        path = InflightConfig.of(vllm_config).journal
        # Of the engines of an external launcher, too, which are all given one path.
        is_first = worker_index(vllm_config.parallel_config) == 0
        self._path = Path(path) if path and is_first else None
        self._model = str(vllm_config.model_config.model)
        self._found: dict[str, Any] | None = None
        """What was served last before this engine was started."""
        self.tried = False
        """Whether a server has tried to have that served again."""
        self._error: str | None = None
        self._notes: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._writer = Background(
            self._write, name="inflight-journal", end=lambda: self._notes.put(None)
        )
        if self._path is not None:
            self._found = _read(self._path)
            self._writer.start()

    def note(self, version: Version, recipe: Recipe | None) -> None:
        """Have it noted that `version` is served now, and how it is had again."""
        if self._path is not None:
            facts = {"format": FORMAT, "model": self._model, **version.to_dict()}
            steps = None if recipe is None else list(recipe)
            self._notes.put(facts | {"recipe": steps})

    def told(self) -> dict[str, Any]:
        """`path`, `model`, what was `found` in it, and the `error` of the last note.

        And whether it was `tried` to serve that again.
        """
        path = None if self._path is None else str(self._path)
        facts = {"path": path, "model": self._model, "found": self._found}
        return facts | {"tried": self.tried, "error": self._error}

    def close(self) -> None:
        """Write what has been noted, and end."""
        if self._writer.is_alive():
            self._notes.put(None)
            self._writer.join(timeout=5)

    def _write(self) -> None:
        assert self._path is not None
        facts, is_over = None, False
        while not is_over:
            noted = self._notes.get()
            facts, is_over = noted or facts, noted is None
            # A disk may be slow, and only the last note is ever read again.
            if facts is None or not (is_over or self._notes.empty()):
                continue
            try:
                recipe = resting(unpack(facts["recipe"]), lambda: time.sleep(REST_S))
                _replace(self._path, msgspec.json.encode(facts | {"recipe": recipe}))
                self._error = None
            except Exception as error:  # a full disk; or a note that is no JSON
                self._error = str(error) or type(error).__name__
                logger.error("--inflight-journal cannot be written: %s", error)
            facts = None


def _read(path: Path) -> dict[str, Any] | None:
    """What is noted there; the file can be written, too."""
    try:
        content = path.read_bytes() if path.exists() else b""
        found = json.loads(content) if content else None
        if found is not None and not _is_note(found):
            raise ValueError("it says something else")
        _replace(path, content)
    except OSError as error:
        raise ConfigError(
            f"--inflight-journal {path} cannot be read and written: {error}"
        ) from None
    except UNREADABLE:
        raise ConfigError(
            f"--inflight-journal {path} is not a journal, or one of another release: "
            "name another file, or remove it"
        ) from None
    return found


def _is_note(found: Any) -> bool:
    """Whether it says all that it takes to follow it."""
    is_ours = found["format"] == FORMAT and found.keys() >= NOTED
    return is_ours and all(step.keys() >= STEP for step in found["recipe"] or ())


def _replace(path: Path, content: bytes) -> None:
    fresh = path.with_name(path.name + ".new")
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
