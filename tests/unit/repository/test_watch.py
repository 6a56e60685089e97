"""What benchmarks watch in an engine: where time goes, and what torch keeps."""

import threading

import pytest

from benchmarks.gpu.watch import blocks, profile
from benchmarks.gpu.watch.profile import STEPPING


def waits() -> None:
    """Wait for a fifth of a second at least."""
    never = threading.Event()
    for _ in range(200):
        never.wait(0.001)


@pytest.mark.seconds
def test_a_profile_has_the_functions_of_each_phase_with_their_seconds() -> None:
    profile.begin(None)
    phase = profile._noted("phase", waits)
    thread = threading.Thread(target=phase)
    thread.start()
    thread.join()
    found = profile.end(None)
    for name, function in (("phase", "waits"), (STEPPING, "test_a_profile_has")):
        (seconds,) = (s for f, s in found[name]["with calls"] if f": {function}" in f)
        assert 0.1 < seconds < 30
    own = sum(seconds for _, seconds in found["phase"]["own"])
    assert own == pytest.approx(found["phase"]["with calls"][0][1], abs=0.01)
    assert all(", line " in function for function, _ in found["phase"]["own"])
    phase()  # not profiled any more


def test_blocks_are_summed_up_by_where_they_were_taken() -> None:
    def block(size: int, *frames: str, state: str = "active_allocated") -> dict:
        stack = [{"filename": f, "line": 7, "name": "take"} for f in frames]
        return {"size": size, "state": state, "frames": stack}

    ours = "/x/vllm/inflight/worker/verify/drift.py"
    small = [block(512, "/torch/a.py", ours), block(1024, ours, "/x/vllm/b.py")]
    old, freed = block(9, state="active_allocated"), block(8, ours, state="inactive")
    snapshot = [
        {"stream": 0, "total_size": 2 << 20, "blocks": [*small, old, freed]},
        {"stream": 0, "total_size": 2 << 20, "blocks": []},
        {"stream": 5, "total_size": 20 << 20, "blocks": [block(4096, "/torch/a.py")]},
    ]
    assert blocks.summed_up(snapshot) == {
        "segments": {"0": {2 << 20: 2}, "5": {20 << 20: 1}},
        "blocks": [
            [4096, 1, "torch/a.py, line 7: take"],
            [1536, 2, "worker/verify/drift.py, line 7: take"],
        ],
    }
