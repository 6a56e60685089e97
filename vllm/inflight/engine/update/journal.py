"""The journal: a file with the live version and how to load it again.

The file is replaced as a whole at every commit and rollback. So a crash leaves the old
or the new content. A separate thread writes it, so that a slow or full disk delays no
step and no update.
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
"""The required keys of a journal entry, and of a step of its recipe."""

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading a file raises that is not a journal."""

REST_S = 0.0005
"""The writing thread's pause between two slices of a step with many names."""

MAX_STEPS = 32
"""The longest recipe. After more subsets, only an update of all tensors is noted."""

Recipe = tuple[dict[str, Any], ...]
"""Updates from files that lead from the model's own weights to a version, each as its
`path`, `draft_path`, `subset` and `name_map`."""


def extended(
    recipe: Recipe | None, update: Update, *, has_drafter: bool
) -> Recipe | None:
    """The recipe after `update`, which starts from the result of `recipe`.

    None if files are not enough to load the result.
    """
    files = update.files
    if files is None:
        return None
    replaced = set() if files["subset"] else _parts(files)
    if replaced == {"path", "draft_path"} or (replaced == {"path"} and not has_drafter):
        recipe = ()
    if recipe is None:
        return None
    # Steps that the update replaces need not be loaded before it.
    kept = [step for step in recipe if not _parts(step) <= replaced]
    made = (*kept, files)
    return made if len(made) <= MAX_STEPS else None


def _parts(step: dict[str, Any]) -> set[str]:
    """The parts that an update loads: the model, its drafter, or both."""
    return {part for part in ("path", "draft_path") if step[part]}


class Journal:
    """The file of `--inflight-journal`, of the first data-parallel engine.

    Raises:
        ConfigError: the file cannot be read or written, or is not a journal.

    """

    def __init__(self, vllm_config: upstream.VllmConfig) -> None:
        path = InflightConfig.of(vllm_config).journal
        # Engines of an external launcher all get one path, too.
        is_first = worker_index(vllm_config.parallel_config) == 0
        self._path = Path(path) if path and is_first else None
        self._model = str(vllm_config.model_config.model)
        self._found: dict[str, Any] | None = None
        """The journal entry of the engine that ran before this one."""
        self.tried = False
        """Whether a server has tried to load that version again."""
        self._error: str | None = None
        self._notes: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._writer = Background(
            self._write, name="inflight-journal", end=lambda: self._notes.put(None)
        )
        if self._path is not None:
            self._found = _read(self._path)
            self._writer.start()

    def note(self, version: Version, recipe: Recipe | None) -> None:
        """Write `version`, which is live now, and the recipe to load it again."""
        if self._path is not None:
            facts = {"format": FORMAT, "model": self._model, **version.to_dict()}
            steps = None if recipe is None else list(recipe)
            self._notes.put(facts | {"recipe": steps})

    def told(self) -> dict[str, Any]:
        """`path`, `model`, `found`, `tried` and `error` of the journal.

        `found` is the entry at the start of this engine. `tried` tells whether a server
        has tried to load it again. `error` is that of the last write.
        """
        path = None if self._path is None else str(self._path)
        facts = {"path": path, "model": self._model, "found": self._found}
        return facts | {"tried": self.tried, "error": self._error}

    def close(self) -> None:
        """Write the last entry, and end the thread."""
        if self._writer.is_alive():
            self._notes.put(None)
            self._writer.join(timeout=5)

    def _write(self) -> None:
        assert self._path is not None
        facts, is_over = None, False
        while not is_over:
            noted = self._notes.get()
            facts, is_over = noted or facts, noted is None
            # On a slow disk entries queue up, and only the last one matters.
            if facts is None or not (is_over or self._notes.empty()):
                continue
            try:
                recipe = resting(unpack(facts["recipe"]), lambda: time.sleep(REST_S))
                _replace(self._path, msgspec.json.encode(facts | {"recipe": recipe}))
                self._error = None
            except Exception as error:  # a full disk, or an entry that is not JSON
                self._error = str(error) or type(error).__name__
                logger.error("--inflight-journal cannot be written: %s", error)
            facts = None


def _read(path: Path) -> dict[str, Any] | None:
    """Read the journal, and check that it can be written."""
    try:
        content = path.read_bytes() if path.exists() else b""
        found = json.loads(content) if content else None
        if found is not None and not _is_note(found):
            raise ValueError("not a journal")
        _replace(path, content)
    except OSError as error:
        raise ConfigError(
            f"--inflight-journal {path} cannot be read and written: {error}"
        ) from None
    except UNREADABLE:
        raise ConfigError(
            f"--inflight-journal {path} is not a journal of this release; name another "
            "file, or remove this one"
        ) from None
    return found


def _is_note(found: Any) -> bool:
    """Whether a journal entry has all required keys."""
    is_ours = found["format"] == FORMAT and found.keys() >= NOTED
    return is_ours and all(step.keys() >= STEP for step in found["recipe"] or ())


def _replace(path: Path, content: bytes) -> None:
    fresh = path.with_name(path.name + ".new")
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
