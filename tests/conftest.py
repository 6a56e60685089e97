"""What holds for every test."""

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

import tests.calm.sitecustomize  # noqa: F401 (in this process; its children by path)

ROOT = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT / "tests" / "calm"), str(ROOT), os.environ.get("PYTHONPATH", "")]
).rstrip(os.pathsep)

# A busy machine is no reason to fail.
settings.register_profile(
    "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")
