"""Bodies of requests: read whole or in slices they say the same."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.base.test_packed import SLOWEST_S, slowest, tensors
from vllm.inflight import packed
from vllm.inflight.api.request import body as module
from vllm.inflight.api.request.body import parse, parse_around, parse_in_slices
from vllm.inflight.errors import Malformed
from vllm.inflight.packed import MARK, at_once, is_packed, unpack
from vllm.inflight.transport.sglang import request_tensors
from vllm.inflight.transport.sglang.request_tensors import LongText

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 64), 1 << 64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text() | st.sampled_from(module.PACKED), inner, max_size=4)
    ),
    max_leaves=30,
)
LAYOUTS = [(",", ":"), (" ,\n", "\t: "), (", ", ": ")]


def told(read: Any, raw: bytes) -> Any:
    """What was read, or that it was refused."""
    try:
        return read(raw)
    except Malformed:
        return Malformed


def in_slices(raw: bytes, *, step: int = 7) -> Any:
    """The same, with windows and blocks that are as small as can be."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "DECODED_BYTES", step)
        patched.setattr(module, "MARGIN_CHARS", 3)
        patched.setattr(packed, "BLOCK", 2)
        read = at_once(parse_in_slices(raw))
    return at_once(unpack(read, 32))


BODY = st.dictionaries(st.text() | st.sampled_from(module.PACKED), JSON, max_size=4)
CHARS = st.text('[]{}",:\\ 0123456789.eE+-truefalsn')


@given(
    BODY | JSON,
    st.sampled_from(LAYOUTS),
    st.booleans(),
    st.integers(1, 9),
)
def test_a_body_parsed_in_slices_equals_a_body_parsed_whole(
    value, separators, ascii, step
):
    text = json.dumps(value, separators=separators, ensure_ascii=ascii)
    raw = f" {text}\n".encode(errors="surrogatepass")
    expected = told(parse, raw)
    assert told(lambda raw: in_slices(raw, step=step), raw) == expected


@given(
    st.binary(max_size=40)
    | st.text('[]{}",:\\ 0123456789.eE-truefalsn').map(str.encode)
)
@example(b"")
@example(b"  ")
@example(b"\xef\xbb\xbf{}")
@example(b"\xef")
@example(b"\xef\xbb")
@example(b"\xef\xbb\xbf")
@example(b"\xef\xbb\xbf ")
@example(b'{"a": 12')
@example(b"\x0b")
@example(b'{"a": 12} {}')
@example(b'{"a" 1}')
@example(b'{"a": 1,}')
@example(b"[1, 2,]")
@example(b'{"a": [1 2]}')
@example(b'{"a": "\\ud800"}')
@example(b'{"manifest": ["\\ud800", 1, 2]}')
@example(b'{"\\ud800": 1}')
@example(b'{"a": ' + b"[" * 31 + b"]" * 31 + b"}")
@example(b'{"a": ' + b"[" * 32 + b"]" * 32 + b"}")
@example(b'{"manifest": ' + b'{"a":' * 31 + b"1" + b"}" * 31 + b"}")
@example(b'{"manifest": ' + b'{"a":' * 40 + b"1" + b"}" * 40 + b"}")
def test_an_invalid_body_is_rejected_in_slices_as_it_is_whole(raw):
    assert told(in_slices, raw) == told(parse, raw)


def test_lists_for_the_ranks_are_packed_and_other_values_are_plain():
    lists = {"names": ["a"] * 2000, "shapes": [[1, 2]] * 2000}
    body = {"update_info": lists, "ids": ["b"] * 2000, **lists}
    read = at_once(parse_in_slices(json.dumps(body).encode()))
    assert is_packed(read["update_info"]["names"]) and is_packed(read["shapes"])
    assert read["ids"] == body["ids"]
    assert at_once(unpack(read)) == body
    infos = {"update_info": [lists, lists]}
    read = at_once(parse_in_slices(json.dumps(infos).encode()))
    assert all(is_packed(info["names"]) for info in read["update_info"])


def test_parsing_a_body_blocks_the_event_loop_for_a_short_time_only():
    raw = json.dumps({"manifest": {"format": 1, "tensors": tensors(20_000)}}).encode()
    read, longest, count = slowest(parse_in_slices(raw))
    assert (longest < SLOWEST_S, count > 20) == (True, True)
    assert len(read["manifest"]["tensors"][MARK]) == 20


# Long strings


def around(raw: bytes, longest: int = 3) -> Any:
    """A body with its long strings where they are; then what they say."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "DECODED_BYTES", 5)
        patched.setattr(module, "LONG_BYTES", longest)
        patched.setattr(request_tensors, "PIECE_BYTES", 8)

        def said(value: Any) -> Any:
            if isinstance(value, list):
                return [said(entry) for entry in value]
            if isinstance(value, LongText):
                try:
                    return b"".join(value.pieces()).decode()
                except ValueError:
                    raise Malformed("no text") from None
            return value

        return {n: said(v) for n, v in at_once(parse_around(raw)).items()}


# More backslashes in a row than a piece has bytes are refused: base64 has none.
TEXT = st.text().filter(lambda text: "\\\\" not in text)


@given(st.lists(TEXT, max_size=4), TEXT)
def test_a_body_with_long_strings_parses_to_the_same_value(texts, label):
    raw = json.dumps({"a": texts, "b": label}).encode()
    found, expected = told(around, raw), told(parse, raw)
    # A pair of escapes that is one character may be cut in two, and is refused then.
    is_wide = any(char > "\uffff" for text in [*texts, label] for char in text)
    assert found == expected or (is_wide and found is Malformed)


def test_a_slash_may_be_escaped_in_base64():
    data = bytes(range(256)) * 8
    text = base64.b64encode(data).decode().replace("/", "\\/")
    read = around(f'{{"a": ["{text}"]}}'.encode())
    assert base64.b64decode(read["a"][0]) == data


@pytest.mark.parametrize(
    "raw",
    [b'{"a": "xxxxxxxxxxxxxxx', b'{"a": "xxxxxxx\\"}', b'"' * 7, b'{"a": "\\\\\\"'],
)
def test_an_unterminated_string_is_rejected(raw):
    assert told(around, raw) is Malformed


def test_data_beside_long_strings_is_limited_in_size(monkeypatch):
    monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", 100)
    raw = json.dumps({"a": ["x" * 20] * 10}).encode()
    with pytest.raises(Malformed, match="more than 100 bytes beside its tensors"):
        at_once(parse_around(raw))
    monkeypatch.setattr(module, "LONG_BYTES", 10)
    monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", 200)
    assert len(at_once(parse_around(raw))["a"]) == 10
