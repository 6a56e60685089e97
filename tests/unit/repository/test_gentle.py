"""The steps of tests/support/engines/gentle.py are taken by each model runner."""

import time

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessor

from tests.support.engines.gentle import NAME, SLEEP_S, Gentle

pytestmark = pytest.mark.seconds


def test_the_first_runner_takes_gentle_steps():
    assert issubclass(Gentle, LogitsProcessor)
    rests(Gentle(None, torch.device("cpu"), False))


def test_the_second_runner_which_gpus_have_takes_gentle_steps():
    """Its loader ends an engine whose class is of the first runner alone."""
    loader = pytest.importorskip("vllm.v1.worker.gpu.sample.logits_processor.loader")
    loader.build_custom_logits_processors_params_validator([NAME])(SamplingParams())
    assert loader._load_v2_logitsprocs_by_fqcns([NAME]) == [Gentle]
    processor = Gentle(None, None)
    assert processor.add_request(0, SamplingParams()) is True
    processor.apply_staged_writes()
    rests(processor, None)


def rests(processor, *context):
    logits, began = torch.ones(1, 4), time.monotonic()
    assert processor.apply(logits, *context) is logits
    assert time.monotonic() - began >= SLEEP_S
