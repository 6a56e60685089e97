"""Worker extensions with the calls of frameworks, written by hand.

Each class was written after the framework's file was read in November 2026. It has the
methods that write weights, with the same parameters, attributes on the worker, and ways
to reach the weights. Tensors come from a queue of this process in place of NCCL.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]

SENT: list[tuple[str, torch.Tensor]] = []
"""What a trainer has sent and nobody has received, the oldest first."""


def _received(count: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    for _ in range(len(SENT) if count is None else count):
        yield SENT.pop(0)


def _layerwise(worker: Any, weights: Any) -> None:
    """Load by upstream's layerwise reload."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import reload

    model = worker.model_runner.model
    device = next(model.parameters()).device
    with torch.device(device), set_current_vllm_config(worker.vllm_config):
        reload.initialize_layerwise_reload(model)
        model.load_weights(weights)
        reload.finalize_layerwise_reload(model, worker.model_runner.model_config)


class PrimeRL:
    """prime-rl: one call with a folder, or with tensors of a group."""

    quantize_in_weight_transfer = False

    def init_broadcaster(self: Any, quantize_in_weight_transfer: bool = False) -> None:
        self.quantize_in_weight_transfer = quantize_in_weight_transfer

    def update_weights_from_path(self: Any, weight_dir: str) -> None:
        if self.quantize_in_weight_transfer:
            params = dict(self.model_runner.model.named_parameters())
            with torch.no_grad():
                for name, tensor in _received():
                    params[name].copy_(tensor)
            return
        self.model_runner.model_config.model = weight_dir
        found = load_file(Path(weight_dir) / "model.safetensors")
        _layerwise(self, iter(found.items()))


class PrimeRLFiles:
    """prime-rl's newer worker for files, with another name of the parameter."""

    def update_weights_from_path(self: Any, weight_path: str) -> None:
        PrimeRL.update_weights_from_path(self, weight_path)

    quantize_in_weight_transfer = False


class PrimeRLOfEngine:
    """prime-rl, each of whose engines has a folder of its own."""

    def update_weights_from_path(self: Any, weight_dir: str) -> None:
        index = self.vllm_config.parallel_config.data_parallel_index
        PrimeRL.update_weights_from_path(self, weight_dir.replace("*", str(index)))

    quantize_in_weight_transfer = False


class PrimeRLNixl:
    """prime-rl's worker for NIXL, which keeps tensors of the live model."""

    def initialize_transfer(self: Any) -> dict[str, torch.nn.Parameter]:
        if not hasattr(self, "weight_transfer_plan"):
            params = self.model_runner.model.named_parameters()
            self.weight_transfer_plan = dict(params)
        plan: dict[str, torch.nn.Parameter] = self.weight_transfer_plan
        return plan

    def apply_transfer_plan(self: Any, plan: dict[str, torch.nn.Parameter]) -> None:
        for name, tensor in _received():
            plan[name].data.copy_(tensor)

    def update_weights_from_path(self: Any, weight_dir: str | None = None) -> None:
        self.apply_transfer_plan(self.initialize_transfer())


class SkyRL:
    """SkyRL: a begin, chunks, and an end."""

    def skyrl_start_weight_update(self: Any, is_checkpoint_format: bool = True) -> None:
        from vllm.model_executor.model_loader import reload

        if getattr(self, "_skyrl_weight_update_active", False):
            raise RuntimeError("an update is active already")
        with torch.device(self.device):
            reload.initialize_layerwise_reload(self.model_runner.model)
        self._skyrl_weight_update_active = True

    def update_weights_ipc(self: Any, update_info: dict[str, Any]) -> None:
        if not getattr(self, "_skyrl_weight_update_active", False):
            raise RuntimeError("no update is active")
        pairs = list(_received(len(update_info["names"])))
        assert [name for name, _ in pairs] == update_info["names"]
        self.model_runner.model.load_weights(weights=pairs)

    def update_weights_nccl(self: Any, update_info: dict[str, Any]) -> None:
        SkyRL.update_weights_ipc(self, update_info)

    def skyrl_finish_weight_update(self: Any) -> None:
        from vllm.model_executor.model_loader import reload

        with torch.device(self.device):
            reload.finalize_layerwise_reload(self.model_runner.model, self.model_config)
        self._skyrl_weight_update_active = False


class AReaL:
    """AReaL: buckets without a mark of the last one; a failure is a result."""

    def areal_set_weight_meta(
        self: Any, names: Any, dtypes: Any, shapes: Any, group_name: str
    ) -> tuple[bool, str]:
        self.areal_weight_meta_names = names
        return True, "Success"

    def areal_update_weight_xccl(self: Any) -> tuple[bool, str]:
        try:
            for name, tensor in _received(len(self.areal_weight_meta_names)):
                self.model_runner.model.load_weights(weights=[(name, tensor)])
        except Exception as error:
            return False, f"Failed to update parameter! {error}."
        return True, "Success"

    def areal_update_weights(self: Any, model_path: str) -> tuple[bool, str]:
        try:
            found = load_file(Path(model_path) / "model.safetensors")
            self.model_runner.model.load_weights(iter(found.items()))
        except Exception as error:
            return False, f"failed to upload weights! {error}"
        return True, "Success"


def _traced(method: Any) -> Any:
    """A decorator that hides what its method takes, as NeMo-RL's does."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return wrapper


class NemoRL:
    """NeMo-RL: one call, whose result is False after any error."""

    def _get_named_parameters(self: Any) -> dict[str, torch.nn.Parameter]:
        params = getattr(self, "_nrl_named_parameters", None)
        if params is None:
            params = dict(self.model_runner.model.named_parameters())
            self._nrl_named_parameters = params
        return params

    @_traced
    def update_weights_from_collective(self: Any) -> bool:
        try:
            self._get_named_parameters()
            self.model_runner.model.load_weights(weights=list(_received()))
            _process(self)
        except Exception:
            return False
        return True

    @_traced
    def update_weights_via_ipc_zmq(self: Any) -> bool:
        done: bool = NemoRL.update_weights_from_collective(self)
        return done

    def nccl_reshard_refit(self: Any) -> bool:
        """Receive straight into the memory of parameters, past torch."""
        try:
            for name, tensor in _received():
                param = NemoRL._get_named_parameters(self)[name]
                memory = param.data.view(torch.uint8).reshape(-1).numpy()
                memory[:] = tensor.view(torch.uint8).reshape(-1).numpy()
        except Exception:
            return False
        return True

    def update_weights_from_decoded_sparse_payload(
        self: Any, *payloads: bytes | str
    ) -> dict[str, Any]:
        """Change few numbers of what is live."""
        NemoRL.nccl_reshard_refit(self)
        return {"num_payloads": len(payloads)}


class Roll:
    """ROLL: buckets, and a call that processes the weights at the end."""

    def broadcast_parameter(
        self: Any,
        names: Any,
        dtypes: Any,
        shapes: Any,
        group_name: str,
        is_lora: bool = False,
    ) -> None:
        if is_lora:
            return
        self.load_weights(weights=_received(len(names)))

    def update_parameter_in_bucket(
        self: Any, serialized_named_tensors: Any, is_lora: bool = False
    ) -> None:
        if is_lora:
            return
        self.load_weights(_received(serialized_named_tensors[self.rank]))

    def load_weights(self: Any, weights: Any) -> None:
        self.model_runner.model.load_weights(weights=list(weights))

    def process_weights_after_loading(self: Any) -> None:
        _process(self)


class PipelineRL:
    """PipelineRL: one call with a request, whose tensors come one by one."""

    def receive_weight_update(self: Any, request_json: str) -> None:
        for info in json.loads(request_json)["parameters_info"]:
            ((name, tensor),) = _received(1)
            assert name == info["name"]
            loaded = self.model_runner.model.load_weights(weights=[(name, tensor)])
            if len(loaded) != 1:
                raise ValueError(f"model {name} not found in model state dict")


def _process(worker: Any) -> None:
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    process_weights_after_loading(
        worker.model_runner.model, worker.model_config, worker.device
    )
