"""Rows about the control routes: whom they let in, and what they tell."""

from tests.robustness.faults.row import Row, Seen, code_of

SERVER = "tests/e2e/test_server.py::"


class W13(Row):
    """The label can be changed at any time, and nothing tells whether weights changed
    with it.
    """

    play = "renamed"
    tests = (
        "tests/e2e/test_update.py::test_renaming_changes_the_label_and_nothing_else",
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
    tests = (SERVER + "test_every_rejection_has_its_status_and_its_code",)

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


ROWS = (W13, W15, W16, W19)
