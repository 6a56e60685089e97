"""Pauses of several callers, and the oracle of the pause cells, on a GPU."""

from typing import Any

import pytest
import torch

from tests.robustness.pauses.conftest import subject_of  # noqa: F401 (a fixture)
from tests.robustness.pauses.rows import MODELS
from tests.robustness.pauses.subjects import Subject
from tests.robustness.pauses.test_oracle import (  # noqa: F401 (tests, run here on a GPU)
    DEVICES,
    correct,
    test_a_layer_that_stayed_behind_is_found,
    test_a_stamp_of_another_version_is_found,
    test_kv_of_another_version_is_found,
    test_one_changed_token_is_found,
    test_the_oracle_finds_no_fault_in_correct_streams,
)
from tests.robustness.pauses.test_uses import (  # noqa: F401 (tests, run here on a GPU)
    live,
    subject,
    test_a_client_that_vanishes_in_a_pause_takes_only_its_request_along,
    test_a_flush_under_requests_whose_kv_is_kept_is_rejected,
    test_a_pause_becomes_stricter_under_requests_and_never_looser,
    test_a_pause_takes_force_after_the_steps_that_are_under_way,
    test_an_abort_that_races_with_a_flip_leaves_one_whole_version,
    test_decoding_goes_on_by_itself_when_the_lease_of_a_pause_runs_out,
    test_decoding_goes_on_while_an_update_is_staged_that_began_in_the_pause,
    test_the_context_of_a_request_is_computed_anew_by_each_of_three_versions,
    test_updates_succeed_inside_pauses_of_another_owner,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module", params=MODELS)
def judged(request: pytest.FixtureRequest, subject_of: Any) -> Subject:  # noqa: F811
    """The oracle is tried at the noise that each model has on a GPU."""
    found: Subject = subject_of(request.param, 1, DEVICES["cuda"])
    return found
