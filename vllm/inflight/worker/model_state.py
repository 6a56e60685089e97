"""What the worker remembers of one module of a model, kept on that module.

Each package below `worker/` defines a small class for what it has to remember: where
the weights lie, what the model was built from, which tripwire watches a layer. All of
it is in one attribute of the module, so it ends with the module.

A table of modules would have to be emptied by hand. An entry whose value refers to its
key is never freed, even from a dictionary with weak keys.
"""

from __future__ import annotations

from typing import Any, Self, TypeVar

import torch

from vllm.inflight.attached import AttachedOnDemand

Fact = TypeVar("Fact")


class ModelState(AttachedOnDemand):
    """The facts about one module, at most one of each class.

    A deep copy or a pickle of the module gets an empty state: the facts are about the
    original.
    """

    def __init__(self) -> None:
        self._facts: dict[type, Any] = {}

    def set(self, fact: object) -> None:
        """Keep `fact`, in the place of an earlier one of its class."""
        self._facts[type(fact)] = fact

    def get(self, kind: type[Fact]) -> Fact | None:
        """The fact of class `kind`, or None."""
        found: Fact | None = self._facts.get(kind)
        return found

    def pop(self, kind: type[Fact]) -> Fact | None:
        """Remove and return the fact of class `kind`, or None."""
        found: Fact | None = self._facts.pop(kind, None)
        return found

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


def recall(module: torch.nn.Module, kind: type[Fact]) -> Fact | None:
    """The fact of class `kind` about `module`, or None; the module is not changed."""
    state = ModelState.find(module)
    return None if state is None else state.get(kind)
