"""Everything of ours that reads what a stranger may have written.

A parser is a seed or some, a way to feed it, and the errors by which it refuses.
Anything else that it raises is a bug.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import random
import struct
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from safetensors.torch import save
from starlette.datastructures import Headers
from torch.multiprocessing import reductions

from tests.robustness.fuzz import mutation
from tests.support.deltas import parts_of, random_bits, scattered, with_changes
from tests.support.transports.host_memory import HostMemory
from tests.support.transports.torch_exporter import Exporter
from vllm.inflight import delta
from vllm.inflight.api.request import auth, body
from vllm.inflight.config import InflightConfig
from vllm.inflight.delta.part import HEADER, ROW
from vllm.inflight.engine.compat import pipelinerl
from vllm.inflight.errors import InflightError, Malformed
from vllm.inflight.transport.base import StagedEngine
from vllm.inflight.transport.collective import receiver_engine as broadcast
from vllm.inflight.transport.collective import rendezvous as meeting
from vllm.inflight.transport.cuda_ipc import receiver_engine as ipc
from vllm.inflight.transport.files import receiver_engine as files
from vllm.inflight.transport.files import safetensors_files
from vllm.inflight.transport.sglang import checkpoint_engine, safe_unpickler
from vllm.inflight.transport.sglang.request_tensors import spooled
from vllm.inflight.transport.torch_groups import receiver_engine as torch_groups
from vllm.inflight.transport.torch_groups import rendezvous
from vllm.inflight.update import Manifest, check_label

CORPUS = Path(__file__).parent / "corpus"
"""A file for each parser: inputs that once were, or could be, a bug; in JSON, bytes
as base64."""

THREE = {
    "names": ["model.norm.weight", "b", "c"],
    "dtype_names": ["bfloat16", "float32", "uint8"],
    "shapes": [[4], [2, 3], []],
}
SLICED = {
    "names": ["a", "a", "b"],
    "dtype_names": ["bfloat16", "bfloat16", "uint8"],
    "shapes": [[4, 2], [4, 3], [3]],
    "shards": [
        {"dim": 1, "start": 3, "size": 5, "rank": 1},
        {"dim": 1, "start": 0, "size": 5, "rank": 0},
        {"dim": 0, "start": 0, "size": 3},
    ],
}
ENTRY = {"name": "w", "shape": [2, 3], "dtype": "bfloat16", "digest": "0" * 32}
MANIFEST = {
    "format": 1,
    "tensors": [ENTRY, {"name": "v", "shape": [], "dtype": "torch.float32"}],
    "step": 7,
    "name_map": {"a": "w"},
    "config": {"hidden_size": 64},
    "subset": ["model.*", "lm_head.weight"],
    "draft": False,
}
EXPORTS = {
    "host": "h",
    "process": "p-1",
    "handles": [base64.b64encode(bytes(64)).decode()],
    "places": [[0, 0], [0, 8], [0, 32]],
    "bases": [4096],
    "held": base64.b64encode(bytes(128)).decode(),
    "gpus": ["GPU-1"],
}
TENSORS = {"a": torch.zeros(4), "b": torch.ones(2, 3, dtype=torch.bfloat16)}


@dataclass(frozen=True)
class Parser:
    """One of them."""

    seeds: list[Any]
    feed: Callable[[Any], Any]
    refusals: tuple[type[Exception], ...] = (InflightError,)

    def inputs(self, name: str, count: int, seed: int) -> Iterator[Any]:
        """Its corpus and its seeds, then `count` variations of them."""
        known = [*self.seeds, *corpus(name)]
        yield from known
        rng = random.Random(f"{name} {seed}")
        for _ in range(count):
            chosen = rng.choice(known)
            vary = mutation.octets if isinstance(chosen, bytes) else mutation.value
            yield vary(rng, chosen)

    def accepts(self, given: Any) -> bool:
        """Whether it does; raises what is neither an answer nor a refusal."""
        try:
            self.feed(given)
        except self.refusals:
            return False
        return True


def corpus(name: str) -> list[Any]:
    """What is kept for the parser of that name."""
    file = CORPUS / f"{name}.json"
    if not file.exists():
        return []
    kept = json.loads(file.read_text())
    return [
        base64.b64decode(item["base64"])
        if isinstance(item, dict) and item.keys() == {"base64"}
        else item
        for item in kept
    ]


def info(engine: type[StagedEngine], which: str) -> Callable[[Any], Any]:
    """How a rank parses an `init_info` or `update_info`; see staging/thread.py."""
    stub = SimpleNamespace(
        init_info_cls=engine.init_info_cls, update_info_cls=engine.update_info_cls
    )
    return lambda given: getattr(engine, f"parse_{which}_info")(stub, given)


def joined(given: Any) -> None:
    rendezvous._address(info(torch_groups.GroupsEngine, "init")(given).init_method)


def announced(given: Any) -> None:
    label, told = pipelinerl.announced(pipelinerl.plain(given), "an id")
    check_label(label)
    with suppress(ValueError):  # a rank's refusal
        torch_groups.GroupUpdateInfo(**told)


def spool(load_format: str | None) -> Callable[[bytes], Any]:
    def feed(data: bytes) -> None:
        entry = base64.b64encode(data).decode()
        with spooled([entry], load_format, allow_pickle=True) as tensors:
            for info in tensors.infos:
                if "shm" in info:
                    for _ in files.read_files([files.SHARED_MEMORY / info["shm"]]):
                        pass
                else:
                    ipc.IpcUpdateInfo(**info)

    return feed


def read_file(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=files.SHARED_MEMORY) as file:
        Path(file.name).write_bytes(data)
        for _ in files.read_files([Path(file.name)]):
            pass


def open_file(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=files.SHARED_MEMORY) as file:
        Path(file.name).write_bytes(data)
        with safetensors_files.TensorFiles([Path(file.name)]):
            pass


def read_index(data: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=files.SHARED_MEMORY) as folder:
        (Path(folder) / files.INDEX).write_bytes(data)
        (Path(folder) / "m.safetensors").touch()
        files.checkpoint_files(Path(folder), folder)


def shown(given: Any) -> None:
    """A key, as a caller shows it."""
    raw = [(b"authorization", given)]
    request = SimpleNamespace(
        headers=Headers(raw=raw),
        client=None,
        app=SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(api_key=["k"]))),
    )
    auth.authorize(request)


def messages() -> list[bytes]:
    """What a checkpoint-engine sends."""
    buffer = reductions.rebuild_cuda_tensor, tuple(EXPORTER.arguments(torch.ones(8)))
    entry = {"name": "a", "shape": torch.Size((2,)), "dtype": torch.int8, "offset": 0}
    return [*map(pickle.dumps, (buffer, [entry], None, RuntimeError("it failed")))]


EXPORTER = Exporter(HostMemory())


def pickles() -> list[bytes]:
    pairs = [("a", torch.zeros(2)), ("b", torch.ones(2, 2))]
    files = [io.BytesIO(), io.BytesIO()]
    for file, protocol in zip(files, (2, 4), strict=True):
        pickle.dump(pairs, file, protocol=protocol)
    exported = [(name, EXPORTER.call(tensor)) for name, tensor in pairs]
    bucket = {"flattened_tensor": EXPORTER.call(torch.ones(8)), "metadata": []}
    return [
        *(file.getvalue() for file in files),
        *map(pickle.dumps, (OrderedDict(pairs), exported, bucket)),
    ]


PARTS = [
    {"name": "a", "shape": [2], "dtype": "float32", "start_idx": 0, "end_idx": 8},
    {"name": "b", "shape": [2, 2], "dtype": "torch.bfloat16", "start_idx": 8}
    | {"end_idx": 16, "numel": 4},
]


def bucket(parts: Any) -> bytes:
    flat = {"flattened_tensor": torch.zeros(16, dtype=torch.uint8)}
    return save(flat, {"metadata": json.dumps(parts)})


DELTA_SIZES, DELTA_WIDTHS = [3000, 900, 2000, 40], [2, 4, 1, 8]


def delta_part(compress: int | None = None) -> delta.Part:
    """A part of a delta: gaps, runs, a bitmap and a whole block."""
    pairs = []
    dtypes = torch.bfloat16, torch.float32, torch.int8, torch.int64
    changes = (
        *(scattered(3000, 0.03), torch.cat([torch.arange(40), torch.arange(40) + 800])),
        *(scattered(2000, 0.4), torch.arange(40)),
    )
    for dtype, size, places in zip(dtypes, DELTA_SIZES, changes, strict=True):
        old = random_bits(dtype, size)
        pairs.append((old, with_changes(old, places, most=100)))
    (part,) = parts_of(pairs, compress=compress)
    return part


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.tolist())


def flat(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def decode_part(table: bytes, data: bytes) -> None:
    """Read a part; what it changes must be inside the tensors."""
    part = delta.Part(flat(table), flat(data))
    part.check(DELTA_SIZES, DELTA_WIDTHS)
    for changes in delta.decode(part):
        places = changes.places
        assert bool((places[1:] > places[:-1]).all()) and int(places[0]) >= 0
        assert int(places[-1]) < DELTA_SIZES[changes.number]
        assert len(places) == len(changes.bits)
        assert changes.bits.element_size() == DELTA_WIDTHS[changes.number]


def delta_bytes(part: delta.Part) -> bytes:
    return struct.pack("<I", len(part.table)) + raw(part.table) + raw(part.data)


def read_delta(data: bytes) -> None:
    size = int.from_bytes(data[:4], "little")
    decode_part(data[4 : 4 + size], data[4 + size :])


def delta_fields(part: delta.Part) -> dict[str, Any]:
    """A part as numbers, so that they can be changed one by one."""
    table = raw(part.table)
    return {
        "header": list(HEADER.unpack_from(table))[1:],
        "rows": [list(row) for row in ROW.iter_unpack(table[HEADER.size :])],
        "data": part.data.tolist(),
    }


def read_fields(given: Any) -> None:
    try:
        # Numbers of any size, cut to the size of their field.
        header = [
            int(value) % (1 << 32 if place < 4 else 1 << 64)
            for place, value in enumerate(given["header"])
        ]
        table = HEADER.pack(b"vifdelta", *header)
        sizes = [32, *[8] * 4, 64, *[32] * 4, *[64] * 4]
        for row in given["rows"]:
            cut = [int(v) % (1 << n) for v, n in zip(row, sizes, strict=True)]
            table += ROW.pack(*cut)
        data = bytes(int(value) % 256 for value in given["data"])
    except (ValueError, TypeError, LookupError, OverflowError, struct.error) as error:
        raise Malformed("these are no fields of a part") from error
    decode_part(table, data)


def read_delta_file(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=files.SHARED_MEMORY) as file:
        Path(file.name).write_bytes(data)
        for part in delta.load(file.name)[0]:
            decode_part(raw(part.table), raw(part.data))


def delta_file(part: delta.Part) -> bytes:
    with tempfile.NamedTemporaryFile(dir=files.SHARED_MEMORY) as file:
        delta.save(file.name, [part], {"manifest": "{}"})
        return Path(file.name).read_bytes()


def sent_on(raw: bytes) -> bytes:
    """A body as the server sends it on to an engine core."""
    return msgspec.msgpack.encode(body.parse(raw))


JOIN = {
    "init_method": "tcp://127.0.0.1:1",
    "world_size": 2,
    "rank_offset": 1,
    "group_name": "g",
    "backend": "gloo",
    "timeout_s": 1.0,
}
MEET = {
    "master_address": "h",
    "master_port": 1,
    "world_size": 2,
    "bucket_bytes": 1024,
    "rank_offset": 1,
    "num_buckets": 2,
    "timeout_s": 1.0,
}
REQUEST = {
    "kind": "weight_update_request",
    "version": 7,
    "parameters_info": [{"name": "a", "shape": [2], "dtype": "torch.bfloat16"}],
}
TERMS = b'{"wire": "gloo", "world_size": 2, "bucket_bytes": 1024, "line": 4711}'
DELTAS = delta_part(), delta_part(compress=3)
REFUSED = (InflightError, ValueError)
"""What a rank turns into a refusal, where it reads an `init_info` or `update_info`."""

PARSERS: dict[str, Parser] = {
    "body": Parser([json.dumps(MANIFEST).encode(), b'{"a": [1e5]}'], sent_on),
    "manifest": Parser([MANIFEST, MANIFEST | {"draft": True}], Manifest.parse),
    "config": Parser([{"port": 1, "verify": "off"}], InflightConfig.parse),
    "key": Parser([b"Bearer k", b"Bearer \xff"], shown),
    "request": Parser([REQUEST, json.dumps(REQUEST)], announced),
    "local": Parser(
        [{"path": "/a", "draft": True}, {"shm": "a"}],
        info(files.LocalEngine, "update"),
        REFUSED,
    ),
    "groups": Parser(
        [THREE | {"group_name": "g", "flattened": True}],
        info(torch_groups.GroupsEngine, "update"),
        REFUSED,
    ),
    "join": Parser([JOIN], joined, REFUSED),
    "broadcast": Parser([THREE, SLICED], info(broadcast.GlooEngine, "update"), REFUSED),
    "meet": Parser([MEET], info(broadcast.GlooEngine, "init"), REFUSED),
    "ipc": Parser(
        [THREE | {"exports": EXPORTS}],
        info(ipc.IpcEngine, "update"),
        REFUSED,
    ),
    "terms": Parser([TERMS], meeting.read_terms),
    "index": Parser([b'{"weight_map": {"a": "m.safetensors"}}'], read_index),
    "file": Parser([save(TENSORS), struct.pack("<Q", 2) + b"{}"], read_file),
    "offsets in a file": Parser([save(TENSORS)], open_file),
    "spool": Parser([save(TENSORS), *pickles()], spool(None)),
    "bucket": Parser([bucket(PARTS)], spool("flattened_bucket")),
    "parts": Parser([PARTS], lambda parts: spool("flattened_bucket")(bucket(parts))),
    "delta": Parser([*map(delta_bytes, DELTAS)], read_delta),
    "fields of a delta": Parser([*map(delta_fields, DELTAS)], read_fields),
    "delta file": Parser([*map(delta_file, DELTAS)], read_delta_file),
    "pickle": Parser(pickles(), lambda data: safe_unpickler.tensors(data, "it")),
    "message": Parser(messages(), lambda data: safe_unpickler.message(data, "it", [])),
    "sockets": Parser(
        [{"zmq_handles": {"GPU-0": "ipc://a"}}],
        info(checkpoint_engine.CheckpointEngine, "update"),
        REFUSED,
    ),
}
