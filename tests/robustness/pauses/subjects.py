"""What is served in a cell: checkpoints, options of engines, and their references."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.robustness.pauses import cells
from tests.robustness.pauses.live import Live, live
from tests.robustness.pauses.replay import Noise, Replay
from tests.support.engines.adapters import RANK, make_adapter
from tests.support.engines.far_trainer import FarTrainer
from tests.support.models.quantised import FILE, quantise
from tests.support.models.tiny_drafters import drafting, make_drafter

MAX_MODEL_LEN = 2048
NUM_AT_ONCE = 4
CHUNK = 64
"""Positions of a step: prompts longer than that come in chunks."""
OLD, NEW = "old", "new"

EXACT = {"cpu": Noise(2e-3, 3e-4), "cuda": Noise(0.06, 0.01)}
"""Of float32. Attention on a GPU rounds to TF32."""
STEEP = {"cpu": EXACT["cpu"], "cuda": Noise(0.5, 0.02)}
"""Of float32 in the drafted model. It does not normalise queries and keys, so its
attention is steep: rounding to TF32 there moves a token in a thousand by 0.1."""
ROUNDED = Noise(1.0, 0.12)
"""Of bfloat16, where queries and keys are normalised."""
INT8 = Noise(2.0, 0.12)
"""Of activations in int8, which are rounded to bfloat16 before. One token in a thousand
lies 1.07 below the best."""
FP8 = Noise(4.0, 0.3)
"""Of activations in fp8. The engine rounds to bfloat16 before it quantises, so that one
number in 32 lands on the next value of fp8, which is 6 % away. That moves half of the
tokens by 0.14, one of a hundred by 1.1, and one of a thousand by 2.6. Another version
moves half of the tokens by 14, and 97 % of them by more than this allows."""
LOG = {"delta_gib": 0.1, "stage_share": 1}
"""It has room for all elements of two versions."""
WIDTH = {"fp8-channel": 448.0, "int8": 127.0}


@dataclass(frozen=True, slots=True)
class Kind:
    """A model of the cells.

    Attributes:
        shape: of its checkpoints.
        dtype: of its engine, by device.
        options: of its engine.
        quantised: as `quantise` says it, by device.
        noise: between its engine and its reference, by device.

    """

    shape: dict[str, Any] = field(default_factory=dict)
    dtype: dict[str, str] = field(
        default_factory=lambda: {"cpu": "float32", "cuda": "float32"}
    )
    options: dict[str, Any] = field(default_factory=dict)
    quantised: dict[str, str] = field(default_factory=dict)
    noise: dict[str, Noise] = field(default_factory=lambda: EXACT)


KINDS = {
    cells.DENSE: Kind(),
    cells.ADAPTER: Kind(
        # Upstream's kernels for adapters take float32 on the CPU only.
        dtype={"cpu": "float32", "cuda": "bfloat16"},
        options={"enable_lora": True, "max_lora_rank": RANK, "max_loras": 4},
        noise={"cpu": EXACT["cpu"], "cuda": ROUNDED},
    ),
    cells.DRAFTED: Kind(shape={"family": "llama", "hidden": 256}, noise=STEEP),
    cells.EXPERTS: Kind(shape={"family": "mixtral_unrouted"}),
    cells.SHARED_OUT: Kind(
        shape={"family": "mixtral_unrouted"},
        options={
            "data_parallel_size": 2,
            "enable_expert_parallel": True,
            "max_num_seqs": NUM_AT_ONCE // 2,
        },
    ),
    cells.LOGGED: Kind(
        options={"additional_config": {"inflight": {"staging": "delta"} | LOG}},
    ),
    cells.QUANTISED: Kind(
        shape={"hidden": 256},
        dtype={"cpu": "bfloat16", "cuda": "bfloat16"},
        quantised={"cpu": "int8", "cuda": "fp8-channel"},
        noise={"cpu": INT8, "cuda": FP8},
    ),
}


@dataclass
class Subject:
    """An engine of one model, and all that its cells need."""

    live: Live
    folders: dict[str, Path]
    replay: Replay
    trainer: FarTrainer | None
    backend: str
    device: str
    lora: Any = None


def on(device: str) -> dict[str, Any]:
    """Options of every engine on that device."""
    common: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": NUM_AT_ONCE,
        "max_num_batched_tokens": CHUNK,
        "disable_log_stats": True,
        "additional_config": {"inflight": {"stage_share": 1}},
    }
    if device == "cpu":
        return common | {"block_size": 32, "enforce_eager": True}
    from tests.support.engines.script import OPTIONS

    shared = ("block_size", "gpu_memory_utilization", "kv_cache_memory_bytes")
    chosen = {name: OPTIONS[name] for name in (*shared, "compilation_config")}
    return common | chosen | {"enforce_eager": False}


def begin(
    stack: ExitStack,
    model: str,
    ranks: int,
    backend: str,
    device: str,
    checkpoint: Callable[..., Path],
    root: Path,
) -> Subject:
    """Start the engine of a model, and its trainer if the transport has one."""
    kind = KINDS[model]
    folders = {OLD: checkpoint(0, **kind.shape), NEW: checkpoint(1, **kind.shape)}
    form = kind.quantised.get(device)
    if form is not None:
        folders = {
            n: quantise(p, root / f"{n}-{form}", form) for n, p in folders.items()
        }
    options = on(device) | kind.options | {"dtype": kind.dtype[device]}
    options |= {"tensor_parallel_size": ranks}
    options["weight_transfer_config"] = {"backend": backend}
    extension = "tests.support.engines.transport.Extension"
    if form is not None and device == "cuda":
        extension = "tests.support.gpu.admitting_worker.Extension"
    if model == cells.LOGGED and device == "cpu":
        extension = "tests.support.engines.unpacked_ranks.Unpacked"
    options["worker_extension_cls"] = extension
    if model == cells.DRAFTED:
        drafter = make_drafter(root / "drafter", 5, folders[OLD], "eagle")
        options["speculative_config"] = drafting("eagle", drafter)
    lora = None
    if model == cells.ADAPTER:
        (root / "adapter").mkdir(exist_ok=True)
        lora = make_adapter(folders[OLD], root / "adapter")
    engine = stack.enter_context(live(str(folders[OLD]), device=device, **options))
    trainer = None
    if backend != "other":
        options = {"packed": True} if backend == "nccl" else {}
        num_workers = ranks * engine.num_engines
        far = FarTrainer(
            engine, backend, folders[NEW], gpu=-1, num_workers=num_workers, **options
        )
        trainer = stack.enter_context(far)
    models = {
        name: reference_of(folder, form, lora and Path(lora.lora_path))
        for name, folder in folders.items()
    }
    replay = Replay(models, kind.noise[device])
    return Subject(engine, folders, replay, trainer, backend, device, lora)


# -------------------------------------------------------------------- references
def reference_of(folder: Path, form: str | None, adapter: Path | None) -> Any:
    """A plain model of a checkpoint, in float32."""
    if form is not None:
        return _quantised(folder, form)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if adapter is not None:
        _merge(model, adapter)
    return model


def _merge(model: torch.nn.Module, adapter: Path) -> None:
    """Add an adapter's matrices to those of the model."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    matrices = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{stem}.lora_A.weight" in matrices:
                a, b = (matrices[f"{stem}.lora_{x}.weight"] for x in "AB")
                parameter += scale * (b @ a)
            elif f"{stem}.lora_embedding_A" in matrices:
                a, b = (matrices[f"{stem}.lora_embedding_{x}"] for x in "AB")
                parameter += scale * (b @ a).T


class QuantisedLinear(torch.nn.Module):
    """A product with quantised weights, and inputs that are quantised by position."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, form: str) -> None:
        super().__init__()
        self.weight, self.scale, self.form = weight.float(), scale.float(), form

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        width = WIDTH[self.form]
        steps = inputs.abs().amax(-1, keepdim=True).clamp(min=1e-12) / width
        numbers = inputs / steps
        if self.form == "int8":
            numbers = numbers.round()
        else:
            numbers = numbers.to(torch.float8_e4m3fn).float()
        return (numbers @ self.weight.T) * self.scale.T * steps


def _quantised(folder: Path, form: str) -> Any:
    """The model that a quantised checkpoint was made of, with its quantised layers."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_file(folder / FILE)
    for name, module in list(model.named_modules()):
        if not name.endswith("_proj"):
            continue
        parts = (tensors.pop(f"{name}.{key}") for key in ("weight", "weight_scale"))
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, QuantisedLinear(*parts, form))
        assert module is not None
    missing = model.load_state_dict(
        {name: tensor.float() for name, tensor in tensors.items()}, strict=False
    )
    assert not missing.unexpected_keys and not missing.missing_keys, missing
    return model
