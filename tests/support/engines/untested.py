"""vLLM as a release that was not tested: the next one of the installed minor release.

`python -m tests.support.engines.untested serve …` is `vllm serve` of it, in each of its
processes.
"""

import runpy

import vllm.version

from vllm.inflight.releases.table import installed

RELEASE = f"{installed().rpartition('.')[0]}.99"
"""The records for the installed release hold for it too."""

if __name__ in ("__main__", "__mp_main__"):  # the latter is what is spawned
    vllm.version.__version__ = RELEASE

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__")
