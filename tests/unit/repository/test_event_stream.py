"""The reader of streamed replies that the tests use."""

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.support.event_stream import events

TEXT = "a\u2028b\u2029c\u0085d\x0be\x1cf\r\n\n"
"""Text of a token, with what Unicode calls ends of lines."""

SENT = [{"number": number, "text": TEXT} for number in range(3)]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_every_event_is_read_whole_and_as_soon_as_it_arrives(size: int) -> None:
    lines = [json.dumps(event, ensure_ascii=False) for event in SENT]
    data = "".join(f"data: {line}\n\n" for line in (*lines, "[DONE]")).encode()
    num_sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal num_sent
        for start in range(0, len(data), size):  # inside of events and of characters
            num_sent = min(start + size, len(data))
            yield data[start : start + size]

    read = []
    for event in events(httpx.Response(200, content=chunks())):
        read.append(event)
        whole = "".join(f"data: {line}\n\n" for line in lines[: len(read)]).encode()
        assert num_sent < len(whole) + size, "it was held back"
    assert read == SENT
