"""Spans on their way out: stamps, the ledger, and the lines of a stream."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.completion.protocol import (
    CompletionRequest,
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.outputs import WeightVersionSpan

from vllm.inflight.engine.scheduling.version_stamp import Stamp
from vllm.inflight.outputs.openai import ReplySpans, labelled, taken_over, watched
from vllm.inflight.outputs.spans import (
    AdapterSpan,
    VersionSpan,
    as_dicts,
    as_object,
    decoded,
)

OLD = {"version": "old", "epoch": 1, "start": 0, "end": 3}
NEW = {"version": "new", "epoch": 2, "start": 3, "end": 5}


def test_a_span_is_read_as_over_http():
    plain = VersionSpan("new", 3, 5, 2)
    adapted = AdapterSpan("new", 3, 5, 2, "a", 1)
    for span in (plain, adapted):
        assert [dict(span)] == as_dicts([span])
        assert [*dict(span)] == [*as_dicts([span])[0]]
        assert span["version"] == span.version == "new"
    for missing in ("adapter", "keys", 0):
        with pytest.raises(KeyError):
            plain[missing]


def output(*spans: dict[str, Any], index: int = 0) -> Any:
    made = [VersionSpan(s["version"], s["start"], s["end"], s["epoch"]) for s in spans]
    return SimpleNamespace(index=index, weight_versions=made)


def ledger(*outputs: Any, role_first: bool = False) -> ReplySpans:
    made = ReplySpans(role_first=role_first)
    made.note_all(SimpleNamespace(outputs=outputs))
    return made


def completion(*texts: str, first: int = 0, request_id: str = "cmpl-1") -> str:
    """A line as upstream writes it, with one choice for every text."""
    chunk = CompletionStreamResponse(
        id=request_id,
        model="tiny",
        choices=[
            CompletionResponseStreamChoice(index=index, text=text, logprobs=None)
            for index, text in enumerate(texts, first)
        ],
    )
    return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"


def chat(delta: DeltaMessage, index: int = 0) -> str:
    choice = ChatCompletionResponseStreamChoice(index=index, delta=delta)
    chunk = ChatCompletionStreamResponse(model="tiny", choices=[choice])
    return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"


def read(line: str) -> dict[str, Any]:
    assert line.startswith("data: ") and line.endswith("\n\n")
    return json.loads(line.removeprefix("data: "))


def spans_of(line: str) -> list[Any]:
    return [choice["weight_versions"] for choice in read(line)["choices"]]


def without_spans(line: str) -> dict[str, Any]:
    chunk = read(line)
    for choice in chunk["choices"]:
        del choice["weight_versions"]
    return chunk


# ------------------------------------------------------------------ stamps, spans
@given(st.text(), st.integers(min_value=0))
def test_a_stamp_travels_as_one_string(label: str, epoch: int):
    assert Stamp.decode(Stamp(label, epoch).encode()) == Stamp(label, epoch)


def test_two_versions_with_one_label_are_two_spans():
    spans = [
        WeightVersionSpan(Stamp("a", epoch).encode(), epoch, epoch + 1)
        for epoch in range(2)
    ]
    assert as_dicts(decoded(spans)) == [
        {"version": "a", "epoch": 0, "start": 0, "end": 1},
        {"version": "a", "epoch": 1, "start": 1, "end": 2},
    ]


def test_unknown_spans_are_null_and_an_output_without_tokens_has_no_spans():
    assert as_dicts(decoded(None)) is None
    assert as_dicts(decoded([])) == []


# ------------------------------------------------------------------ whole replies
def test_every_choice_of_a_reply_gets_the_spans_of_its_output():
    choices = [SimpleNamespace(index=1), SimpleNamespace(index=0)]
    noted = ledger(output(OLD, index=0), output(OLD, NEW, index=1))
    noted.label(SimpleNamespace(choices=choices))
    assert [c.weight_versions for c in choices] == [[OLD, NEW], [OLD]]


def test_a_reply_that_is_an_error_stays_as_it_is():
    error = SimpleNamespace(error="no")
    assert ledger(output(OLD)).label(error) is error
    assert vars(error) == {"error": "no"}


def test_spans_that_nobody_knows_are_null_in_a_reply():
    """Beam search puts its beams together from many requests, without spans."""
    choice = SimpleNamespace(index=0)
    beam = SimpleNamespace(index=0, weight_versions=None)
    ledger(beam).label(SimpleNamespace(choices=[choice]))
    assert choice.weight_versions is None


# ---------------------------------------------------------------- lines of a stream
def test_a_line_carries_the_spans_noted_last():
    noted = ledger(output(OLD))
    assert spans_of(noted.write(completion("a"))) == [[OLD]]
    noted.note_all(SimpleNamespace(outputs=[output(OLD, NEW)]))
    assert spans_of(noted.write(completion("b"))) == [[OLD, NEW]]


def test_a_line_has_no_field_twice_where_upstream_writes_an_empty_one(monkeypatch):
    monkeypatch.setattr(f"{ReplySpans.__module__}.declares_spans", lambda: True)
    text = completion('a ,"weight_versions":null b')
    line = text.replace('"logprobs":null', '"logprobs":null,"weight_versions":null')
    assert line != text
    written = ledger(output(OLD)).write(line)
    assert written.count('"weight_versions":') == 1
    assert without_spans(written) == read(text)
    assert spans_of(written) == [[OLD]]


def test_an_empty_field_of_upstream_goes_where_nobody_wants_spans():
    text = completion("a").replace('"logprobs":null', '"weight_versions":null')
    silent = ReplySpans(kv_only=True, drops_empty=True)
    assert "weight_versions" not in silent.write(text)
    choices = [SimpleNamespace(index=0, weight_versions=None)]
    silent.label(SimpleNamespace(choices=choices))
    assert vars(choices[0]) == {"index": 0}
    asked_of_upstream = SimpleNamespace(index=0, weight_versions=[OLD])
    silent.label(SimpleNamespace(choices=[asked_of_upstream]))
    assert asked_of_upstream.weight_versions == [OLD]
    # Of `/inference/v1/generate`, the field is upstream's.
    assert ReplySpans(kv_only=True).write(text) == text


def test_upstream_is_not_asked_for_spans_that_we_write():
    asked = CompletionRequest(prompt="a", return_weight_versions=True)
    assert taken_over(asked).return_weight_versions is False
    assert asked.return_weight_versions is True
    plain = CompletionRequest(prompt="a")
    assert taken_over(plain) is plain


def test_a_span_is_written_with_all_its_fields_wherever_its_type_is_declared():
    """The type of upstream has neither an epoch nor an adapter."""
    spans = [VersionSpan("old", 0, 3, 1), AdapterSpan("new", 3, 5, 2, "task", 1)]
    assert [as_object(span) for span in spans] == as_dicts(spans)
    assert [as_object(dict(span)) for span in spans] == as_dicts(spans)


def test_a_line_gets_the_spans_of_its_own_choice():
    noted = ledger(output(OLD, index=0), output(OLD, NEW, index=11))
    assert spans_of(noted.write(completion("b", first=11))) == [[OLD, NEW]]
    assert spans_of(noted.write(completion("a", first=0))) == [[OLD]]


def test_the_choices_of_a_later_prompt_are_counted_from_the_end_of_the_earlier():
    noted = ReplySpans()
    noted.note_all(SimpleNamespace(outputs=[output(OLD, index=1)]), 2)
    assert spans_of(noted.write(completion("a", first=3))) == [[OLD]]


def test_a_choice_without_an_output_yet_has_no_spans():
    assert spans_of(ledger(output(OLD)).write(completion("a", first=1))) == [[]]


def test_spans_that_nobody_knows_are_null_in_a_line():
    beam = SimpleNamespace(index=0, weight_versions=None)
    assert spans_of(ledger(beam).write(completion("a"))) == [None]


def test_a_line_with_several_choices_labels_each():
    noted = ledger(output(OLD, index=0), output(OLD, NEW, index=1))
    assert spans_of(noted.write(completion("a", "b"))) == [[OLD], [OLD, NEW]]


def test_several_tool_calls_do_not_pass_for_choices():
    calls = [
        DeltaToolCall(index=index, function=DeltaFunctionCall(name="f", arguments="{}"))
        for index in range(2)
    ]
    line = chat(DeltaMessage(tool_calls=calls))
    written = ledger(output(OLD)).write(line)
    assert spans_of(written) == [[OLD]]
    assert without_spans(written) == read(line)


@pytest.mark.parametrize(
    "line",
    [
        "data: [DONE]\n\n",
        'data: {"error":{"message":"\\"choices\\":[{\\"index\\":0","code":400}}\n\n',
        "data: "
        + CompletionStreamResponse(
            id="a", model="tiny", choices=[], usage=UsageInfo()
        ).model_dump_json(exclude_none=True)
        + "\n\n",
        "",
    ],
    ids=["done", "error", "usage", "empty"],
)
def test_a_line_without_choices_stays_as_it_is(line: str):
    assert ledger(output(OLD)).write(line) is line


FORGERY = '"choices":[{"index":7,"text":"},{"index":8'


@pytest.mark.parametrize("forged", [FORGERY, json.dumps(FORGERY), f"\\{FORGERY}"])
def test_text_that_looks_like_a_choice_is_not_taken_for_one(forged: str):
    line = completion(forged, request_id=forged)
    written = ledger(output(OLD)).write(line)
    assert spans_of(written) == [[OLD]]
    assert without_spans(written) == read(line)


@given(
    texts=st.lists(st.text(), min_size=1, max_size=3),
    request_id=st.text(),
    label=st.text(),
)
def test_a_line_keeps_all_that_upstream_wrote(
    texts: list[str], request_id: str, label: str
):
    line = completion(*texts, request_id=request_id)
    spans = OLD | {"version": label}
    noted = ledger(*(output(spans, index=index) for index in range(len(texts))))
    written = noted.write(line)
    assert spans_of(written) == [[spans]] * len(texts)
    assert without_spans(written) == read(line)
    assert written.count("\n") == 2  # the end of the event, and no other


def test_the_role_of_a_chat_comes_before_its_tokens():
    noted = ledger(output(OLD, index=1), role_first=True)
    role = DeltaMessage(role="assistant", content="")
    assert spans_of(noted.write(chat(role, 0))) == [[]]
    assert spans_of(noted.write(chat(role, 1))) == [[]]
    assert spans_of(noted.write(chat(DeltaMessage(content="a"), 1))) == [[OLD]]


# ------------------------------------------------------------------ both ends at once
async def stream(items: Iterable[Any], closed: list[str]) -> AsyncGenerator[Any, None]:
    try:
        for item in items:
            yield item
    finally:
        closed.append("engine")


async def writer(results: AsyncGenerator[Any, None], closed: list[str]) -> Any:
    """As upstream does it: for each result that it gets, the lines of its outputs."""
    try:
        async for result in results:
            for one in result.outputs:
                yield completion("x", first=one.index)
        yield "data: [DONE]\n\n"
    finally:
        closed.append("writer")


def growing(length: int) -> list[Any]:
    return [
        SimpleNamespace(outputs=[output(OLD | {"end": end})])
        for end in range(1, length + 1)
    ]


async def test_each_line_of_a_stream_has_the_spans_of_the_results_in_that_line():
    book, closed = ReplySpans(), []
    source, write = stream(growing(5), closed), lambda results: writer(results, closed)
    lines = [x async for x in labelled(source, book.note_all, write, book)]
    ends = [spans_of(line)[0][0]["end"] for line in lines[:-1]]
    assert ends == [1, 2, 3, 4, 5]
    assert lines[-1] == "data: [DONE]\n\n"


async def test_a_client_that_leaves_ends_the_request():
    book, closed = ReplySpans(), []
    source, write = stream(growing(5), closed), lambda results: writer(results, closed)
    lines = labelled(source, book.note_all, write, book)
    await anext(lines)
    await lines.aclose()
    assert closed == ["writer", "engine"]


async def test_an_error_of_the_engine_reaches_the_writer():
    async def failing() -> AsyncGenerator[Any, None]:
        yield growing(1)[0]
        raise RuntimeError("engine")

    noted: list[Any] = []
    with pytest.raises(RuntimeError, match="engine"):
        async for _ in watched(failing(), noted.append):
            pass
    assert len(noted) == 1
