"""Rows about an engine behind a server: whether it answers, and with which weights."""

from tests.robustness.faults.row import Row, Seen, code_of
from tests.robustness.faults.site import LEASE_S, PATIENCE_S

SERVER = "tests/e2e/test_server.py::"


class W1(Row):
    """A transfer holds up the engine: no token, no reply of a control call."""

    play = "slow_transfer"
    tests = (SERVER + "test_control_calls_and_tokens_do_not_wait_for_a_slow_transfer",)

    @staticmethod
    def upstream(seen: Seen) -> str:
        assert seen["asked"]["seconds"] > 0.7 * (seen["seconds"] - 0.5)
        assert seen["tokens"] <= 2
        return W1.told(seen)

    @staticmethod
    def here(seen: Seen) -> str:
        assert seen["asked"]["seconds"] < 0.5 * seen["seconds"]
        assert seen["tokens"] > 10
        assert seen["finish"]["status"] == 200
        return W1.told(seen)

    @staticmethod
    def told(seen: Seen) -> str:
        """The same sentence of both."""
        return (
            f"in {seen['seconds']:.1f} s of transfer a running request got "
            f"{seen['tokens']} tokens, and `/is_paused` a reply after "
            f"{seen['asked']['seconds']:.2f} s"
        )


class W2(Row):
    """A trainer that dies in its transfer holds the engine for ever."""

    play = "never_ends"
    tests = (
        "tests/e2e/test_torch_groups.py::"
        "test_a_trainers_death_leaves_the_live_weights_and_the_next_trainer_joins",
        "tests/unit/transport/test_faults.py::"
        "test_a_trainer_that_stalls_is_left_when_the_time_is_up",
    )

    @staticmethod
    def upstream(seen: Seen) -> str:
        assert seen["start"]["status"] == 200
        for call in ("send", "paused", "resume"):
            assert seen[call]["status"] is None, call
        assert seen["tokens"] is None
        return (
            "neither `/is_paused`, `/resume` nor a request is answered within "
            f"{PATIENCE_S:.0f} s each; there is no deadline"
        )

    @staticmethod
    def here(seen: Seen) -> str:
        assert (seen["send"]["status"], code_of(seen["send"])) == (
            504,
            "deadline_exceeded",
        )
        assert seen["paused"]["status"] == seen["resume"]["status"] == 200
        assert seen["tokens"] == seen["before"]
        return (
            f"504 `deadline_exceeded` after {seen['send']['seconds']:.1f} s; calls and "
            "requests are answered as before (the next update waits until a transport "
            "that cannot be interrupted, as this one, lets go)"
        )


class W5(Row):
    """An update begun while requests run ends the server."""

    play = "without_a_pause"

    @staticmethod
    def upstream(seen: Seen) -> str:
        assert seen["stranger's start"] == 200
        assert seen["stream"] != "length"
        assert not seen["lives"]
        return f"the running request ended in {seen['stream']}, and all after it"

    @staticmethod
    def here(seen: Seen) -> str:
        assert seen["start"]["status"] == 200
        assert seen["stream"] == "length"
        assert seen["lives"]
        return "needs no pause: the running request goes on to its end"


class W10(Row):
    """When one of two data-parallel engines fails, they serve different weights under
    one label.
    """

    play = "torn_engines"
    takes_minutes = True
    tests = (
        "tests/e2e/simulated/test_two_engines.py::"
        "test_a_failed_commit_on_one_engine_is_rolled_back_on_the_other",
    )

    @staticmethod
    def upstream(seen: Seen) -> str:
        assert seen["send"]["status"] == 500
        assert seen["finish"]["status"] == 200 and seen["label"] == "torn"
        first, second = seen["after"]
        assert isinstance(first, list) and isinstance(second, list)
        assert first != second
        return f"two sets of weights are served, both under “{seen['label']}”"

    @staticmethod
    def here(seen: Seen) -> str:
        assert code_of(seen["send"]) == "engine_fault"
        assert code_of(seen["finish"]) == "weights_mismatch"
        assert seen["label"] != "torn"
        assert seen["after"] == seen["before"]
        assert seen["update"]["status"] == 200
        (before, also_before), (new, also_new) = seen["before"], seen["new"]
        assert isinstance(before, list) and isinstance(new, list)
        assert (before, new) == (also_before, also_new) and before != new
        return (
            "`engine_fault`, then `weights_mismatch`; both serve what they did under "
            "their label; the next update is served"
        )


class W12(Row):
    """Whoever wants no stale KV has to drop all of it, that of running requests
    included.
    """

    play = "caches_cleared"
    tests = (
        "tests/e2e/test_prefix_cache.py::test_kv_of_other_weights_is_never_read",
        "tests/e2e/test_prefix_cache.py::"
        "test_kv_of_weights_that_hardly_moved_may_be_read",
    )

    @staticmethod
    def upstream(seen: Seen) -> str:
        assert seen["cleared"]["preempted"] == 1
        assert seen["kept"]["preempted"] == 0
        assert seen["hits"] > 0
        return (
            "cleared, the running request is computed again from its first token; "
            f"kept, a new one reads {seen['hits']:.0f} tokens of stale KV"
        )

    @staticmethod
    def here(seen: Seen) -> str:
        assert seen["kept"]["update"] == [200, 200, 200]
        assert seen["kept"]["stream"] == "length"
        assert (seen["kept"]["preempted"], seen["hits"]) == (0, 0)
        return "kept, nothing is computed again, and a new request reads none"


class W14(Row):
    """A pause whose controller has died never ends."""

    play = "controller_gone"
    tests = (SERVER + "test_a_pause_whose_controller_is_gone_ends_with_its_lease",)

    @staticmethod
    def upstream(seen: Seen) -> str:
        assert seen["tokens"] is None
        assert seen["paused"]["is_paused"] is True
        return (
            f"a request is not answered within {LEASE_S + PATIENCE_S:.0f} s, "
            "and no lease can be had"
        )

    @staticmethod
    def here(seen: Seen) -> str:
        assert isinstance(seen["tokens"], list)
        assert seen["paused"]["is_paused"] is False
        assert seen["paused"]["leases_expired"] >= 1
        return f"with a lease of {LEASE_S} s it ended, and the request was answered"


class W21(Row):
    """`/health` says 200 while nothing is answered."""

    play = "never_ends"
    tests = (
        "tests/e2e/test_doctor_url.py::"
        "test_the_doctor_reports_a_hanging_engine_core_before_health_does",
        "tests/e2e/test_doctor_url.py::"
        "test_an_update_that_stands_still_needs_attention_until_it_is_given_up",
    )

    @staticmethod
    def upstream(seen: Seen) -> str:
        assert seen["health"]["status"] == 200
        assert seen["tokens"] is None
        return "200, while no request is answered"

    @staticmethod
    def here(seen: Seen) -> str:
        assert seen["health"]["status"] == 200
        assert seen["tokens"] == seen["before"]
        (last, *_) = seen["status"]["body"]["outcomes"]
        assert last["error"]["code"] == "deadline_exceeded"
        return (
            "200, and requests are answered; `/weight_update` says what became of the "
            "update. It is 503 where the core itself does not answer"
        )


ROWS = (W1, W2, W5, W10, W12, W14, W21)
