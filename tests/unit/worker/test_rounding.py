"""A loader computes on the device on which a fresh engine computes."""

import torch

from vllm.inflight.worker.staging.rounding import HOST, LoaderRounding

ELSEWHERE = torch.device("meta")
"""Stands for the other device: what is computed there can be told."""


def seen(loader, *places):
    """Where the arguments of exponentials were while a loader ran."""
    param = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)
    loaded = torch.randn(3, 2, dtype=torch.bfloat16)
    made = []
    with LoaderRounding(*zip((param, loaded), places, strict=True)):
        loader(param, loaded, made.append)
    return [each.device for each in made]


def of_the_tensor(param, loaded, made):
    shard = loaded.t().narrow(0, 1, 1)
    made(torch.exp(shard.float() * 2))
    made(-torch.exp(loaded))
    made(loaded.t().contiguous())


def of_the_parameter(param, loaded, made):
    param.data.copy_(loaded.t())
    made(torch.exp(param.data.double()))
    made(param.data + 1)


def test_rounding_functions_run_on_the_device_where_a_fresh_engine_runs_them():
    assert seen(of_the_tensor, HOST, ELSEWHERE) == [ELSEWHERE, ELSEWHERE, HOST]
    assert seen(of_the_tensor, ELSEWHERE, HOST) == [HOST] * 3
    assert seen(of_the_parameter, ELSEWHERE, HOST) == [ELSEWHERE, HOST]
    assert seen(of_the_parameter, HOST, ELSEWHERE) == [HOST] * 2


def test_a_parameter_without_memory_is_left_where_it_is():
    param = torch.zeros(2, 3, device="meta")
    with LoaderRounding((param, HOST)):
        assert torch.exp(param).is_meta


def test_tensors_that_a_loader_made_are_freed_during_rounding():
    with LoaderRounding((torch.ones(4), HOST)) as arithmetic:
        kept = [torch.exp(torch.ones(4)) for _ in range(3)]
    assert len(arithmetic._places) == 1
    loaded = torch.ones(4)
    with LoaderRounding((loaded, HOST)) as arithmetic:
        for _ in range(3):
            kept.append(loaded.double())
        alive = {ref.expired() for ref in arithmetic._places}
        kept.clear()
        assert alive == {False}
        assert sum(ref.expired() for ref in arithmetic._places) == 3
