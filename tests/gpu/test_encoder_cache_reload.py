"""Upstream's reload drops encoder outputs with the GPU's model runner, too."""

import pytest
import torch

from tests.e2e.test_encoder_cache_reload import (  # noqa: F401 (tests, run here on a GPU)
    engine,
    new,
    old,
    test_a_request_recomputes_the_output_of_a_half_read_picture_after_a_reload,
    test_a_session_in_the_middle_of_a_picture_rejects_a_reload,
    test_pictures_seen_before_are_seen_with_what_was_reloaded,
    test_requests_without_media_are_not_retracted,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
