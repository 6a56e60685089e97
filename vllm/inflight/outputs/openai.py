"""Version spans in OpenAI's replies: `weight_versions` on every choice.

Upstream turns engine outputs into replies and drops fields that it does not know.
`ReplySpans` stands on both sides of that: it notes the spans of every output on the
way in, and writes them on the choice with the same index on the way out.

    engine ──► watched ──► upstream's generator ──► labelled ──► client
                  │ note(index, output)                 ▲ write(line)
                  └─────────── ReplySpans ──────────────┘

A stream's line is not decoded: upstream writes compact JSON with one choice per
line, so the field is spliced in behind the index of that choice. Only a line
that may have several choices costs a JSON round trip.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from functools import cache
from typing import Any, Protocol, TypeVar

from vllm.inflight import upstream
from vllm.inflight.config import InflightConfig
from vllm.inflight.outputs.spans import as_dicts

FIELD = "weight_versions"
KV_FIELD = "kv_versions"
DATA = "data: "
ASKED = "return_weight_versions"
"""The field of a request that asks for upstream's spans, from vLLM 0.33 on."""

_EMPTY = f',"{FIELD}":null'
"""Upstream's own field in a line of a stream, when nobody asks upstream for it."""

# Inside a JSON string every quote has a backslash before it, so text of a model or a
# client matches neither of these.
_CHOICE = re.compile(r'"choices":\[\{"index":(\d+)')
_SECOND_INDEX = '},{"index":'

# `json.dumps` with separators makes a new encoder for every line.
_compact = json.JSONEncoder(separators=(",", ":")).encode

Item = TypeVar("Item")
Response = TypeVar("Response")
Asking = TypeVar("Asking", bound="Copyable")


class Serving(Protocol):
    """One of upstream's classes that serve a route."""

    engine_client: upstream.EngineClient


class Requested(Protocol):
    """A request that may have arguments of vLLM's own beside OpenAI's."""

    vllm_xargs: dict[str, Any] | None


class Copyable(Protocol):
    """A request as Pydantic makes it."""

    def model_copy(self, *, update: dict[str, Any]) -> Any:
        """The same request with other values of some fields."""


class Generating(Protocol):
    """A request of `/inference/v1/generate`."""

    sampling_params: upstream.SamplingParams


def wants_spans(serving: Serving, request: Requested) -> bool:
    """Whether a reply has `weight_versions`, which OpenAI's replies do not have.

    `{"vllm_xargs": {"weight_versions": 0}}` leaves it out, 1 asks for it, as does
    `{"return_weight_versions": true}`.
    """
    asked = _asked(request).get(FIELD)
    if asked is not None:
        return bool(asked)
    if getattr(request, ASKED, None) is True:
        return True
    config = InflightConfig.of(serving.engine_client.vllm_config)
    return config.openai_spans == "on"


def ledger_for(
    serving: Serving, request: Requested, *, role_first: bool = False
) -> ReplySpans | None:
    """The record of the fields to add to a reply; None if there are none.

    KV provenance is added if the request asks for it, or if `--inflight-kv-versions` is
    on and the request does not leave the spans out. Where nobody wants spans, the empty
    field goes that upstream writes from 0.33 on.
    """
    if wants_spans(serving, request):
        return ReplySpans(role_first=role_first)
    asked = _asked(request)
    config = InflightConfig.of(serving.engine_client.vllm_config)
    by_default = config.kv_versions == "on" and FIELD not in asked
    if asked.get(KV_FIELD, by_default) or declares_spans():
        return ReplySpans(kv_only=True, drops_empty=True)
    return None


@cache
def declares_spans() -> bool:
    """Whether upstream's replies have a field for spans, which may be empty."""
    return FIELD in upstream.CompletionResponseChoice.model_fields


def taken_over(request: Asking) -> Asking:
    """A request for whose reply we write the spans, so that upstream writes none."""
    if getattr(request, ASKED, None) is True:
        return request.model_copy(update={ASKED: False})
    return request


def _asked(request: Requested) -> dict[str, Any]:
    return getattr(request, "vllm_xargs", None) or {}


def wants_kv(serving: Serving, request: Generating) -> bool:
    """Whether a reply has KV provenance, by its request or by the configuration."""
    asked = (request.sampling_params.extra_args or {}).get(KV_FIELD)
    config = InflightConfig.of(serving.engine_client.vllm_config)
    return bool(asked) or config.kv_versions == "on"


class ReplySpans:
    """The newest spans of every choice of one reply.

    Args:
        role_first: the first line of each choice carries a role and no token,
            as in a stream of chat.
        kv_only: whether upstream writes the spans itself, as in
            `/inference/v1/generate`, and only KV provenance has to be added.
        drops_empty: with `kv_only`, whether upstream's field is dropped if it is empty.

    """

    def __init__(
        self,
        *,
        role_first: bool = False,
        kv_only: bool = False,
        drops_empty: bool = False,
    ) -> None:
        self._kv_only = kv_only
        self._drops_empty = drops_empty or (not kv_only and declares_spans())
        self._spans: dict[int, Iterable[Any] | None] = {}
        self._read: dict[int, Iterable[Any]] = {}
        self._role_first = role_first
        self._begun: set[int] = set()

    def note(self, index: int, output: upstream.CompletionOutput) -> None:
        """Keep the spans of an output; a later output of the choice replaces them."""
        self._spans[index] = output.weight_versions
        if (read := getattr(output, KV_FIELD, None)) is not None:
            self._read[index] = read

    def note_all(self, result: upstream.RequestOutput, first: int = 0) -> None:
        """Note the outputs of one prompt, whose choices are counted from `first`."""
        for output in result.outputs:
            self.note(first + output.index, output)

    def spans(self, index: int) -> list[dict[str, Any]] | None:
        """The spans of a choice; empty without tokens, None if they are unknown."""
        return as_dicts(self._spans.get(index, ()))

    def label(self, response: Response) -> Response:
        """Set the fields on the choices of a whole reply; an error has no choices."""
        for choice in getattr(response, "choices", ()):
            if not self._kv_only:
                choice.weight_versions = self.spans(choice.index)
            elif self._drops_empty and vars(choice).get(FIELD, ...) is None:
                delattr(choice, FIELD)
            if choice.index in self._read:
                choice.kv_versions = as_dicts(self._read[choice.index])
        return response

    def write(self, line: str) -> str:
        """A line of a stream, with the fields in its choices."""
        match = _CHOICE.search(line)
        if match is None:  # usage, an error, [DONE]
            return line
        if self._drops_empty:
            line = line.replace(_EMPTY, "")
        if _SECOND_INDEX in line:  # choices or tool calls: only JSON can tell
            return self._decoded(line)
        index = int(match[1])
        fields = ""
        if not self._kv_only:
            fields = f',"{FIELD}":{_compact(self._next(index))}'
        if index in self._read:
            fields += f',"{KV_FIELD}":{_compact(as_dicts(self._read[index]))}'
        return f"{line[: match.end()]}{fields}{line[match.end() :]}"

    def _decoded(self, line: str) -> str:
        chunk = json.loads(line.removeprefix(DATA))
        for choice in chunk["choices"]:
            if not self._kv_only:
                choice[FIELD] = self._next(choice["index"])
            if choice["index"] in self._read:
                choice[KV_FIELD] = as_dicts(self._read[choice["index"]])
        return f"{DATA}{_compact(chunk)}\n\n"

    def _next(self, index: int) -> list[dict[str, Any]] | None:
        """The spans for the next line of a choice."""
        if self._role_first and index not in self._begun:
            self._begun.add(index)
            return []
        return self.spans(index)


async def watched(
    source: AsyncGenerator[Item, None], note: Callable[[Item], None]
) -> AsyncGenerator[Item, None]:
    """`source`, with every item noted before it is yielded."""
    async with aclosing(source):
        async for item in source:
            note(item)
            yield item


async def labelled(
    source: AsyncGenerator[Item, None],
    note: Callable[[Item], None],
    write: Callable[[AsyncGenerator[Item, None]], AsyncGenerator[str, None]],
    ledger: ReplySpans,
) -> AsyncGenerator[str, None]:
    """The lines that upstream writes of `source`, with the fields of `ledger`.

    Args:
        source: the outputs of the engine.
        note: notes one output in `ledger`.
        write: upstream's generator of lines.
        ledger: the spans of this reply.

    """
    async with (
        aclosing(watched(source, note)) as results,
        aclosing(write(results)) as lines,
    ):
        async for line in lines:
            yield ledger.write(line)
