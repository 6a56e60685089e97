"""Reading back live weights on one rank: digests of parameters, and their first rows.

The CPU build takes the weights of a linear layer out of their parameter and packs them
for its GEMM. They are read back through that GEMM, by multiplying with the unit matrix.
So the result is the weight that decoding uses. Each element is a sum of one product
and many zeros. That is exact, except that zeros lose their sign, and numbers that are
not normal may become zeros. A weight that the build has twice is read from its
parameter, once both are found equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from vllm.inflight import ops, upstream
from vllm.inflight.errors import EngineFault
from vllm.inflight.ops.gpu_digest import GpuDigest
from vllm.inflight.tensor_names import checkpoint_names
from vllm.inflight.transport.rank_numbers import rank_in_engine
from vllm.inflight.update import DRAFT
from vllm.inflight.worker.model.kinds.cpu_packing import UNPACKED
from vllm.inflight.worker.model.kinds.drafter import sent_names, served_by
from vllm.inflight.worker.model.kinds.hidden_weights import PACKED
from vllm.inflight.worker.model.kinds.mla import is_derived
from vllm.inflight.worker.model.kinds.moe import expert_checkpoint_names as expert_names
from vllm.inflight.worker.model.kinds.moe import is_experts
from vllm.inflight.worker.model.kinds.quantized import is_quantised
from vllm.inflight.worker.model.layers import layers, parameters
from vllm.inflight.worker.verify.checks import REPEATED
from vllm.inflight.worker.worker_state import WorkerState

SLAB = 1024
"""Columns of a packed weight that are read at a time."""
MOST_NUMBERS = 1 << 22
"""Most numbers that a rank returns at once; as Python objects they are many times as
large."""
CHECKSUMS = "checksums tell whether two engines have the same"
"""The alternative that is named in a rejection."""

Pair = tuple[str, torch.Tensor]


def checksums(
    worker: upstream.WorkerBase, skipped: Sequence[str], is_target: bool = False
) -> dict[str, Any]:
    """The digest of every parameter of this rank, in its own shard and layout.

    A fused quantised layer has one number for the shapes of all its parts: that of the
    part that came last. No kernel reads it, and it is left out.

    Args:
        worker: of this rank.
        skipped: a parameter is left out if its name contains one of these.
        is_target: leave the drafter out, whose parameters are under `draft.`.

    """
    found: dict[str, ops.Digest] = {}
    with torch.no_grad():
        for name, tensor in served(served_by(worker)):
            if is_target and name.startswith(DRAFT):
                continue
            if any(part in name for part in skipped) or name.endswith(REPEATED):
                continue
            if tensor.is_cuda:
                digest = GpuDigest(tensor.device, {})
                digest.add([(name, tensor)])
                found[name] = digest.results()[0][1]
            else:
                found[name] = ops.digest([tensor])[0]
    # The digest covers the names, so that two parameters cannot be swapped unnoticed.
    whole = ops.manifest_digest((n, "", (), d) for n, d in found.items())
    parallel = worker.vllm_config.parallel_config
    rank = rank_in_engine(parallel)
    return {
        "checksums": {name: digest.hex() for name, digest in found.items()},
        "per_gpu_checksum": whole,
        "parallelism_info": {
            "tp_rank": rank % parallel.tensor_parallel_size,
            "tp_size": parallel.tensor_parallel_size,
            "dp_rank": parallel.data_parallel_index,
            "dp_size": parallel.data_parallel_size,
            "pp_rank": _stage(worker),
            "pp_size": parallel.pipeline_parallel_size,
            "rank": rank,
            "size": parallel.world_size,
        },
    }


def unused(worker: upstream.WorkerBase, names: Sequence[str]) -> dict[str, list[str]]:
    """The tensors that a whole update may contain, and that fill no parameter here.

    Args:
        worker: of this rank.
        names: the checkpoint's names.

    Returns:
        `unused`, and those of them that are `tied`: equal to a parameter.

    """
    ignored = WorkerState.of(worker).require_stager().shadow.ignored
    found = [n for n in names if n in ignored or ignored.has_left_out(n)]
    return {"unused": found, "tied": [n for n in found if ignored.is_tied(n)]}


def rows(
    worker: upstream.WorkerBase, name: str, num_rows: int
) -> dict[str, Any] | None:
    """This rank's part of the first rows of a tensor; None if it has no part of it.

    Args:
        worker: of this rank.
        name: the checkpoint's or the engine's; a drafter's name begins with `draft.`.
        num_rows: how many rows of the whole tensor are wanted.

    Returns:
        `refused`, the reason, if the rows cannot be read as in a checkpoint. Else
        `rows`, and `dim`: the dimension along which the parts of the ranks of a `stage`
        lie
            side
        by side: 0, 1, or None where every rank has the whole.

    """
    model = served_by(worker)
    fused = getattr(model, "packed_modules_mapping", {}) or {}
    layer: Any
    for path, layer in layers(model):
        if is_quantised(layer):
            # A quantised layer may have no parameter of that name left.
            shards = [path, *checkpoint_names(f"{path}.weight", fused)]
            if name.rpartition(".")[0] in (s.removesuffix(".weight") for s in shards):
                return {
                    "refused": f"{name!r} is of a quantised layer, which holds its "
                    f"weights as a kernel wants them; {CHECKSUMS}"
                }
        for key, param in layer._parameters.items():
            param_name = f"{path}.{key}" if path else key
            if name in sent_names(model, expert_names(layer, path, key) or []):
                return {
                    "refused": f"{name!r} is a part of {param_name!r}, in which the "
                    "experts of its layer are stacked as a kernel wants them; "
                    f"ask for that on one rank, or {CHECKSUMS}"
                }
            shards = sent_names(model, checkpoint_names(param_name, fused))
            if param is None or name not in (param_name, *shards):
                continue
            is_one = len(shards) > 1 and name in shards
            number = shards.index(name) if is_one else None
            whole = content(layer, key, param)
            dim = _dimension(layer, whole, worker)
            if _is_cut_apart(layer, key, dim, worker, is_one=is_one):
                return {
                    "refused": f"{name!r} is cut over the ranks in another way than "
                    f"into parts side by side, which is not undone here; {CHECKSUMS}"
                }
            if number is not None:
                sizes = list(layer.output_partition_sizes)
                start, size = sum(sizes[:number]), sizes[number]
            else:
                start, size = 0, None
            part = whole[start:] if size is None else whole[start : start + size]
            part = part[:num_rows]
            if part.numel() > MOST_NUMBERS:
                return {
                    "refused": f"{num_rows} rows of {name!r} are {part.numel()} "
                    f"numbers on one rank, and at most {MOST_NUMBERS} are read at "
                    "once; ask for fewer rows"
                }
            return {
                "rows": part.float().tolist(),
                "stage": _stage(worker),
                "dim": dim,
                "is_copy": _is_copy(layer, number, worker),
            }
    return None


def served(model: torch.nn.Module) -> Iterator[Pair]:
    """Every parameter under its name, once, as decoding uses it."""
    for name, layer, key, param in parameters(model):
        if not is_derived(layer, key):
            yield name, content(layer, key, param)


def content(layer: torch.nn.Module, key: str, param: torch.Tensor) -> torch.Tensor:
    """The content of `param`, wherever the build keeps it."""
    if key == "weight" and (unpacked := vars(layer).get(UNPACKED)) is not None:
        return unpacked.unsqueeze(1)
    multiply = vars(layer).get(PACKED)
    if key != "weight" or multiply is None:
        return param.data
    # A tied head exists twice: one form is looked up, the other is multiplied with.
    is_twice = param.numel() > 0
    width: Any = param.shape[1] if is_twice else _width(layer)
    # Before 0.31, what is left of a packed weight has the default dtype.
    dtype: Any = param.dtype if is_twice else _dtype(layer, param)
    columns = []
    for start in range(0, width, SLAB):
        unit = torch.zeros(min(SLAB, width - start), width, dtype=dtype)
        unit.diagonal(start).fill_(1)
        columns.append(multiply(unit, param, None).t())
    packed = torch.cat(columns, dim=1).contiguous()
    if not is_twice:
        return packed
    # Zero times Inf is NaN, so one such number hides all others of its row.
    is_plain, is_read = (t.isfinite().all(dim=1) for t in (param.data, packed))
    plain, read = param.data[is_read], packed[is_read]
    is_lost = (read == 0) & (plain.abs() < torch.finfo(plain.dtype).tiny)
    same = bool(((read == plain) | is_lost).all())
    if not (same and torch.equal(is_plain, is_read)):
        raise EngineFault("a weight and its packed form belong to two versions")
    return param.data  # equal, and with what the packed form has lost


def has_lost(layer: torch.nn.Module, key: str, read: torch.Tensor) -> bool:
    """Whether `content` may have lost the sign of a zero, or a number next to zero."""
    is_packed = key == "weight" and PACKED in vars(layer)
    param = layer._parameters.get(key)
    is_twice = param is not None and param.numel() > 0
    return is_packed and not is_twice and not bool(read.all())


def _dtype(layer: torch.nn.Module, param: torch.Tensor) -> Any:
    """The dtype of a linear layer's weight; a layer of a user's own may not tell."""
    return getattr(layer, "params_dtype", param.dtype)


def _width(layer: torch.nn.Module) -> Any:
    """Inputs of a linear layer on this rank, whose plain weight is gone."""
    return getattr(layer, "input_size_per_partition", None) or layer.input_size


def _stage(worker: upstream.WorkerBase) -> int:
    parallel = worker.vllm_config.parallel_config
    stage = rank_in_engine(parallel) // parallel.tensor_parallel_size
    return stage % int(parallel.pipeline_parallel_size)


def _dimension(
    layer: object, whole: torch.Tensor, worker: upstream.WorkerBase
) -> int | None:
    # The tensor that decoding uses counts: the parameter of a packed one is empty.
    if worker.vllm_config.parallel_config.tensor_parallel_size == 1:
        return None
    if "Row" in type(layer).__name__ and whole.dim() < 2:
        return None  # every rank has the whole bias of a row-parallel layer
    for dim, attribute in (
        (0, "output_size_per_partition"),
        (0, "num_embeddings_per_partition"),
        (1, "input_size_per_partition"),
    ):
        full = attribute.replace("_per_partition", "")
        part = getattr(layer, attribute, None)  # None for a layer that every rank has
        if part is not None and part != getattr(layer, full, part):
            return dim
    return None


def _is_cut_apart(
    layer: Any, key: str, dim: int | None, worker: upstream.WorkerBase, *, is_one: bool
) -> bool:
    """Whether ranks may have other parts of a parameter than `dim` says.

    Experts, and layers with a state, are cut by their own loaders. In a parameter of
    several tensors, each tensor is cut on its own.

    Args:
        is_one: whether one of these tensors is asked for.

    """
    if worker.vllm_config.parallel_config.tensor_parallel_size == 1:
        return False
    if is_experts(getattr(layer, "quant_method", None)) or UNPACKED in vars(layer):
        return True
    # A packed parameter has lost its loader; upstream keeps a note of it.
    noted = upstream.get_layerwise_info(layer).restore_metadata[0]
    param = noted.get(key, layer._parameters[key])
    loader = getattr(param, "weight_loader", upstream.default_weight_loader)
    own = getattr(type(layer), getattr(loader, "__name__", ""), None)
    if loader is not upstream.default_weight_loader and not (
        any(hasattr(layer, size) for size in ("input_size", "num_embeddings"))
        and own is getattr(loader, "__func__", loader)
    ):
        return True
    is_joint = dim == 0 and len(getattr(layer, "output_partition_sizes", ())) > 1
    return is_joint and not is_one


def _is_copy(layer: object, number: int | None, worker: upstream.WorkerBase) -> bool:
    """Whether the rank before has the same part: a KV head that several ranks have."""
    replicas = getattr(layer, "num_kv_head_replicas", 1)
    if number not in (1, 2) or replicas == 1:
        return False
    parallel = worker.vllm_config.parallel_config
    tp_rank = rank_in_engine(parallel) % parallel.tensor_parallel_size
    return bool(tp_rank % replicas)
