"""On a GPU: an adopted method copies into shadow parameters in the arena itself.

There parameters stay where they are, so a copy is made as the method makes it, on any
stream.
"""

from pathlib import Path

import pytest
import torch

from tests.e2e.test_adopted_direct_writes import (  # noqa: F401 (tests, run on a GPU)
    booted,
    build,
    check_two_ranks,
    expected,
    new_weights,
    test_a_method_that_writes_every_parameter_itself_brings_a_version,
    test_a_scrub_finds_what_changes_after_a_version_that_a_method_has_written,
    test_a_version_that_lacks_what_the_last_one_had_changes_nothing,
    test_each_call_that_is_repeated_is_rejected,
    test_no_delta_starts_from_a_version_that_a_method_has_written,
    test_parts_of_a_version_are_written_in_several_calls,
    test_the_digest_is_of_what_is_served,
    test_what_a_method_has_written_may_be_read_where_it_is_in_place,
    test_what_is_not_each_element_once_is_rejected_by_name_and_changes_nothing,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("parallel", ["tensor", "pipeline"])
def test_each_of_two_gpus_writes_its_own_parameters(
    folders: dict[str, Path], parallel: str
) -> None:
    check_two_ranks(folders, parallel)
