"""Trainers in processes of their own, over HTTP, which a test may kill."""

import os
import signal
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from tests.support.models.checkpoint_source import CheckpointSource
from tests.support.preloaded_process import nursery
from tests.support.transports.peers import HOST
from vllm.inflight.trainer import Publisher
from vllm.inflight.trainer.http_client import HttpEngine
from vllm.inflight.transport.collective.trainer_engine import GlooTrainerInitInfo

BUCKET_BYTES = 1 << 14
"""Small, so that half an update is many buckets."""


def publish(url: str, folder: Path) -> None:
    """Over shared memory."""
    with Publisher(url, CheckpointSource(folder).tensors) as publisher:
        publisher.publish()


def broadcast(url: str, folder: Path) -> None:
    """Over gloo, with upstream's trainer interface."""
    sender = WeightTransferTrainerFactory.trainer_init(
        GlooTrainerInitInfo(
            rank=0,
            master_address=HOST,
            master_port=0,
            world_size=2,
            bucket_bytes=BUCKET_BYTES,
        ),
        client=HTTPVLLMWeightSyncClient(url),
        source=CheckpointSource(folder),
    )
    sender.send_weights()
    sender.shutdown()


WAYS = {"shared memory": publish, "gloo": broadcast}
BACKENDS = {"shared memory": "local", "gloo": "inflight_gloo"}
"""That a server needs for it."""


def run(way: str, url: str, folder: Path, dies: bool) -> None:
    """The process: one update; where it would finish, it may die instead."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if dies:
        HttpEngine.finish = _die
        HTTPVLLMWeightSyncClient.finish_weight_update = _die
    WAYS[way](url, folder)


def _die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def start(way: str, url: str, folder: Path, *, dies: bool = False) -> Any:
    """A trainer that has been started, as a process."""
    trainer = nursery.Process(target=run, args=(way, url, folder, dies), daemon=True)
    trainer.start()
    return trainer
