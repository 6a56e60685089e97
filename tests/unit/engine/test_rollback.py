"""Rollbacks in the ledger: each update stands as what is served says."""

from tests.unit.engine.test_ledger import brought_to
from vllm.inflight.engine.update.ledger import Ledger
from vllm.inflight.update import Phase


def test_repeated_rollbacks_keep_the_phase_of_each_update_and_count_no_new_commit():
    ledger = Ledger()
    first = brought_to(ledger, Phase.COMMITTED, "first")
    second = brought_to(ledger, Phase.COMMITTED, "second")
    ended = second.ended
    for left, back in ((second, first), (first, second), (second, None)):
        ledger.turn_back(left, back)
        assert left.phase is Phase.ROLLED_BACK
        assert back is None or back.phase is Phase.COMMITTED
    ledger.turn_back(None, second)
    assert second.phase is Phase.COMMITTED and second.ended == ended
    assert ledger.ended == {"committed": 2}
