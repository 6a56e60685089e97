"""The core tests on other releases of vLLM: `python -m tests.releases.suite 0.29.0 …`.

Without a release, all supported ones are tested except the installed one, on which
`make test` runs. The results are in `out/releases/<release>.xml`;
`python -m docs.release_runs out/releases/*.xml` keeps them for the docs.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.releases.site import site_of
from tests.releases.wheel import ROOT, NoWheelError
from vllm.inflight.releases.table import SUPPORTED, installed

OUT = ROOT / "out" / "releases"

CORE = (
    "tests/unit/patch",  # every record fits, and is applied once
    "tests/e2e/test_update.py",  # an update, its flip and its rollback
    "tests/e2e/test_core.py",  # pauses, retraction and commits between two steps
    "tests/e2e/simulated",  # the engine core with steps that are computed by hand
    "tests/e2e/test_pause_features.py",  # pause modes with each feature
    "tests/e2e/test_prefix_cache.py",
    "tests/e2e/test_http_spans.py",  # spans on each route, whole and streamed
    "tests/e2e/test_control_port.py",  # keys
    "tests/e2e/test_sglang.py",
    "tests/e2e/test_rollouts.py",
    "tests/e2e/test_routed_experts.py",
    "tests/e2e/test_adapters.py",
    "tests/e2e/test_embeddings.py",
    "tests/e2e/test_quantised.py",
    "tests/e2e/test_two_ranks.py",
    "tests/e2e/test_adoption.py",  # worker calls of frameworks become updates
    "tests/e2e/test_adopted_buckets.py",
    "tests/e2e/test_adopted_recordings.py",
    "tests/e2e/test_adopted_ends.py",
    "tests/e2e/test_declared_writes.py",
    "tests/e2e/test_out_of_band_writes.py",  # what is not adopted is not hidden
    "tests/e2e/test_sleeps_inside_workers.py",
    "tests/e2e/test_absorbed_pauses.py",
    "tests/e2e/test_untested_release.py",  # in spawned processes
    "tests/e2e/test_killed_front_ends.py",  # processes that end with their parent
    "tests/robustness/faults",  # what harms vLLM as it is, and not here
)


def run(release: str) -> int:
    """Run the core tests on a release; returns the exit status of pytest."""
    OUT.mkdir(parents=True, exist_ok=True)
    paths = [str(site_of(release)), os.environ.get("PYTHONPATH", "")]
    print(f"vLLM {release}", flush=True)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", *CORE),
            *("-n", os.environ.get("LANES", "3"), "--dist", "loadfile"),
            *("--junitxml", str(OUT / f"{release}.xml")),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        check=False,
    )
    return done.returncode


def main(releases: list[str]) -> int:
    """Test the releases; returns 1 if a test has failed, 2 if a wheel is missing."""
    try:
        others = releases or [each for each in SUPPORTED if each != installed()]
        return int(any([run(release) != 0 for release in others]))
    except NoWheelError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
