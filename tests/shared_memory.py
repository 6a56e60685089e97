"""Files of ours in shared memory: what a test leaves behind there."""

from pathlib import Path

from tests.waiting import until

FOLDER = Path("/dev/shm")


def names() -> set[str]:
    """Of all files of ours, those of tests that run beside this one included."""
    return {path.name for path in FOLDER.glob("vllm-inflight*")}


def nothing_came(known: set[str]) -> None:
    """No name beside `known` has come to stay; those of other tests go in the end."""
    until(lambda: names() <= known, "a name in shared memory outlived its use")
