"""Names of tensors: which a model knows, and which was meant by an unknown one.

Pure functions over plain data. A checkpoint says `q_proj`, the engine fuses it
into `qkv_proj`; `checkpoint_names` undoes that.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence


def checkpoint_names(param: str, fused: Mapping[str, Sequence[str]]) -> list[str]:
    """The checkpoint tensors that fill `param`.

    Args:
        param: a parameter's name in the engine, like `…self_attn.qkv_proj.weight`.
        fused: the model's `packed_modules_mapping`, like
            `{"qkv_proj": ["q_proj", "k_proj", "v_proj"]}`.

    """
    parts = param.split(".")
    for position, part in enumerate(parts):
        if part in fused:
            head, tail = parts[:position], parts[position + 1 :]
            return [".".join([*head, shard, *tail]) for shard in fused[part]]
    return [param]


def matcher(patterns: Collection[str]) -> Callable[[str], bool]:
    """Whether a name matches one of `patterns`, as in a shell: `*`, `?`, `[…]`."""
    plain = {pattern for pattern in patterns if not set(pattern) & set("*?[")}
    others = [fnmatch.translate(p) for p in patterns if p not in plain]
    one_of = re.compile("|".join(others) or r"(?!)")
    return lambda name: name in plain or one_of.match(name) is not None


def shared_suffix(a: str, b: str) -> int:
    """How many dotted parts two names have in common, counted from the end."""
    count = 0
    for x, y in zip(reversed(a.split(".")), reversed(b.split(".")), strict=False):
        if x != y:
            break
        count += 1
    return count


def nearest(
    name: str,
    shape: Sequence[int] | None,
    dtype: str | None,
    known: Mapping[str, tuple[Sequence[int] | None, str | None]],
    *,
    most: int = 3,
) -> list[str]:
    """The `most` known names closest to `name`, the closest first.

    Longest common suffix of dotted parts counts first, then an equal shape,
    then an equal dtype, then the order in which the model knows them.
    """

    def closeness(candidate: str) -> tuple[int, bool, bool]:
        other_shape, other_dtype = known[candidate]
        return (
            shared_suffix(name, candidate),
            shape is not None
            and other_shape is not None
            and list(shape) == list(other_shape),
            dtype is not None and dtype == other_dtype,
        )

    ranked = sorted(known, key=closeness, reverse=True)
    return [n for n in ranked if any(closeness(n))][:most]


def describe_unknown(
    names: Iterable[tuple[str, Sequence[int] | None, str | None]],
    known: Mapping[str, tuple[Sequence[int] | None, str | None]],
) -> str:
    """One sentence per unknown name, each with the nearest names of the model."""
    lines = []
    for name, shape, dtype in names:
        near = nearest(name, shape, dtype, known)
        hint = f" (nearest: {', '.join(near)})" if near else ""
        lines.append(f"{name}{hint}")
    return "; ".join(lines)
