"""What a stranger may have written is read, or refused by name; see `make fuzz`."""

import base64
import pickle
import sys
import threading
from typing import Any

import pytest

from tests.robustness.fuzz.parsers import PARSERS, corpus, pickles

INPUTS = 400
"""Of each parser here; about 10 s for all of them."""

watched: list[str] = []
HOOKED = {"pickle.find_class", "marshal.loads"}
"""What Python announces before a pickle, or code, is made into anything."""


def watch(event: str, _: object) -> None:
    # Threads that earlier tests left may import something.
    if event in HOOKED and threading.current_thread() is threading.main_thread():
        watched.append(event)


sys.addaudithook(watch)


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_accepts_or_rejects_every_input(name: str) -> None:
    for given in PARSERS[name].inputs(name, INPUTS, seed=1):
        PARSERS[name].accepts(given)


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_accepts_one_of_its_seeds(name: str) -> None:
    assert any(PARSERS[name].accepts(seed) for seed in PARSERS[name].seeds)


@pytest.mark.parametrize("name", [n for n in PARSERS if (n not in ("spool", "pickle"))])
def test_no_other_parser_unpickles(name: str) -> None:
    watched.clear()
    given: list[Any] = [*PARSERS[name].seeds, *corpus(name), *pickles()]
    given += [base64.b64encode(data).decode() for data in pickles()]
    for one in given:
        try:
            PARSERS[name].feed(one)
        except Exception:
            continue  # a pickle where plain data is asked for
    assert watched == []


def test_the_unpickling_monitor_detects_an_import_from_a_pickle() -> None:
    watched.clear()
    pickle.loads(pickle.dumps(pytest.Item))
    assert "pickle.find_class" in watched


def test_every_pickle_in_the_corpus_is_rejected() -> None:
    for name in ("pickle", "spool"):
        assert not any(map(PARSERS[name].accepts, corpus(name)))


def test_parts_of_a_bucket_that_exceed_the_bucket_are_rejected() -> None:
    part = {"shape": [4], "dtype": "float32", "start_idx": 0, "end_idx": 16}
    twice = [part | {"name": name} for name in "ab"]
    assert PARSERS["parts"].accepts(twice[:1])
    assert not PARSERS["parts"].accepts(twice)
