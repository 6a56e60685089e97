"""On a GPU: threads that an adopted method starts follow its rules, and end with it.

There a thread has another stream than the one that stages.
"""

import pytest
import torch

from tests.e2e.test_adopted_threads import (  # noqa: F401 (tests, run here on a GPU)
    booted,
    expected,
    held,
    test_a_thread_of_one_part_that_writes_during_the_next_ends_the_version,
    test_a_thread_that_goes_on_after_a_commit_changes_no_version,
    test_a_thread_that_goes_on_during_the_next_update_leaves_it_alone,
    test_after_an_abort_by_another_client_threads_of_the_method_write_nothing,
    test_after_an_abort_the_method_itself_writes_no_further_parameter,
    test_tensors_that_a_thread_of_the_method_loads_become_a_version,
    test_what_a_thread_may_not_do_is_rejected_by_name_and_changes_nothing,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
