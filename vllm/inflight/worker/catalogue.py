"""The catalogue: what a trainer may send, by name, shape and dtype.

It is that of the checkpoint the engine started from. Where nothing is known of that
(nothing was loaded, or it was no safetensors), it is what the model's parameters are
called in a checkpoint, each rank's own.

It is packed once, before anything is decoded: a model with many experts has a hundred
thousand names, and to make text of them takes a tenth of a second. It is packed in
pieces, so that whoever reads it lets other threads go on between them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from typing import Any

from vllm.inflight.tensor_names import Known
from vllm.inflight.worker.shadow.shadow_model import ShadowModel

PIECE = 1024
"""Names in a piece."""
CHECKPOINT, MODEL = "checkpoint", "model"
"""What the names are of."""

Entry = dict[str, Any]
"""`{"name", "shape", "dtype"}`; a shape is null where it is not known."""


def catalogue(shadow: ShadowModel, *, is_cut: bool) -> dict[str, Any]:
    """`{"of", "pieces"}`: what the names are of, and they, packed.

    Args:
        shadow: of the rank; it can be updated.
        is_cut: whether a parameter may be a part of a tensor: then shapes of the
            model's parameters tell nothing of a checkpoint's.

    """
    if len(shadow.origin):
        return {"of": CHECKPOINT, "pieces": packed(shadow.origin.known)}
    known = shadow.known_names
    if is_cut:
        known = {name: (None, dtype) for name, (_, dtype) in known.items()}
    return {"of": MODEL, "pieces": packed(known)}


def packed(known: Known) -> list[bytes]:
    """The names of `known`, in pieces."""
    entries = [
        {"name": name, "shape": None if shape is None else list(shape), "dtype": dtype}
        for name, (shape, dtype) in known.items()
    ]
    pieces = (entries[at : at + PIECE] for at in range(0, len(entries), PIECE))
    return [zlib.compress(json.dumps(piece).encode(), 1) for piece in pieces]


def unpacked(catalogues: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """`{"of", "num_tensors", "tensors"}` of the catalogues of all ranks."""
    tensors: dict[str, Entry] = {}
    of = MODEL
    for each in catalogues:
        of = each["of"]
        for piece in each["pieces"]:
            for entry in json.loads(zlib.decompress(piece)):
                tensors.setdefault(entry["name"], entry)
    return {"of": of, "num_tensors": len(tensors), "tensors": list(tensors.values())}


def dumped(told: dict[str, Any]) -> bytes:
    """The JSON of what `unpacked` tells, made in pieces."""
    tensors = told["tensors"]
    starts = range(0, len(tensors), PIECE)
    pieces = (json.dumps(tensors[at : at + PIECE])[1:-1] for at in starts)
    facts = json.dumps({name: told[name] for name in ("of", "num_tensors")})
    return f'{facts[:-1]}, "tensors": [{", ".join(pieces)}]}}'.encode()
