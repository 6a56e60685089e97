"""A lease that has run out, and an engine that cannot go on at that moment."""

import threading

import pytest

from vllm.inflight.engine.pause import lease
from vllm.inflight.engine.pause.lease import Lease


def test_an_expired_lease_is_retried_until_decoding_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease, "RETRY_S", 0.01)
    tries, went_on = [], threading.Event()

    def go_on() -> None:
        tries.append(held.owner)
        if len(tries) < 3:
            raise RuntimeError("not now")
        went_on.set()

    held = Lease(lambda call: call(), go_on)
    held.take("trainer", 0.01)
    assert went_on.wait(60)
    deadline = threading.Event()
    while held.owner is not None and not deadline.wait(0.01):
        pass
    assert tries == ["trainer"] * 3
    assert (held.num_expired, held.left_s) == (1, None)
