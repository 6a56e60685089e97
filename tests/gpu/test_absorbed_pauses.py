"""Absorbed pauses on a GPU, under CUDA graphs: frameworks' calls, and writes."""

import pytest
import torch

from tests.e2e.test_absorbed_pauses import (  # noqa: F401 (tests, run here on a GPU)
    booted,
    test_a_frameworks_pause_around_its_adopted_update_stops_no_token,
    test_a_worker_call_that_is_not_adopted_stops_every_step_meanwhile,
    test_a_write_past_load_weights_stops_decoding_at_the_next_step,
    test_an_update_of_several_calls_without_a_mark_is_committed_under_the_pause,
    test_code_beside_the_engine_loads_while_no_step_runs,
    test_the_routes_tell_a_framework_that_it_is_paused,
    test_the_tokens_of_a_retracting_pause_are_those_of_their_versions,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
