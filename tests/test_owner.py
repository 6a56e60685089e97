"""Whose an update is: who names another owner does not get at it."""

import pytest

from vllm.inflight.commit.ledger import Ledger
from vllm.inflight.commit.transaction import Update
from vllm.inflight.errors import OwnedByAnother
from vllm.inflight.update import Phase


def begun(ledger: Ledger, **body: str) -> Update:
    return ledger.begin({"update_id": "u", **body}, 60.0)[0]


@pytest.mark.parametrize("update_id", ["u", None])
def test_another_owner_finds_an_update_that_is_not_its_own(update_id):
    ledger = Ledger()
    update = begun(ledger, owner="trainer")
    for owner in ("trainer", None):
        assert ledger.find(update_id, owner) is update
    with pytest.raises(OwnedByAnother, match="update 'u' belongs to 'trainer'"):
        ledger.find(update_id, "another")


def test_what_is_nobodys_is_everybodys():
    ledger = Ledger()
    update = begun(ledger)
    assert ledger.require("u", Phase.OPEN, owner="another") is update
