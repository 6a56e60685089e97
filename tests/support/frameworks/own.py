"""A user's own worker extension, and the rows that make its calls known."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vllm.inflight.frameworks.known_call import KnownCall, Role

HERE = threading.local()


class Extension:
    """Loads files of a folder, in several ways."""

    def tests_push(self: Any, folder: str) -> dict[str, Any]:
        found = load_file(Path(folder) / "model.safetensors")
        loaded = self.model_runner.get_model().load_weights(iter(found.items()))
        return {"loaded": loaded, "path": Path(folder)}

    def tests_push_calmly(self: Any, folder: str) -> Any:
        Extension.tests_push(self, folder)
        # Of a thread that decodes, both would stop it.
        return gc.collect(), torch.cuda.empty_cache()

    def tests_join(self: Any) -> None:
        HERE.folder = "a folder"

    def tests_push_from_here(self: Any) -> Any:
        return Extension.tests_push(self, HERE.folder)


def _row(method: str, *parameters: str) -> KnownCall:
    return KnownCall(
        framework="tests", method=method, parameters=parameters, role=Role.VERSION
    )


ROWS = [
    _row("tests_push", "folder"),
    _row("tests_push_calmly", "folder"),
    _row("tests_push_from_here"),
]
"""What an entry point of a user's package names."""
