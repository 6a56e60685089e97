"""Worker extensions of users: what frameworks give through `worker_extension_cls`.

Each method behaves as one of a framework's own does: OpenRLHF loads tensor by tensor,
prime-rl and NeMo-RL copy into parameters, SkyRL and verl reload layer by layer, in one
call or in several. None of them tells the engine that it writes.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

CALLED: list[str] = []
FILE = "model.safetensors"


class Writing:
    """A worker extension that writes into live weights."""

    def tests_double(self, number: int) -> int:
        return 2 * number

    # ------------------------------------------------------- in load format
    def tests_load(self, folder: str, names: list[str] | None = None) -> None:
        """Hand tensors of a checkpoint to the live model, all in one call."""
        _model(self).load_weights(weights=iter(tensors_of(folder, names).items()))

    def tests_load_one(self, name: str, tensor: torch.Tensor) -> None:
        """Hand one over, as OpenRLHF's `update_weight` does."""
        _model(self).load_weights(weights=[(name, tensor)])

    def tests_load_and_fail(self, folder: str, count: int) -> None:
        """Break off after some tensors."""

        def some() -> Any:
            pairs = list(tensors_of(folder).items())
            yield from pairs[:count]
            raise RuntimeError("of the extension")

        _model(self).load_weights(weights=some())

    # ----------------------------------------------------- in kernel format
    def tests_copy(self, folder: str, way: str) -> None:
        """Copy into the parameters of a model whose weights are not packed."""
        for name, param in _model(self).named_parameters():
            new = kernel_format(folder, name).to(param)
            if way == "copy_":
                with torch.no_grad():
                    param.copy_(new)
            elif way == "data":
                param.data.copy_(new)
            elif way == "weight_loader":
                param[:].data.copy_(new)
            else:
                param.data = new.clone()

    # -------------------------------------------------------- layer by layer
    def tests_start_load(self) -> None:
        """Take all layers aside, as SkyRL's `skyrl_start_weight_update` does."""
        from vllm.model_executor.model_loader import reload

        reload.initialize_layerwise_reload(_model(self))

    def tests_finish_load(self) -> None:
        """Finish what has come, and put the rest back."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import reload

        with torch.device(self.device), set_current_vllm_config(self.vllm_config):
            reload.finalize_layerwise_reload(
                _model(self), self.model_runner.model_config
            )

    def tests_reload(self, folder: str) -> None:
        """All of that in one call."""
        Writing.tests_start_load(self)
        Writing.tests_load(self, folder)
        Writing.tests_finish_load(self)

    def tests_start_and_fail(self) -> None:
        """Break off before the first tensor, as a mistyped argument does."""
        self.tests_start_load()
        raise TypeError("of the extension")

    def tests_reload_and_fail(self, folder: str, count: int) -> None:
        """Break off after some layers are complete."""
        self.tests_start_load()
        self.tests_load_and_fail(folder, count)

    # --------------------------------------------------- upstream's own phases
    def tests_update(self, info: Any) -> None:
        """Take a step of an update on this rank alone, as verl's extension does."""
        self.update_weights(info)  # type: ignore[attr-defined]

    def tests_fill_second_set(self, folder: str) -> None:
        """Load into what a transport is given for a model."""
        engine: Any = self.weight_transfer_engine  # type: ignore[attr-defined]
        engine.model.load_weights(tensors_of(folder).items())


class Extension(Writing):
    """One that has some of PipelineRL's names for itself, too."""

    def init_actor_update_group(self, *args: Any) -> str:
        CALLED.append("init")
        return "the user's"

    def receive_weight_update(self, request: Any) -> str:
        CALLED.append("receive")
        return "the user's"

    def close_communicator(self) -> str:
        CALLED.append("close")
        return "the user's"


def _model(worker: Any) -> Any:
    return worker.model_runner.get_model()


def tensors_of(folder: str, names: list[str] | None = None) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint by name; all of them, or some."""
    found: dict[str, torch.Tensor] = load_file(Path(folder) / FILE)
    return found if names is None else {name: found[name] for name in names}


def kernel_format(folder: str, name: str) -> torch.Tensor:
    """What a parameter of the engine's Qwen3 holds, from a checkpoint's tensors."""
    found = tensors_of(folder)
    for fused, parts in {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }.items():
        if fused in name:
            return torch.cat([found[name.replace(fused, part)] for part in parts])
    whole = found[name]
    if "embed_tokens" in name or "lm_head" in name:  # padded for its kernel
        padded = torch.zeros(-(-whole.shape[0] // 64) * 64, whole.shape[1])
        padded[: whole.shape[0]] = whole
        return padded
    return whole
