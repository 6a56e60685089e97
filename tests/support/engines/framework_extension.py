"""A worker extension with the methods that prime-rl's and PipelineRL's packages have.

PipelineRL's group is vLLM's `StatelessProcessGroup`, which torch's groups do not meet.
What would travel over NCCL there travels through the group's store here.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlparse

import torch
from vllm.distributed.utils import StatelessProcessGroup


class Extension:
    """Notes what came, and loads nothing."""

    def update_weights_from_path(self: Any, weight_dir: str) -> None:
        self.framework_paths = [*getattr(self, "framework_paths", []), weight_dir]

    def framework_told(self: Any) -> dict[str, Any]:
        return {
            "paths": getattr(self, "framework_paths", []),
            "sums": getattr(self, "framework_sums", {}),
            "has a group": getattr(self, "model_update_group", None) is not None,
        }

    def init_actor_update_group(
        self: Any, actor_idx: int, actor_ngpus: int, init_method: str, world_size: int
    ) -> None:
        where = urlparse(init_method)
        rank = 1 + actor_idx * actor_ngpus + self.rank
        self.model_update_group = StatelessProcessGroup.create(
            host=where.hostname, port=where.port, rank=rank, world_size=world_size
        )

    def receive_weight_update(self: Any, request_json: str) -> None:
        sums = {}
        for info in json.loads(request_json)["parameters_info"]:
            tensor = self.model_update_group.broadcast_obj(None, src=0)
            assert list(tensor.shape) == info["shape"]
            sums[info["name"]] = float(tensor.to(torch.float64).sum())
        self.framework_sums = sums

    def close_communicator(self: Any) -> None:
        self.model_update_group = None
