"""KV that leaves the engine: upstream's example connector, on a real engine.

It keeps KV in files named after the tokens alone, so what it holds outlives our salt.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from tests.support.engines.probe import greedy
from vllm.inflight.errors import Conflict

pytestmark = pytest.mark.engine

TEXT = {"prompt_token_ids": [(5 * i) % 250 for i in range(100)]}
EXACT = {"dtype": "float32"}
"""In bf16 a CPU with AMX rounds otherwise when a part of the KV is read from a tier."""
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def said(llm: LLM) -> list[int]:
    """What an engine makes of a text, with nothing left in its own cache."""
    llm.reset_prefix_cache()
    (output,) = llm.generate([TEXT], PARAMS, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.fixture
def serve(start: Callable[..., Any], old: Path, tmp_path: Path) -> Callable[..., LLM]:
    """`serve(connector, policy)`: an engine on the old weights, with a tier."""

    def llm(connector: str, policy: str = "versioned", model: Path = old) -> LLM:
        tier = KVTransferConfig(
            kv_connector=connector,
            kv_role="kv_both",
            kv_connector_module_path=None
            if connector == "ExampleConnector"
            else "tests.support.engines.tier",
            kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
        )
        options = {"inflight": {"prefix_cache": policy}}
        return start(model, kv_transfer_config=tier, additional_config=options, **EXACT)

    return llm


def test_a_dropping_connector_has_dropped_its_cache_when_the_commit_returns(
    serve: Callable[..., LLM], start: Callable[..., Any], new: Path, tmp_path: Path
) -> None:
    llm = serve("DroppingConnector")
    before = said(llm)
    assert list(tmp_path.iterdir()), "nothing was kept, so nothing is shown"
    assert said(llm) == before
    llm.update_weights_from_disk(str(new), "new")
    assert list(tmp_path.iterdir()) == []
    after, others = said(llm), greedy(llm)
    fresh = start(new, **EXACT)
    assert (after, others) == (said(fresh), greedy(fresh))
    assert after != before


def test_an_update_reads_stale_kv_from_a_connector_that_keeps_its_cache(
    serve: Callable[..., LLM], start: Callable[..., Any], new: Path
) -> None:
    llm = serve("ExampleConnector", "shared")
    said(llm)
    llm.update_weights_from_disk(str(new), "new")
    stale = said(llm)
    assert stale != said(start(new, **EXACT))


def test_a_connector_that_cannot_drop_its_cache_keeps_updates_out(
    serve: Callable[..., LLM], new: Path
) -> None:
    llm = serve("ExampleConnector")
    before = said(llm)
    with pytest.raises(Conflict, match="ExampleConnector keys KV by tokens alone"):
        llm.update_weights_from_disk(str(new), "new")
    assert said(llm) == before
    assert llm.weight_info()["epoch"] == 0


def test_a_connector_that_does_not_drop_its_cache_keeps_a_commit_out(
    serve: Callable[..., LLM], new: Path
) -> None:
    llm = serve("KeepingConnector")
    before = said(llm)
    with pytest.raises(Conflict, match="KeepingConnector did not drop its cache"):
        llm.update_weights_from_disk(str(new), "new")
    assert said(llm) == before
    assert llm.weight_update_status()["active"] is None
