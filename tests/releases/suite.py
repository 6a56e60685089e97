"""Tests on releases of vLLM: `python -m tests.releases.suite 0.29.0 …`.

The core tests run on all supported releases except the installed one, on which
`make test` runs. With `--frameworks`, the tests that the page on frameworks names run
on the installed release. Releases that are named run instead.

The results are in `out/releases/<release>.xml` and `out/frameworks/<release>.xml`, and
`python -m docs.release_runs` and `python -m docs.framework_runs` keep them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

from tests.releases.site import site_of
from tests.releases.wheel import ROOT, NoWheelError
from tests.support.frameworks.overview import TESTS
from vllm.inflight.releases.table import SUPPORTED, installed

OUT = ROOT / "out"

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
    "tests/e2e/test_adopted_by_hand.py",
    "tests/e2e/test_adopted_ends.py",
    "tests/e2e/test_declared_writes.py",
    "tests/e2e/test_out_of_band_writes.py",  # what is not adopted is not hidden
    "tests/e2e/test_sleeps_inside_workers.py",
    "tests/e2e/test_absorbed_pauses.py",
    "tests/e2e/test_untested_release.py",  # in spawned processes
    "tests/e2e/test_killed_front_ends.py",  # processes that end with their parent
    "tests/robustness/faults",  # what harms vLLM as it is, and not here
)


FRAMEWORKS = (
    *(f"tests/{file}" for file in TESTS),
    "tests/e2e/test_framework_files.py",
    "tests/e2e/test_recipes.py",
)


def run(release: str, tests: Sequence[str], results: str, *options: str) -> int:
    """Run tests on a release; returns the exit status of pytest."""
    (OUT / results).mkdir(parents=True, exist_ok=True)
    paths = [os.environ.get("PYTHONPATH", "")]
    if release != installed():
        paths.insert(0, str(site_of(release)))
    print(f"vLLM {release}", flush=True)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", *tests, *options),
            *("-n", os.environ.get("LANES", "3"), "--dist", "loadfile"),
            *("--junitxml", str(OUT / results / f"{release}.xml")),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        check=False,
    )
    return done.returncode


def main(argv: list[str] | None = None) -> int:
    """Test the releases; returns 1 if a test has failed, 2 if a wheel is missing."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("releases", nargs="*", metavar="RELEASE")
    parser.add_argument("--frameworks", action="store_true")
    args = parser.parse_args(argv)
    if args.frameworks:
        releases = args.releases or [installed()]
        options = "-m", "engine or slow"
        runs = [partial(run, r, FRAMEWORKS, "frameworks", *options) for r in releases]
    else:
        releases = args.releases or [each for each in SUPPORTED if each != installed()]
        runs = [partial(run, r, CORE, "releases") for r in releases]
    try:
        return int(any([each() != 0 for each in runs]))
    except NoWheelError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
