"""The trainer's end of a group over gloo, in the place of vLLM's over NCCL.

A client of vLLM's opens its end and sends packed tensors through two functions of
vLLM's, which need a GPU. These two do the same where there is none.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

from vllm.inflight.transport.buckets.sender import Sender
from vllm.inflight.transport.buckets.tensor_list import TensorList
from vllm.inflight.transport.collective.connect import open_group
from vllm.inflight.transport.collective.receiver_engine import GlooInitInfo
from vllm.inflight.transport.collective.rendezvous import Rendezvous
from vllm.inflight.transport.waiting import WaitLimit

PATIENT = WaitLimit(60.0)


class Endpoint:
    """What a client holds of its end."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.group = SimpleNamespace(store=None, socket=None)


def open_endpoint(init_info: dict[str, Any]) -> Endpoint:
    """In place of vLLM's `trainer_init`."""
    info = GlooInitInfo(**init_info)
    meeting = Rendezvous.host(info.terms, info.master_address, info.master_port)
    group = open_group(meeting, torch.device("cpu"), PATIENT)
    return Endpoint(Sender(group, info.num_buckets, PATIENT))


def send_packed(
    iterator: Iterable[Any], group: Endpoint, src: int = 0, post_iter_func: Any = None
) -> None:
    """In place of vLLM's `packed_nccl_broadcast_producer`."""
    pairs = [(name, tensor.detach()) for name, tensor in iterator]
    group.sender.send(TensorList.of(pairs), pairs, PATIENT)
