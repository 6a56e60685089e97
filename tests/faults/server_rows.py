"""Rows that a server shows, or that are not shown here."""

from tests.faults.row import Row, Seen, code_of
from tests.faults.served import LEASE_S, PATIENCE_S

SERVER = "tests/engine/test_server.py::"


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
        "tests/engine/test_torch_groups.py::"
        "test_a_trainer_that_dies_leaves_what_is_served_and_the_next_one_joins",
        "tests/wire/test_faults.py::"
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


class W9(Row):
    """An update while the engine sleeps ends it."""

    tests = (
        "tests/engine/test_sleep.py::"
        "test_whatever_needs_weights_is_refused_while_they_are_asleep",
        "tests/engine/test_sleep.py::"
        "test_after_level_2_nothing_is_served_until_a_whole_version_has_come",
    )
    not_shown = (
        "the CPU build ignores sleep; read in its code, and reported to vLLM (#57853)"
    )
    instead = "409 `engine_asleep`"


class W10(Row):
    """When one of two data-parallel engines fails, they serve different weights under
    one label.
    """

    play = "torn_engines"

    @staticmethod
    def upstream(seen: Seen) -> str:
        assert seen["send"]["status"] == 500
        assert seen["after"] != seen["before"]
        assert seen["after"][0] != seen["after"][1]
        return f"`/weight_info` says “{seen['label'].get('weight_version')}”"

    @staticmethod
    def here(seen: Seen) -> str:
        assert seen["send"]["status"] == 500
        assert seen["finish"]["status"] != 200
        assert seen["label"]["weight_version"] != "torn"
        assert seen["after"] == seen["before"]
        return "no engine changes"


class W12(Row):
    """Whoever wants no stale KV has to drop all of it, that of running requests
    included.
    """

    play = "caches_cleared"
    tests = (
        "tests/engine/test_prefix_cache.py::test_kv_of_other_weights_is_never_read",
        "tests/engine/test_prefix_cache.py::"
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


class W13(Row):
    """The label can be changed at any time, and nothing tells whether weights changed
    with it.
    """

    play = "renamed"
    tests = (
        "tests/engine/test_update.py::test_renaming_changes_the_label_and_nothing_else",
    )

    @staticmethod
    def upstream(seen: Seen) -> str:
        assert seen["rename"]["status"] == 200
        assert len(seen["spans"]) == 2
        assert set(seen["after"]) == {"weight_version"}
        return "a running request shows two versions of one set of weights"

    @staticmethod
    def here(seen: Seen) -> str:
        before, after = seen["before"], seen["after"]
        assert before["weight_version"] != after["weight_version"]
        assert before["digest"] == after["digest"]
        assert [span["epoch"] for span in seen["spans"]] == [
            before["epoch"],
            after["epoch"],
        ]
        return "the same, with an epoch each, and an equal digest: it is a rename"


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


class W15(Row):
    """A client that lost a reply cannot ask what became of its update, nor end it."""

    play = "lost_reply"
    tests = (SERVER + "test_a_caller_that_lost_the_reply_can_ask_what_happened",)

    @staticmethod
    def upstream(seen: Seen) -> str:
        assert seen["send"]["status"] is None
        assert seen["asked"]["status"] == seen["given up"]["status"] == 404
        assert seen["start again"]["status"] == 500
        assert not seen["lives"]
        return (
            "no such routes; the same call again: 500; it lets decoding go on, "
            "and the next request is not answered"
        )

    @staticmethod
    def here(seen: Seen) -> str:
        assert seen["send"]["status"] is None
        assert seen["asked"]["body"]["phase"] == "staging"
        assert seen["start again"]["body"]["update_id"] == "lost"
        assert seen["given up"]["body"]["phase"] == "aborted"
        assert seen["lives"]
        return "told it is `staging`; the same call again is the same update; given up"


class W16(Row):
    """`--api-key` does not guard the control routes."""

    play = "without_a_pause"
    tests = (SERVER + "test_control_routes_need_their_key",)

    @staticmethod
    def upstream(seen: Seen) -> str:
        assert seen["read"] == 401
        assert seen["stranger's pause"] == seen["stranger's start"] == 200
        return (
            "without the key `/v1/models` 401, `/pause` and `/start_weight_update` 200"
        )

    @staticmethod
    def here(seen: Seen) -> str:
        calls = ("read", "stranger's pause", "stranger's resume", "stranger's start")
        assert {seen[call] for call in calls} == {401}
        return "401 for all of them"


class W19(Row):
    """Every failure is HTTP 500 and a text."""

    play = "wrong_calls"
    tests = (SERVER + "test_every_refusal_has_its_status_and_its_code",)

    @staticmethod
    def upstream(seen: Seen) -> str:
        calls = [call for name, call in seen.items() if name != "started"]
        assert {call["status"] for call in calls} == {500}
        assert {code_of(call) for call in calls} <= {None, 500}
        return f"{len(calls)} of {len(calls)} are 500"

    @staticmethod
    def here(seen: Seen) -> str:
        told = {
            name: f"{call['status']} `{code_of(call)}`"
            for name, call in seen.items()
            if name != "started"
        }
        assert list(told.values()) == [
            "409 `wrong_phase`",
            "409 `wrong_phase`",
            "409 `update_in_progress`",
            "422 `weights_mismatch`",
            "422 `weights_mismatch`",
        ]
        return "; ".join(f"{name}: {what}" for name, what in told.items())


class W20(Row):
    """An update needs memory that nobody has set aside."""

    not_shown = "its buffers are those of its NCCL transport on GPUs"
    instead = (
        "nor is it better: a [second set of weights](limits.md#memory), but taken "
        "before the KV cache is sized"
    )


class W21(Row):
    """`/health` says 200 while nothing is answered."""

    play = "never_ends"
    tests = (
        "tests/engine/test_visit.py::"
        "test_an_engine_core_that_hangs_is_told_while_health_says_200",
        "tests/engine/test_visit.py::"
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
            "update. Of a core that hangs for other reasons `/health` knows nothing "
            "here either; `vllm-inflight doctor --url` does"
        )


ROWS = (W1, W2, W5, W9, W10, W12, W13, W14, W15, W16, W19, W20, W21)
