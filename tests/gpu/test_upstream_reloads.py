"""Upstream's calls that write into live weights in an arena."""

import pytest
import torch

from tests.e2e.test_upstream_reloads import (  # noqa: F401 (tests, run here on a GPU)
    test_a_call_that_is_rejected_before_it_writes_changes_nothing,
    test_a_folder_that_is_not_there_is_not_where_the_next_reload_looks,
    test_a_loader_that_reloads_nothing_changes_nothing,
    test_a_reload_in_kernel_format_that_fails_leaves_the_weights_gone,
    test_a_reload_or_reset_is_rejected_during_an_update,
    test_a_reload_reads_no_kv_of_the_weights_before,
    test_a_reload_that_begins_with_nothing_changes_nothing,
    test_a_reload_that_fails_in_its_first_write_leaves_the_weights_gone,
    test_a_reload_that_fails_leaves_weights_that_are_not_decoded_with,
    test_a_reload_that_fails_while_detaching_layers_changes_nothing,
    test_a_subset_after_a_reload_is_a_subset_of_what_was_reloaded,
    test_a_weight_reset_begins_a_version_without_a_digest,
    test_requests_run_on_across_a_reload_and_their_tokens_say_so,
    third,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
