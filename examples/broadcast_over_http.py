"""vLLM's own trainer interface, over NCCL, into a live server.

python -m examples.broadcast_over_http

The source and the factory are upstream's; the backend is ours, and so is the client,
which knows keys, labels and typed errors. Each `send_weights` is one update: staged
while the server answers, then committed. NCCL needs a GPU for each end. On one GPU the
trainer lends its tensors, and on a CPU they travel over gloo.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from examples.serve_over_http import say, served
from examples.tiny_model import Trainer, make_checkpoint
from vllm.inflight.trainer import ServerClient
from vllm.inflight.transport import (
    GlooTrainerInitInfo,
    IpcTrainerInitInfo,
    NcclTrainerInitInfo,
)

NUM_GPUS = torch.cuda.device_count()
Broadcast = NcclTrainerInitInfo if NUM_GPUS else GlooTrainerInitInfo
BACKEND = IpcTrainerInitInfo.backend if NUM_GPUS == 1 else Broadcast.backend


def init_info(num_workers: int) -> Any:
    """What the trainer and the workers agree on."""
    if NUM_GPUS == 1:
        return IpcTrainerInitInfo(rank=0)
    return Broadcast(
        rank=0,
        master_address="127.0.0.1",
        master_port=0,  # any that is free
        world_size=1 + num_workers,
    )


def main() -> None:
    """Three versions, and what the server says with each."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(make_checkpoint(folder))
        if NUM_GPUS:
            torch.cuda.set_device(NUM_GPUS - 1)  # the server takes the first one
            trainer.model.cuda()
        with served(folder, BACKEND) as url, ServerClient(url) as client:
            sender = WeightTransferTrainerFactory.trainer_init(
                init_info(client.get_world_size()),
                client=client,
                source=ModuleSource(trainer.model),
            )
            say(url)
            for _ in range(3):
                loss = trainer.train(num_steps=20)
                print(f"step {trainer.step}: loss {loss:.2f}")
                client.announce(f"step-{trainer.step}", step=trainer.step)
                sender.send_weights()
                say(url)
            sender.shutdown()


if __name__ == "__main__":
    main()
