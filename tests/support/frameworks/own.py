"""A user's own worker extension, and the rows that make its calls known."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from copy import deepcopy
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

    def tests_push_and_write(self: Any, folder: str, way: str, catches: bool) -> Any:
        """Load tensors, and write one parameter past the loader."""
        found = load_file(Path(folder) / "model.safetensors")
        self.model_runner.get_model().load_weights(iter(found.items()))
        model = self.model_runner.get_model()
        try:
            with torch.no_grad():
                WAYS[way](self, model)
        except Exception:
            if not catches:
                raise
        return True

    def tests_keep_model(self: Any) -> None:
        self.tests_kept = self.model_runner.get_model()

    def tests_join(self: Any) -> None:
        HERE.folder = "a folder"

    def tests_push_from_here(self: Any) -> Any:
        return Extension.tests_push(self, HERE.folder)


def norm(model: Any) -> torch.nn.Parameter:
    found: torch.nn.Parameter = dict(model.named_parameters())["model.norm.weight"]
    return found


def of_ones() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(128, dtype=torch.bfloat16), False)


OF_NORM = [("norm.weight", torch.ones(128, dtype=torch.bfloat16))]

WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "a copy": lambda worker, model: norm(model).copy_(norm(model) * 2),
    "a part of data": lambda worker, model: norm(model).data[3:4].fill_(7),
    "out": lambda worker, model: torch.mul(
        norm(model), 2, out=norm(model).data.view(-1)
    ),
    "the model in it": lambda worker, model: model.model.load_weights(OF_NORM),
    "other data": lambda worker, model: setattr(
        norm(model), "data", torch.ones(128, dtype=torch.bfloat16)
    ),
    "another parameter": lambda worker, model: setattr(
        model.model.norm, "weight", of_ones()
    ),
    "an assigned state": lambda worker, model: model.model.norm.load_state_dict(
        {"weight": of_ones()}, assign=True
    ),
    "another layer": lambda worker, model: setattr(
        model.model, "norm", deepcopy(model.model.norm)
    ),
    "other data before a load": lambda worker, model: (
        setattr(norm(model), "data", of_ones().data),
        model.load_weights([("lm_head.weight", torch.zeros(0))][:0]),
    ),
    "no parameter": lambda worker, model: delattr(model.model.norm, "weight"),
    "a collective": lambda worker, model: torch.distributed.broadcast(
        norm(model).data, 0
    ),
    "the live model": lambda worker, model: norm(worker.tests_kept).data.mul_(2),
    "the live model's loader": lambda worker, model: worker.tests_kept.load_weights(
        [("model.norm.weight", OF_NORM[0][1])]
    ),
}
"""Writes into a parameter that `load_weights` has filled, or past everything."""


def _row(method: str, *parameters: str) -> KnownCall:
    return KnownCall(
        framework="tests", method=method, parameters=parameters, role=Role.VERSION
    )


ROWS = [
    _row("tests_push", "folder"),
    _row("tests_push_calmly", "folder"),
    _row("tests_push_and_write", "folder", "way", "catches"),
    _row("tests_push_from_here"),
]
"""What an entry point of a user's package names."""
