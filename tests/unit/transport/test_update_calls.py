"""How many calls an update takes, and what becomes of it when one of them fails."""

from __future__ import annotations

from typing import Any

import pytest

from vllm.inflight.errors import EngineUnreachable, WrongPhase
from vllm.inflight.transport.update_calls import update_of

MANIFEST = {"format": 1}


class Three:
    """A client that has upstream's three calls of an update, and an abort."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.fails: dict[int, Exception] = {}
        """The number of a call → what it raises."""

    def note(self, call: Any) -> None:
        self.calls.append(call)
        if (error := self.fails.get(len(self.calls) - 1)) is not None:
            raise error

    def start_weight_update(self, manifest: Any = None) -> None:
        self.note(("start", manifest))

    def update_weights(self, update_info: Any) -> None:
        self.note(update_info)

    def finish_weight_update(self) -> None:
        self.note("finish")

    def abort_weight_update(self) -> None:
        self.note("abort")


class One(Three):
    """A client that opens and commits updates with `update_weights`."""

    def update_weights(
        self, update_info: Any, *, start: Any = None, finish: Any = None
    ) -> None:
        self.note((update_info, start, finish))


class Handing(Three):
    """A client that hands on whatever it is given, perhaps to upstream's call."""

    def update_weights(self, update_info: Any, **options: Any) -> None:
        assert not options
        super().update_weights(update_info)


def send(client: Three, *chunks: str, knows_last: bool = True) -> None:
    with update_of(client, MANIFEST) as calls:
        for number, chunk in enumerate(chunks, 1):
            is_last = knows_last and number == len(chunks)
            calls.update(chunk, is_last=is_last)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Three, Handing])
def test_a_client_without_the_parameters_gets_three_calls(kind: type[Three]) -> None:
    client = kind()
    send(client, "a", "b")
    assert client.calls == [("start", MANIFEST), "a", "b", "finish"]


def test_the_first_chunk_opens_the_update_and_the_last_one_commits_it() -> None:
    client = One()
    send(client, "a")
    assert client.calls == [("a", {"manifest": MANIFEST}, {})]
    client.calls.clear()
    send(client, "a", "b", "c")
    assert client.calls == [
        ("a", {"manifest": MANIFEST}, None),
        ("b", None, None),
        ("c", None, {}),
    ]


def test_an_update_whose_last_chunk_is_not_known_is_committed_by_itself() -> None:
    client = One()
    send(client, "a", "b", knows_last=False)
    first = ("a", {"manifest": MANIFEST}, None)
    assert client.calls == [first, ("b", None, None), "finish"]


@pytest.mark.parametrize("kind", [One, Three])
def test_an_update_without_a_chunk_is_opened_and_committed(kind: type[Three]) -> None:
    client = kind()
    send(client)
    assert client.calls == [("start", MANIFEST), "finish"]


@pytest.mark.parametrize("kind", [One, Three])
def test_an_update_whose_start_was_rejected_is_not_aborted(kind: type[Three]) -> None:
    """A client that names no update would abort that of another trainer."""
    client = kind()
    client.fails[0] = WrongPhase("not now")
    with pytest.raises(WrongPhase, match="not now"):
        send(client, "a")
    assert len(client.calls) == 1


@pytest.mark.parametrize("kind", [One, Three])
def test_an_update_whose_second_chunk_fails_is_aborted(kind: type[Three]) -> None:
    client = kind()
    client.fails[2 if kind is Three else 1] = WrongPhase("not this")
    with pytest.raises(WrongPhase, match="not this"):
        send(client, "a", "b", "c")
    assert client.calls[-1] == "abort"
    assert len(client.calls) == (4 if kind is Three else 3)


@pytest.mark.parametrize("kind", [One, Three])
def test_an_update_whose_transfer_breaks_off_is_aborted(kind: type[Three]) -> None:
    client = kind()
    with pytest.raises(ZeroDivisionError), update_of(client) as calls:
        calls.update("a", is_last=False)  # type: ignore[arg-type]
        raise ZeroDivisionError
    assert client.calls[-1] == "abort"


@pytest.mark.parametrize("kind", [One, Three])
def test_a_rejected_abort_does_not_hide_the_error_before_it(kind: type[Three]) -> None:
    client = kind()
    client.fails[2 if kind is Three else 1] = WrongPhase("there is none")
    with pytest.raises(ZeroDivisionError), update_of(client) as calls:
        calls.update("a", is_last=False)  # type: ignore[arg-type]
        raise ZeroDivisionError
    assert client.calls[-1] == "abort"


def test_an_engine_that_does_not_answer_is_not_asked_to_abort() -> None:
    client = Three()
    client.fails[1] = EngineUnreachable("no reply")
    with pytest.raises(EngineUnreachable):
        send(client, "a")
    assert client.calls == [("start", MANIFEST), "a"]
