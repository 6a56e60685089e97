"""`vllm serve` of a release that was not tested: only if it is told to, with a warning.

Its processes import vLLM themselves and are spawned, as those of a user are. Such an
engine core loads its plugins while its constructor already runs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.probe import GREEDY, prompts
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


def said(llm: Any) -> list[list[int]]:
    """Greedy tokens of an `LLM`, of one prompt after the other."""
    outputs = [llm.generate(each, GREEDY, use_tqdm=False)[0] for each in prompts(8)]
    return [list(output.outputs[0].token_ids) for output in outputs]


def choices(server: Server) -> list[dict[str, Any]]:
    """The same of a server, with the versions."""
    body = {"model": "tiny", "temperature": 0, "max_tokens": GREEDY.max_tokens}
    body |= {"ignore_eos": True, "return_token_ids": True}
    asked = (body | {"prompt": each["prompt_token_ids"]} for each in prompts(8))
    return [server.post("/v1/completions", each)["choices"][0] for each in asked]


def test_with_the_flag_it_starts_with_a_warning_and_is_updated_and_rolled_back(
    start: Callable[..., Any], old: Path, new: Path
) -> None:
    of_old, of_new = said(start(old)), said(start(new))
    with Server(old, ALLOW_UNTESTED_FLAG, env=SPAWNED, main=MAIN) as server:
        told = server.log().splitlines()
        warned = f"vLLM {RELEASE} was not tested with vllm-inflight"
        warnings = [line for line in told if warned in line]
        in_core = ["EngineCore" in line for line in warnings]
        assert in_core.count(True) == 1, warnings
        assert not in_core[0], warnings  # the server itself
        reply = server.post("/update_weights_from_disk", {"path": str(new)})
        assert reply["success"] is True, reply
        updated = choices(server)
        assert [each["token_ids"] for each in updated] == of_new != of_old
        assert updated[0]["weight_versions"][0]["epoch"] == reply["epoch"]
        server.post("/rollback_weights")
        assert [each["token_ids"] for each in choices(server)] == of_old
