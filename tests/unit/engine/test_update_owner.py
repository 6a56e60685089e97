"""The owner of an update: calls that name another owner are rejected."""

import pytest

from vllm.inflight.calls import StartUpdate
from vllm.inflight.engine.transaction import Update
from vllm.inflight.engine.update.ledger import Ledger
from vllm.inflight.errors import Malformed, OwnedByAnother
from vllm.inflight.update import Phase, check_owner


def begun(ledger: Ledger, **body: str) -> Update:
    return ledger.start(StartUpdate("u", **body), 60.0)[0]


@pytest.mark.parametrize("update_id", ["u", None])
def test_an_update_is_rejected_to_a_caller_that_is_not_its_owner(update_id):
    ledger = Ledger()
    update = begun(ledger, owner="trainer")
    for owner in ("trainer", None):
        assert ledger.find(update_id, owner) is update
    with pytest.raises(OwnedByAnother, match="update 'u' belongs to 'trainer'"):
        ledger.find(update_id, "another")


def test_an_owner_name_has_at_most_512_characters():
    assert check_owner("o" * 512) == "o" * 512
    with pytest.raises(Malformed, match="owner must be a string of 1 to 512") as why:
        check_owner("o" * (1 << 20))
    assert len(why.value.message) < 200


def test_an_update_without_an_owner_is_open_to_all():
    ledger = Ledger()
    update = begun(ledger)
    assert ledger.require("u", Phase.OPEN, owner="another") is update
