"""vLLM's own trainer interface, over NCCL (on a CPU: gloo), into a live server.

python -m examples.broadcast_over_http

The source and the factory are upstream's; the backend is ours, and so is the client,
which knows keys, labels and typed errors. Each `send_weights` is one update: staged
while the server answers, then committed.
"""

from __future__ import annotations

import tempfile

import torch
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from examples.serve_over_http import say, served
from examples.tiny_model import Trainer, make_checkpoint
from vllm.inflight.trainer import ServerClient
from vllm.inflight.transport import GlooTrainerInitInfo, NcclTrainerInitInfo

NUM_GPUS = torch.cuda.device_count()
InitInfo = NcclTrainerInitInfo if NUM_GPUS else GlooTrainerInitInfo


def main() -> None:
    """Three versions, and what the server says with each."""
    if NUM_GPUS == 1:
        raise SystemExit("NCCL needs a second GPU: one for the server, one for us")
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(make_checkpoint(folder))
        if NUM_GPUS:
            torch.cuda.set_device(NUM_GPUS - 1)  # the server takes the first
            trainer.model.cuda()
        with served(folder, InitInfo.backend) as url, ServerClient(url) as client:
            sender = WeightTransferTrainerFactory.trainer_init(
                InitInfo(
                    rank=0,
                    master_address="127.0.0.1",
                    master_port=0,  # any that is free
                    world_size=1 + client.get_world_size(),
                ),
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
