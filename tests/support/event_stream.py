"""The events of a streamed reply, as a client that loses none of them reads them."""

import json
from collections.abc import Iterator
from typing import Any

import httpx

DATA, DONE = b"data: ", b"[DONE]"


def events(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON of every event of a stream, as soon as it has arrived.

    `iter_lines` of httpx also ends a line at characters that the text of a token may
    have, such as U+2028, and cuts the event in two. An event ends with an empty line,
    and its JSON has none.
    """
    rest = b""
    for data in reply.iter_bytes():
        *complete, rest = (rest + data).split(b"\n\n")
        for event in complete:
            if event.startswith(DATA) and not event.endswith(DONE):
                yield json.loads(event.removeprefix(DATA))
