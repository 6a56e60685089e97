"""On a GPU: what a user's adopted method writes past the loader is rejected by name."""

import pytest
import torch

from tests.e2e.test_user_known_calls import (  # noqa: F401 (tests, run here on a GPU)
    booted,
    package,
    test_a_users_own_call_becomes_a_version_and_its_result_is_returned,
    test_a_write_past_the_loader_is_rejected_by_name_and_changes_nothing,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
