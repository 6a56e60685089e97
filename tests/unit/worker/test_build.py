"""A shadow model shares no layer with the live model, and takes none from it."""

import torch

from vllm.inflight.worker.shadow import build


def test_a_module_shared_by_upstream_keeps_its_inner_modules():
    inside, weight = torch.nn.Identity(), torch.nn.Linear(2, 2)
    rotary = torch.nn.ModuleDict({"turn": inside})
    live = torch.nn.ModuleDict({"rotary": rotary, "proj": weight})
    second = torch.nn.ModuleDict({"rotary": rotary, "proj": torch.nn.Linear(2, 2)})
    build._unshare(second, live)
    assert rotary["turn"] is inside
    assert {id(m) for m in second.modules()}.isdisjoint(map(id, live.modules()))
    assert dict(second.named_modules()).keys() == dict(live.named_modules()).keys()
