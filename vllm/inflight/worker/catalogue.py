"""The catalogue: the tensors that a trainer may send, by name, shape and dtype.

It lists the tensors of the start checkpoint. If that is not known (nothing was loaded,
or no safetensors), it lists the checkpoint names of the model's parameters, on each
rank its own.

It is packed once, before anything is decoded. A model with many experts has a hundred
thousand names, and making text of them takes a tenth of a second. It is packed in
pieces, so that a reader lets other threads run between two pieces.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from typing import Any

from vllm.inflight.tensor_names import Known
from vllm.inflight.worker.shadow.shadow_model import ShadowModel

PIECE = 1024
"""Names in one piece."""
CHECKPOINT, MODEL = "checkpoint", "model"
"""What the catalogue lists: a checkpoint, or the model."""

Entry = dict[str, Any]
"""`{"name", "shape", "dtype"}`; the shape is null where it is not known."""


def catalogue(shadow: ShadowModel, *, is_cut: bool) -> dict[str, Any]:
    """`{"of", "pieces"}`: what the catalogue lists, and the packed entries.

    Args:
        shadow: the shadow model of the rank.
        is_cut: whether a parameter may be a part of a tensor. Then the shapes of the
            parameters say nothing about the tensors, and are left out.

    """
    if len(shadow.start_checkpoint):
        return {"of": CHECKPOINT, "pieces": packed(shadow.start_checkpoint.known)}
    known = shadow.known_names
    if is_cut:
        known = {name: (None, dtype) for name, (_, dtype) in known.items()}
    return {"of": MODEL, "pieces": packed(known)}


def packed(known: Known) -> list[bytes]:
    """The names of `known`, compressed in pieces."""
    entries = [
        {"name": name, "shape": None if shape is None else list(shape), "dtype": dtype}
        for name, (shape, dtype) in known.items()
    ]
    pieces = (entries[at : at + PIECE] for at in range(0, len(entries), PIECE))
    return [zlib.compress(json.dumps(piece).encode(), 1) for piece in pieces]


def unpacked(catalogues: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """`{"of", "num_tensors", "tensors"}` from the catalogues of all ranks."""
    tensors: dict[str, Entry] = {}
    of = MODEL
    for each in catalogues:
        of = each["of"]
        for piece in each["pieces"]:
            for entry in json.loads(zlib.decompress(piece)):
                tensors.setdefault(entry["name"], entry)
    return {"of": of, "num_tensors": len(tensors), "tensors": list(tensors.values())}


def dumped(listing: dict[str, Any]) -> bytes:
    """The JSON of the result of `unpacked`, made in pieces."""
    tensors = listing["tensors"]
    starts = range(0, len(tensors), PIECE)
    pieces = (json.dumps(tensors[at : at + PIECE])[1:-1] for at in starts)
    facts = json.dumps({name: listing[name] for name in ("of", "num_tensors")})
    return f'{facts[:-1]}, "tensors": [{", ".join(pieces)}]}}'.encode()
