"""A worker extension that writes into parameters by itself, in many ways.

`TENSORS` has what it writes: kernel format by the name of the parameter, checkpoint
format by the name of the tensor.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import torch
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from vllm.inflight.frameworks.known_call import KnownCall, Role

Tensors = dict[str, torch.Tensor]

TENSORS: dict[str, Tensors] = {}
"""`kernel` and `checkpoint`: the tensors of both formats."""

NORM, HEAD = "model.norm.weight", "lm_head.weight"
OTHER = "model.layers.0.input_layernorm.weight"
"""A parameter of the same form as `NORM`."""
READS_OTHER = f"reads {OTHER}"
ATTENTION_OUT = "model.layers.0.self_attn.o_proj.weight"
GATE_UP = "model.layers.0.mlp.gate_up_proj.weight"


class Direct:
    """One call that writes a version, in a way that a test names."""

    def tests_write(self: Any, way: str, catches: bool = False) -> str:
        try:
            with torch.no_grad():
                WAYS[way](self.model_runner.model, **TENSORS)
        except Exception:
            if not catches:
                raise
        return way

    def tests_write_part(self: Any, names: list[str], is_last: bool) -> None:
        params = dict(self.model_runner.model.named_parameters())
        for name in names:
            params[name].data.copy_(TENSORS["kernel"][name])


def _pairs(
    model: torch.nn.Module, kernel: Tensors
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    params = dict(model.named_parameters())
    for name, tensor in kernel.items():
        yield params[name], tensor


def copies(model: Any, kernel: Tensors, checkpoint: Tensors) -> None:
    for param, tensor in _pairs(model, kernel):
        param.copy_(tensor)


def copies_of_data(model: Any, kernel: Tensors, checkpoint: Tensors) -> None:
    for name, tensor in kernel.items():  # looked up anew for each of them
        dict(model.named_parameters())[name].data.copy_(tensor, non_blocking=True)


def assignments(model: Any, kernel: Tensors, checkpoint: Tensors) -> None:
    for param, tensor in _pairs(model, kernel):
        param.data[...] = tensor


def halves(model: Any, kernel: Tensors, checkpoint: Tensors) -> None:
    for param, tensor in _pairs(model, kernel):
        half = param.shape[0] // 2
        param.data[:half] = tensor[:half]
        param.data.narrow(0, half, param.shape[0] - half).copy_(tensor[half:])


def columns(model: Any, kernel: Tensors, checkpoint: Tensors) -> None:
    for param, tensor in _pairs(model, kernel):
        half = param.shape[-1] // 2
        param.data[..., :half] = tensor[..., :half]
        param.data[..., half:] = tensor[..., half:]


def in_passing(model: Any, kernel: Tensors, checkpoint: Tensors) -> None:
    for name, param in model.named_parameters():
        param.data.copy_(kernel[name])


def on_another_stream(model: Any, kernel: Tensors, checkpoint: Tensors) -> None:
    if not kernel[NORM].is_cuda:
        return copies(model, kernel, checkpoint)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for param, tensor in _pairs(model, kernel):
            torch.cuda._sleep(1_000_000)  # whoever does not wait reads what was before
            param.data.copy_(tensor * 1)


def wider(model: Any, kernel: Tensors, checkpoint: Tensors) -> None:
    for param, tensor in _pairs(model, kernel):
        param.copy_(tensor.float())


def reused_buffer(model: Any, kernel: Tensors, checkpoint: Tensors) -> None:
    """As a transport does that receives each tensor in the same memory."""
    most = max(tensor.numel() for tensor in kernel.values())
    buffer = torch.empty(most, dtype=torch.bfloat16, device=kernel[NORM].device)
    for param, tensor in _pairs(model, kernel):
        came = buffer[: tensor.numel()].view(tensor.shape)
        came.copy_(tensor)
        param.data.copy_(came)
    buffer.fill_(7)


def foreach(model: Any, kernel: Tensors, checkpoint: Tensors) -> None:
    pairs = list(_pairs(model, kernel))
    torch._foreach_copy_([p.data for p, _ in pairs], [t for _, t in pairs])


def state(model: Any, kernel: Tensors, checkpoint: Tensors) -> None:
    with warnings.catch_warnings():  # layers of the CPU build have no memory meanwhile
        warnings.simplefilter("ignore")
        model.load_state_dict(kernel, strict=False)


def own_loaders(model: Any, kernel: Tensors, checkpoint: Tensors) -> None:
    """Each parameter's own loader, shard by shard."""
    params = dict(model.named_parameters())
    for name, tensor in checkpoint.items():
        for part, whole, shard in STACKED:
            if part in name:
                param = params[name.replace(part, whole)]
                param.weight_loader(param, tensor, shard)
                break
        else:
            param = params[name]
            load = getattr(param, "weight_loader", default_weight_loader)
            load(param, tensor)


def inner_model(model: Any, kernel: Tensors, checkpoint: Tensors) -> None:
    inner = [(name.removeprefix("model."), t) for name, t in checkpoint.items()]
    model.model.load_weights([pair for pair in inner if pair[0] != HEAD])
    model.lm_head.weight.weight_loader(model.lm_head.weight, checkpoint[HEAD])


def one_beside_load_weights(model: Any, kernel: Tensors, checkpoint: Tensors) -> None:
    model.load_weights([pair for pair in checkpoint.items() if pair[0] != NORM])
    model.model.norm.weight.data.copy_(kernel[NORM])


def one_before_load_weights(model: Any, kernel: Tensors, checkpoint: Tensors) -> None:
    model.model.norm.weight.data.copy_(kernel[NORM])
    model.load_weights([pair for pair in checkpoint.items() if pair[0] != NORM])


def reads_before_scales(model: Any, kernel: Tensors, checkpoint: Tensors) -> None:
    """A quantised layer has all of its weights, and is processed with its scales."""
    params = dict(model.named_parameters())
    scales = {n: t for n, t in checkpoint.items() if n.endswith("_scale")}
    model.load_weights(list(_all_but(checkpoint, *scales).items()))
    params[ATTENTION_OUT].clone()
    model.load_weights(list(scales.items()))


STACKED = [
    ("q_proj", "qkv_proj", "q"),
    ("k_proj", "qkv_proj", "k"),
    ("v_proj", "qkv_proj", "v"),
    ("gate_proj", "gate_up_proj", 0),
    ("up_proj", "gate_up_proj", 1),
]

WHOLE: dict[str, Callable[..., None]] = {
    "copies": copies,
    "copies of data": copies_of_data,
    "assignments": assignments,
    "halves": halves,
    "columns": columns,
    "in passing": in_passing,
    "on another stream": on_another_stream,
    "wider": wider,
    "a reused buffer": reused_buffer,
    "foreach": foreach,
    "state": state,
    "own loaders": own_loaders,
    "inner model": inner_model,
    "one beside load_weights": one_beside_load_weights,
    "one before load_weights": one_before_load_weights,
}
"""Ways that write each element of each parameter once."""


def _all_but(kernel: Tensors, *names: str) -> Tensors:
    return {name: t for name, t in kernel.items() if name not in names}


def _then(
    act: Callable[[Any, torch.nn.Parameter, torch.Tensor], object],
    name: str = NORM,
) -> Callable[..., None]:
    """Write all but one parameter, and do something else with that one."""

    def write(model: Any, kernel: Tensors, checkpoint: Tensors) -> None:
        params = dict(model.named_parameters())
        copies(model, _all_but(kernel, name), checkpoint)
        act(model, params[name], kernel[name])

    return write


def _after(act: Callable[[Any, torch.nn.Parameter, torch.Tensor], object]) -> Any:
    """Write all parameters, and do something else with one of them."""

    def write(model: Any, kernel: Tensors, checkpoint: Tensors) -> None:
        params = dict(model.named_parameters())
        copies(model, kernel, checkpoint)
        act(model, params[NORM], kernel[NORM])

    return write


def _from_another(before: list[slice], after: list[slice]) -> Callable[..., None]:
    """Write one parameter from another, of which some parts are written before."""

    def write(model: Any, kernel: Tensors, checkpoint: Tensors) -> None:
        params = dict(model.named_parameters())
        for part in before:
            params[OTHER].data[part].copy_(kernel[OTHER][part])
        params[NORM].copy_(params[OTHER])
        for part in after:
            params[OTHER].data[part].copy_(kernel[OTHER][part])
        copies(model, _all_but(kernel, NORM, OTHER), checkpoint)

    return write


def _from_a_kept_one(model: Any, kernel: Tensors, checkpoint: Tensors) -> None:
    """Compute from a parameter that was looked up before the load of layers began."""
    kept = dict(model.named_parameters())[OTHER]
    model.load_weights([(HEAD, checkpoint[HEAD])])
    model.load_weights([(NORM, kept * 1)])
    model.load_weights(list(_all_but(checkpoint, HEAD, NORM).items()))


def _past_torch(model: Any, param: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    if param.is_cuda:  # nothing but a kernel of one's own could
        return _in_older_thread(model, param, tensor)
    to = param.data.view(torch.uint8)
    to.numpy()[:] = tensor.view(torch.uint8).numpy()


def _in_thread(model: Any, param: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    def write() -> None:
        # The method hears nothing of an error.
        with torch.no_grad(), suppress(Exception):
            param.data.copy_(tensor)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()


TASKS = SimpleQueue[tuple[Callable[[], object], threading.Event]]()


def _work() -> None:
    while True:
        act, is_done = TASKS.get()
        act()
        is_done.set()


# It is older than every call, so no guard is in it.
threading.Thread(target=_work, daemon=True).start()


def _in_older_thread(
    model: Any, param: torch.nn.Parameter, tensor: torch.Tensor
) -> None:
    is_done = threading.Event()
    TASKS.put((lambda: param.data.copy_(tensor), is_done))
    assert is_done.wait(30)


def _loads_half(model: Any, param: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    gate, _ = [
        n for n in TENSORS["checkpoint"] if "layers.0.mlp" in n and "down" not in n
    ]
    model.load_weights([(gate, TENSORS["checkpoint"][gate])])
    half = param.shape[0] // 2
    param.data[half:] = tensor[half:]


def _load_norm(model: Any, param: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    model.load_weights([(NORM, tensor)])


def _overlapping(model: Any, param: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    param.data[:96] = tensor[:96]
    param.data[32:] = tensor[32:]


def _as_bytes(model: Any, param: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    param.data.view(torch.uint8).copy_(tensor.view(torch.uint8))


def _with_nan(model: Any, param: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    tensor = tensor.clone()
    tensor[5] = float("nan")
    param.copy_(tensor)


HOSTILE: dict[str, tuple[Callable[..., None], str]] = {
    "nothing of one": (_then(lambda m, p, t: None), NORM),
    "half of one": (_then(lambda m, p, t: p.data[:64].copy_(t[:64])), NORM),
    "every other number": (_then(lambda m, p, t: p.data[::2].copy_(t[::2])), NORM),
    "past torch": (_then(_past_torch), NORM),
    "in a thread": (_then(_in_thread), NORM),
    "in an older thread": (_then(_in_older_thread), NORM),
    "its own content": (_then(lambda m, p, t: p.copy_(p * 2)), NORM),
    "its own content, and a delta": (_then(lambda m, p, t: p.copy_(p + t)), NORM),
    "another's old content": (_from_another([], [slice(None)]), READS_OTHER),
    "another's half": (
        _from_another([slice(0, 64)], [slice(64, None)]),
        READS_OTHER,
    ),
    "another's part, written twice": (
        _from_another([slice(0, 96), slice(32, 96)], [slice(96, None)]),
        READS_OTHER,
    ),
    "a kept one's old content": (_from_a_kept_one, READS_OTHER),
    "a delta in place": (_then(lambda m, p, t: p.data.add_(t)), NORM),
    "out": (_then(lambda m, p, t: torch.mul(t, 1, out=p.data)), NORM),
    "an index": (
        _then(
            lambda m, p, t: p.data.__setitem__(torch.arange(128, device=p.device), t)
        ),
        NORM,
    ),
    "a mask": (
        _then(lambda m, p, t: p.data.masked_scatter_(torch.ones_like(t).bool(), t)),
        NORM,
    ),
    "other data": (_then(lambda m, p, t: setattr(p, "data", t.clone())), NORM),
    "another parameter": (
        _then(
            lambda m, p, t: setattr(
                m.model.norm, "weight", torch.nn.Parameter(t.clone(), False)
            )
        ),
        NORM,
    ),
    "as bytes": (_then(_as_bytes), NORM),
    "one number for all": (_then(lambda m, p, t: p.copy_(t[:1])), NORM),
    "whole numbers": (_then(lambda m, p, t: p.copy_(t.int())), NORM),
    "not finite": (_then(_with_nan), NORM),
    "overlapping parts": (_then(_overlapping), NORM),
    "twice": (_after(lambda m, p, t: p.copy_(t)), NORM),
    "a part again": (_after(lambda m, p, t: p.data[3:4].fill_(7)), NORM),
    "again by load_weights": (_after(_load_norm), NORM),
    "half by load_weights": (_then(_loads_half, name=GATE_UP), GATE_UP),
}
"""Ways that must change nothing, and the parameter that the error names."""


def _fails_after(
    act: Callable[[Any, torch.nn.Parameter, torch.Tensor], object], *, first: Any = None
) -> Callable[..., None]:
    """Write one parameter past the door, and fail."""

    def write(model: Any, kernel: Tensors, checkpoint: Tensors) -> None:
        params = dict(model.named_parameters())
        if first is not None:
            params[first].copy_(kernel[first])
        act(model, params[NORM], kernel[NORM])
        raise RuntimeError("the connection is broken")

    return write


FAILING: dict[str, Callable[..., None]] = {
    "past torch": _fails_after(_past_torch),
    "in an older thread": _fails_after(_in_older_thread),
    "past torch, beside a copy": _fails_after(_past_torch, first=GATE_UP),
    "in an older thread, beside a copy": _fails_after(_in_older_thread, first=GATE_UP),
}
"""Ways that write what nobody sees, and raise an error."""

WAYS: dict[str, Callable[..., None]] = (
    WHOLE
    | {way: act for way, (act, _) in HOSTILE.items()}
    | {f"fails: {way}": act for way, act in FAILING.items()}
    | {"another's new content": _from_another([slice(None)], [])}
    | {"reads before scales": reads_before_scales}
)

ROWS = [
    KnownCall(
        framework="direct",
        method="tests_write",
        parameters=("way", "catches"),
        role=Role.VERSION,
        label=lambda arguments: str(arguments["way"]),
    ),
    KnownCall(
        framework="direct parts",
        method="tests_write_part",
        parameters=("names", "is_last"),
        role=Role.PART,
        is_last=lambda arguments: bool(arguments.get("is_last")),
        may_lack=True,
    ),
]
