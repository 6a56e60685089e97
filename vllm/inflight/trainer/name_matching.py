"""`name_map="auto"`: pairs the tensor names of a source with the engines' names.

A name is paired if exactly one name of the model has the same ending, shape and kind of
dtype. All pairs are made and logged before anything is sent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from vllm.inflight.errors import WeightsMismatch
from vllm.inflight.tensor_names import Known, paired
from vllm.inflight.trainer.coordinator import call_all
from vllm.inflight.trainer.engine_clients import Engine
from vllm.inflight.trainer.http_client import Reply
from vllm.inflight.trainer.retry import RetryBudget
from vllm.inflight.trainer.sources.modules import is_head

AUTO = "auto"

SHOWN = 20
"""Most pairs in the log."""

logger = logging.getLogger(__name__)

Sent = tuple[str, Sequence[int], str]


def _known(reply: Reply) -> Known:
    return {
        entry["name"]: (entry["shape"], entry["dtype"]) for entry in reply["tensors"]
    }


class NameMatching:
    """The pairs found so far. New names are looked up at the engines."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._found: dict[str, str] = {}

    @property
    def is_known(self) -> bool:
        """Whether the names of a version have been paired."""
        return bool(self._found)

    def __call__(self, name: str) -> str:
        """The model's name for a name of the source."""
        return self._found.get(name, name)

    def find(self, sent: Iterable[Sent], retry_budget: RetryBudget) -> dict[str, str]:
        """Pair the names of tensors; returns the pairs whose names differ.

        Args:
            sent: name, shape and dtype of each tensor.
            retry_budget: the time for the calls of the engines.

        Raises:
            WeightsMismatch: a name matches several names of the model, or none;
                `tensors` names them.
            InflightError: an engine does not report its names.

        """
        specs = {name: (name, shape, dtype) for name, shape, dtype in sent}
        if not specs.keys() <= self._found.keys():
            replies = call_all(
                self._engines, lambda e: e.names(retry_budget), retry_budget
            )
            known = [_known(reply) for reply in replies]
            found = [self._paired(specs.values(), one) for one in known]
            for engine, other in zip(self._engines, found, strict=True):
                if other != found[0]:
                    one = min(n for n in specs if other[n] != found[0][n])
                    raise WeightsMismatch(
                        f"name_map='auto': {one!r} means {found[0][one]!r} to "
                        f"{self._engines[0].name} and {other[one]!r} to {engine.name}; "
                        "give name_map= a dict, and each model a publisher",
                        tensors=[one],
                    )
            self._tell({n: to for n, to in found[0].items() if n != to})
            self._found |= found[0]
        return {n: self._found[n] for n in specs if self._found[n] != n}

    @staticmethod
    def _paired(sent: Iterable[Sent], known: Known) -> dict[str, str]:
        """Each sent name -> its match among the known names of a model."""
        sent = list(sent)
        pairing = paired(sent, known)
        wrong = dict(pairing.ambiguous)
        # The engine knows whether its head is tied, so it checks a head's name.
        wrong |= {name: [] for name in pairing.unmatched if not is_head(name)}
        if wrong:
            problems = [
                f"{name!r} could be {' or '.join(map(repr, candidates[:3]))}"
                if candidates
                else f"{name!r} is like no name of the model in its ending and shape"
                for name, candidates in list(wrong.items())[:3]
            ]
            more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise WeightsMismatch(
                f"name_map='auto' finds no single name for {len(wrong)} tensors, and "
                f"nothing was sent: {'; '.join(problems)}{more}. GET /weight_names "
                "lists the model's names; give name_map= a dict or a function",
                tensors=list(wrong),
            )
        return {name: pairing.name_map.get(name, name) for name, _, _ in sent}

    @staticmethod
    def _tell(name_map: dict[str, str]) -> None:
        if name_map:
            pairs = [f"{name!r} as {to!r}" for name, to in name_map.items()]
            more = f", and {len(pairs) - SHOWN} more" if len(pairs) > SHOWN else ""
            logger.warning(
                "name_map='auto' publishes %s%s; Outcome.mapped has all",
                ", ".join(pairs[:SHOWN]),
                more,
            )
