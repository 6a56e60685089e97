"""Fingerprints: a write is detected, however it was made, and so is a blank rest."""

from collections.abc import Callable

import pytest
import torch

from vllm.inflight.worker.integrity import fingerprint
from vllm.inflight.worker.integrity.fingerprint import (
    BLANK,
    has_blank,
    is_blank_in,
    is_same,
    make_blank,
    sample,
    words_of,
)

SHAPES = {
    "a number": torch.zeros(()),
    "three bytes": torch.zeros(3, dtype=torch.uint8),
    "small": torch.zeros(7, 5, dtype=torch.bfloat16),
    "just small": torch.zeros(64, 16, dtype=torch.float32),
    "just long": torch.zeros(65, 16, dtype=torch.float32),
    "long": torch.zeros(300, 500, dtype=torch.float16),
    "eight bits": torch.zeros(300, 501, dtype=torch.uint8),
    "turned": torch.zeros(300, 500).t(),
    "stacked": torch.zeros(4, 64, 96).permute(1, 2, 0),
    "a part": torch.zeros(400, 300)[100:300],
    "off by two bytes": torch.zeros(20_001, dtype=torch.bfloat16)[1:],
}


def changed(act: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> bool:
    before = sample([tensor])
    assert is_same(before, sample([tensor]))
    act(tensor)
    return not is_same(before, sample([tensor]))


@pytest.mark.parametrize("kind", SHAPES)
def test_a_tensor_that_is_written_has_another_fingerprint(kind: str) -> None:
    assert changed(lambda t: t.data.fill_(3), SHAPES[kind].clone())


def test_a_write_of_one_number_in_a_hundred_is_seen() -> None:
    """As an optimizer's step in bf16 leaves most numbers as they were."""
    torch.manual_seed(0)
    for _ in range(20):
        tensor = torch.randn(1024, 1024).to(torch.bfloat16)
        where = torch.rand(tensor.shape) < 0.01
        assert changed(
            lambda t, w=where: (
                t.data[w].mul_(2) is None or (t.data.masked_fill_(w, 7.0))
            ),
            tensor,
        )


def test_a_write_of_any_row_or_column_of_a_matrix_is_seen() -> None:
    for shape in ((512, 4096), (4096, 512), (1000, 1000)):
        tensor = torch.zeros(shape, dtype=torch.bfloat16)
        assert changed(lambda t: t.data[:, t.shape[1] // 2 :].fill_(1), tensor)
        assert changed(lambda t: t.data[t.shape[0] // 2 :].fill_(1), tensor)


def test_memory_beside_a_tensor_is_no_part_of_its_fingerprint() -> None:
    whole = torch.zeros(3, 4096)
    part = whole[1]
    before = sample([part])
    whole[0].fill_(1)
    whole[2].fill_(1)
    assert is_same(before, sample([part]))
    assert make_blank(part)
    assert whole[0].eq(1).all() and whole[2].eq(1).all()


@pytest.mark.parametrize("kind", SHAPES)
def test_a_blank_rest_is_detected_to_the_last_word(kind: str) -> None:
    tensor = SHAPES[kind].clone(memory_format=torch.preserve_format)
    if not make_blank(tensor):
        assert tensor.nbytes < 8
        return
    assert has_blank(tensor) and is_blank_in(sample([tensor])[0])
    words = words_of(tensor)
    assert words is not None and words.eq(BLANK).all()
    words[:-1] = 0
    assert has_blank(tensor)
    words[-1] = 0
    assert not has_blank(tensor) and not is_blank_in(sample([tensor])[0])


def test_a_tensor_with_gaps_is_sampled_and_never_made_blank() -> None:
    tensor = torch.zeros(300, 500)[:, ::2]
    assert words_of(tensor) is None and not make_blank(tensor)
    assert changed(lambda t: t.data.fill_(1), tensor)


def test_blank_weights_are_small_finite_numbers_in_every_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        tensor = torch.zeros(64, dtype=dtype)
        assert make_blank(tensor)
        assert tensor.float().isfinite().all() and tensor.float().abs().max() < 0.1


def test_samples_of_many_tensors_keep_their_order() -> None:
    tensors = [torch.full((size,), float(size)) for size in (5, 5000, 6, 6000, 1)]
    found = sample(tensors)
    firsts = [part.reshape(-1).view(torch.float32)[0].item() for part in found]
    assert firsts == [5.0, 5000.0, 6.0, 6000.0, 1.0]
    assert fingerprint.sample([]) == []


def test_samples_of_more_kinds_of_tensors_are_others() -> None:
    long, short = torch.zeros(64, 1024), torch.zeros(3)
    one, both = (fingerprint.Lines(found).read() for found in ([long], [long, short]))
    assert not is_same(one, both) and not is_same(both, one)
