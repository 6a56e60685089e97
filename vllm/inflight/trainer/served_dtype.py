"""The dtype that engines serve: asked while they commit, so that nobody waits.

It is asked again with each whole version. An engine behind the same address may have
been started anew, with another dtype.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import torch

from vllm.inflight.background import in_background
from vllm.inflight.trainer.coordinator import call_all
from vllm.inflight.trainer.engine_clients import Engine
from vllm.inflight.trainer.http_client import Reply
from vllm.inflight.trainer.retry import RetryBudget
from vllm.inflight.trainer.sources.cast import served_dtype

ASK_S = 5.0
"""Seconds after which an engine is asked no longer."""
ANSWER_S = 0.1
"""Most seconds that a publish waits for the answer, when all else is done."""

logger = logging.getLogger(__name__)


class ServedDtype:
    """What float32 weights are cast to, as engines tell it.

    Of float32 weights nearly every number changes at a step, and few roundings.

    Args:
        engines: to be asked.

    Attributes:
        cast: the dtype that all engines serve, if it is narrower than what the trainer
            has; None if that is not known, or not so.

    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.cast: torch.dtype | None = None
        self._engines = engines
        self._width = 0
        """Most bytes of an element that the trainer has sent."""
        self._is_known = False
        self._answers: Future[list[Reply]] | None = None

    def ask(self, dtypes: Iterable[torch.dtype], *, is_again: bool) -> None:
        """Ask in a thread of its own; returns at once.

        Args:
            dtypes: of what is sent. Without float32 or wider ones nobody is asked.
            is_again: whether to ask even if the engines have told.

        """
        self._answers = None
        widths = [dtype.itemsize for dtype in dtypes if dtype.is_floating_point]
        self._width = max([self._width, *widths])
        if self._width <= 2 or (self._is_known and not is_again):
            return
        budget = RetryBudget(ASK_S)

        def answers() -> list[Reply]:
            return call_all(self._engines, lambda engine: engine.info(budget), budget)

        self._answers = in_background(answers)

    def take(self) -> None:
        """Follow the answer; if there is none yet, the next publish asks again."""
        answers, self._answers = self._answers, None
        if answers is None:
            return
        try:
            infos = answers.result(ANSWER_S)
        except Exception as error:  # the version is committed, whatever they answer
            logger.info("the dtype that is served is not known yet: %r", error)
            return
        self._is_known = True
        served = served_dtype(one for i in infos for one in i.get("engines", [i]))
        is_narrower = served is not None and served.itemsize < self._width
        cast = served if is_narrower else None
        if cast != self.cast:
            logger.info(
                "weights are %s from the next version on, which is whole: the engines "
                "serve %s; dtype= says otherwise",
                "no longer cast" if cast is None else f"cast to {cast}",
                "several dtypes" if served is None else served,
            )
        self.cast = cast
