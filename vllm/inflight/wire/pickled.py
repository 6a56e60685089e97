"""SGLang's pickled tensors, read by an unpickler that knows a dozen names.

A pickle names functions and calls them. This one finds only those that put tensors
together from bytes at hand; anything else ends it. Handles of memory of another process
are not among them: a rank, and not the server, would have to open them.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import OrderedDict
from typing import Any

import torch
from torch.storage import TypedStorage

from vllm.inflight.errors import Malformed

PROTOCOLS = tuple(bytes([0x80, version]) for version in range(2, 6))
METADATA = "FlattenedTensorMetadata"
MEMOS = ("PUT", "BINPUT", "LONG_BINPUT")
MOST_TIMES = 4
"""As many bytes may tensors have as their pickle, for some share their memory."""


def is_pickle(first: bytes, last: bytes, size: int) -> bool:
    """Whether bytes are a pickle, and no safetensors file.

    Args:
        first: the first 8 of them.
        last: the last one.
        size: how many there are.

    """
    if first[:2] not in PROTOCOLS or last != b".":
        return False
    # Such a file begins with the length of its header, which may look the same. To a
    # pickle's first bytes a length can belong only if they are followed by zeros.
    return int.from_bytes(first, "little") > size - 8


def tensors(data: bytes, where: str) -> Any:
    """The list of pairs, or the bucket, in a pickle; as spool.py wants them.

    Raises:
        Malformed: it names something else than tensors, or holds something else.

    """
    try:
        for opcode, place, _ in pickletools.genops(data):
            # The memo is a list in memory, as long as its last place.
            if opcode.name in MEMOS and int(place or 0) > len(data):
                raise Malformed(f"the pickle has no {place} things to remember")
        found = _Tensors(io.BytesIO(data)).load()
    except Malformed as error:
        raise Malformed(f"{where}: {error.message}") from None
    except Exception as error:
        raise Malformed(f"{where} cannot be read: {error}") from None
    most = MOST_TIMES * len(data)
    if isinstance(found, dict):
        parts = found.get("metadata")
        bucket = found.get("flattened_tensor")
        if (
            isinstance(parts, list)
            and all(type(part).__name__ == METADATA for part in parts)
            and isinstance(bucket, torch.Tensor)
            and bucket.nbytes <= most
        ):
            return {
                "flattened_tensor": bucket,
                "metadata": [vars(part) for part in parts],
            }
    if (
        isinstance(found, list | tuple)
        and all(map(_is_pair, found))
        and sum(tensor.nbytes for _, tensor in found) <= most
    ):
        return found
    raise Malformed(f"{where} holds no list of (name, tensor) and no bucket")


def _is_pair(item: Any) -> bool:
    return (
        isinstance(item, list | tuple)
        and len(item) == 2
        and isinstance(item[0], str)
        and isinstance(item[1], torch.Tensor)
    )


def _storage(data: bytes) -> Any:
    # What torch itself calls here would unpickle anything that lies inside, and would
    # take memory of the trainer's GPU here, which is a rank's or is not there.
    found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(found, TypedStorage):
        raise Malformed("the pickle has something else where a tensor's bytes belong")
    # As numpy's, of a fixed size: under a tensor that is larger torch would let it
    # grow, over whatever this process had in that memory before.
    whole = torch.empty(0, dtype=torch.uint8).set_(found._untyped_storage)
    fixed = torch.from_numpy(whole.numpy()).untyped_storage()
    return TypedStorage(wrap_storage=fixed, dtype=found.dtype, _internal=True)


ALLOWED: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("torch.storage", "_load_from_bytes"): _storage,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
}
"""All that a pickle may name, besides dtypes and SGLang's record of a part."""


class _Tensors(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # New objects, since a pickle may change whatever it is handed.
        if (found := ALLOWED.get((module, name))) is not None:
            return found if isinstance(found, type) else lambda *args: found(*args)
        if module.startswith("sglang.srt.") and name == METADATA:
            return type(METADATA, (), {})
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise Malformed(f"the pickle names {module}.{name}, which is not allowed")
