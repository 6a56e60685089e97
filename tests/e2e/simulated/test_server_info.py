"""The configuration as a route tells it, and what it keeps to itself."""

from collections.abc import Callable

import pytest
from vllm.v1.engine.core import EngineCore

from tests.support.engines.core_door import Door
from tests.support.simulated.worker import Drafting

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("form", ["json", "text"])
def test_no_hugging_face_token_appears_in_the_server_configuration(
    make: Callable[..., EngineCore], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    core = make(Drafting)
    config = core.vllm_config
    assert config.speculative_config is not None
    for model in (config.model_config, config.speculative_config.draft_model_config):
        monkeypatch.setattr(model, "hf_token", "hf_secret")
    told = Door(core).get("/server_info", config_format=form)["vllm_config"]
    assert "tiny" in str(told)
    assert "hf_secret" not in str(told)
