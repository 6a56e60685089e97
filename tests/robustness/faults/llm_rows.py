"""Rows that one engine in one process shows, or one of two ranks."""

from tests.robustness.faults.in_process import LEFT_OUT
from tests.robustness.faults.row import Row, Seen, first_line, refused


class W3(Row):
    """An update that fails half-way leaves a mixture: there is no way back."""

    play = "breaks_off"
    tests = (
        "tests/e2e/test_update.py::"
        "test_a_rollback_serves_the_version_before_and_back_again",
    )

    @staticmethod
    def upstream(seen: Seen) -> str:
        assert refused(seen["send"])
        assert refused(seen["checksums"])
        told = first_line(seen["checksums"]["text"])
        return f"after it the weights cannot even be read: “{told}”"

    @staticmethod
    def here(seen: Seen) -> str:
        assert refused(seen["send"])
        assert seen["checksums"] == seen["checksums before"]
        return "every checksum is what it was"


class W4(Row):
    """After an update that failed, the next request ends the engine."""

    play = "breaks_off"

    @staticmethod
    def upstream(seen: Seen) -> str:
        assert refused(seen["send"])
        assert refused(seen["after"]) and "meta" in seen["after"]["text"]
        return f"“{first_line(seen['after']['text'])}”"

    @staticmethod
    def here(seen: Seen) -> str:
        assert refused(seen["send"], "engine_fault")
        assert seen["after"] == seen["before"]
        return "the update ends as `engine_fault`; the same tokens as before it"


class W6(Row):
    """Started and finished again after a failure, a mixture is served under the new
    label.
    """

    play = "finished_all_the_same"

    @staticmethod
    def upstream(seen: Seen) -> str:
        assert refused(seen["send"])
        assert not refused(seen["start again"]) and not refused(seen["finish"])
        assert seen["label"] == "mixture"
        assert not refused(seen["after"]) and seen["after"] != seen["before"]
        return "accepted, labelled, and other tokens served"

    @staticmethod
    def here(seen: Seen) -> str:
        assert refused(seen["finish"], "weights_mismatch")
        assert seen["label"] != "mixture"
        assert seen["after"] == seen["before"]
        return "`weights_mismatch`; label and tokens as before"


class W7(Row):
    """Tensors that never came are accepted under the new label."""

    play = "truncated"
    tests = (
        "tests/e2e/test_rejected_updates.py::"
        "test_a_bad_version_changes_nothing_and_the_next_one_works",
    )

    @staticmethod
    def upstream(seen: Seen) -> str:
        assert not refused(seen["send"]) and not refused(seen["finish"])
        assert seen["label"] == "truncated"
        assert seen["after"] != seen["before"]
        return f"accepted without `{LEFT_OUT}`, labelled, served"

    @staticmethod
    def here(seen: Seen) -> str:
        assert refused(seen["finish"], "weights_mismatch")
        assert LEFT_OUT in seen["finish"]["text"]
        assert seen["label"] != "truncated"
        assert seen["after"] == seen["before"]
        return "`weights_mismatch`, which names the tensor; tokens as before"


class W8(Row):
    """When one of two ranks fails, they serve different weights, and each reply may be
    that of an earlier call.
    """

    play = "torn_ranks"
    takes_minutes = True
    tests = ("tests/e2e/test_two_ranks.py::test_no_rank_commits_if_one_rank_fails",)

    @staticmethod
    def upstream(seen: Seen) -> str:
        assert refused(seen["send"]) and not refused(seen["new"])
        assert not refused(seen["after"])
        assert seen["after"] not in (seen["before"], seen["new"])
        told = [
            k for k in ("start again", "finish", "finish again") if refused(seen[k])
        ]
        late = "; `" + "`, `".join(told) + "` answered with another call's error"
        return (
            f"tokens of neither version, served under “{seen['label']}”"
            f"{late if told else ''}"
        )

    @staticmethod
    def here(seen: Seen) -> str:
        assert refused(seen["send"], "engine_fault")
        assert refused(seen["finish"], "weights_mismatch")
        assert refused(seen["finish again"])
        assert seen["label"] != "torn"
        assert seen["after"] == seen["before"]
        assert not any(map(refused, seen["update"]))
        assert seen["new"] != seen["before"]
        return (
            "`engine_fault`, then `weights_mismatch`; label and tokens as before; the "
            "next update is served"
        )


class W9(Row):
    """An update while the engine sleeps ends it."""

    play = "asleep"
    needs_gpu = True
    tests = (
        "tests/e2e/test_sleep.py::"
        "test_calls_that_need_weights_are_rejected_while_the_weights_sleep",
        "tests/e2e/test_sleep.py::"
        "test_nothing_is_decoded_after_a_level_2_sleep_until_a_whole_version_arrives",
    )

    @staticmethod
    def upstream(seen: Seen) -> str:
        assert not refused(seen["sleep"])
        if "finish" not in seen:
            return "its process ended in the middle of the calls, without a word"
        broken = [k for k in ("start", "send", "finish", "wake") if refused(seen[k])]
        assert broken and refused(seen["after"])
        told = first_line(seen[broken[0]]["text"])
        return f"`{broken[0]}`: “{told}”, and no request is answered afterwards"

    @staticmethod
    def here(seen: Seen) -> str:
        assert refused(seen["start"], "engine_asleep")
        assert not refused(seen["wake"]) and seen["after"] == seen["before"]
        return "409 `engine_asleep`; awake again, the same tokens as before"


class W11(Row):
    """A new request reads KV that old weights computed, and nothing says so."""

    play = "stale_prefix"
    tests = ("tests/e2e/test_prefix_cache.py::test_kv_of_other_weights_is_never_read",)

    @staticmethod
    def upstream(seen: Seen) -> str:
        assert seen["under the new weights"] == seen["second"] > 0
        return f"{seen['under the new weights']} of 100 tokens came from old KV"

    @staticmethod
    def here(seen: Seen) -> str:
        assert seen["second"] > 0
        assert seen["under the new weights"] == 0
        return "none did; nothing was dropped"


class W17(Row):
    """The weights that are served cannot be compared with the trainer's."""

    play = "checked"
    tests = (
        "tests/e2e/test_rejected_updates.py::"
        "test_a_digest_that_differs_from_the_manifests_is_rejected",
    )

    @staticmethod
    def upstream(seen: Seen) -> str:
        assert refused(seen["digest"])
        before, after = seen["before"], seen["after"]
        same = [name for name in before if before[name] == after[name]]
        assert same, "every checksum changed with the weights"
        return (
            f"all weights changed, and {len(before) - len(same)} of {len(before)} "
            "checksums (on a CPU most weights are packed, and not seen)"
        )

    @staticmethod
    def here(seen: Seen) -> str:
        assert seen["digest"] == seen["trainer's digest"]
        return "the engine's digest is the one that the trainer computes of its file"


class W18(Row):
    """An update sent again after a failure is refused by what the failure left."""

    play = "sent_again"
    tests = (
        "tests/e2e/test_rejected_updates.py::"
        "test_a_bad_version_changes_nothing_and_the_next_one_works",
    )

    @staticmethod
    def upstream(seen: Seen) -> str:
        assert refused(seen["send"]) and refused(seen["send again"])
        return f"“{first_line(seen['send again']['text'])}”"

    @staticmethod
    def here(seen: Seen) -> str:
        assert refused(seen["send"])
        assert not refused(seen["send again"]) and not refused(seen["finish"])
        assert seen["after"] == seen["fresh"]
        return "accepted; the same tokens as after an undisturbed update"


ROWS = (W3, W4, W6, W7, W8, W9, W11, W17, W18)
