"""Words of messages: what is like an unknown word, and sizes."""

from __future__ import annotations

import pytest

from vllm.inflight.wording import nearest, size


def test_a_message_names_the_known_words_that_are_most_like_an_unknown_one() -> None:
    known = ["weight_version", "base_version", "owner"]
    assert nearest("weights_version", known).startswith(" (nearest: weight_version")
    assert nearest("version", known) == " (nearest: base_version, weight_version)"
    assert nearest("zzz", known) == nearest("x" * 1_000_000, known) == ""


@pytest.mark.parametrize(
    "num_bytes, text",
    [(0, "0.00 GiB"), (607_744, "0.58 MiB"), (3 << 29, "1.50 GiB")],
)
def test_a_small_size_does_not_look_like_none(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text
