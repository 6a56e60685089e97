"""`vllm serve` of a release that was not tested: only if it is told to, with a warning.

Its processes import vLLM themselves and are spawned, as those of a user are.
"""

from pathlib import Path

import pytest

from tests.support.engines.untested import RELEASE
from tests.support.serving import Server
from vllm.inflight.patch import ALLOW_UNTESTED_FLAG

pytestmark = pytest.mark.engine

MAIN = "tests.support.engines.untested"
SPAWNED = {"VLLM_PLUGINS": "inflight"}


def test_a_server_of_an_untested_release_does_not_start(old: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="ended at start") as end,
        Server(old, env=SPAWNED, main=MAIN),
    ):
        raise AssertionError("it has started")
    last = str(end.value).strip().splitlines()[-1]
    assert f"found {RELEASE}. Install vllm==" in last
    assert f"{ALLOW_UNTESTED_FLAG} of `vllm serve`" in last


def test_with_the_flag_it_starts_with_a_warning_and_is_updated(
    old: Path, new: Path
) -> None:
    with Server(old, ALLOW_UNTESTED_FLAG, env=SPAWNED, main=MAIN) as server:
        told = server.log().splitlines()
        warned = f"vLLM {RELEASE} was not tested with vllm-inflight"
        warnings = [line for line in told if warned in line]
        in_core = ["EngineCore" in line for line in warnings]
        assert in_core.count(True) == 1, warnings
        assert not in_core[0], warnings  # the server itself
        reply = server.post("/update_weights_from_disk", {"path": str(new)})
        assert reply["success"] is True, reply
        text = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4}
        (choice,) = server.post("/v1/completions", text)["choices"]
        assert choice["weight_versions"][0]["epoch"] == reply["epoch"]
