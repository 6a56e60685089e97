"""Deltas between two checkpoints on disk: made, proved and applied."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vllm.inflight import ops
from vllm.inflight.delta import Encoder, Part, apply, decode, load, save
from vllm.inflight.errors import BaseMismatch, Malformed, WeightsMismatch
from vllm.inflight.transport.files.allowed_paths import INDEX, shards
from vllm.inflight.transport.files.safetensors_files import TensorFiles
from vllm.inflight.update import Manifest, TensorSpec

Tell = Callable[[str, int, int], None]
Digests = dict[str, ops.Digest]

MANIFEST, TARGET = "manifest", "digest"
"""Keys in the metadata of a file: the delta's manifest, and the digest of the version
that it leads to."""

THREADS = max(1, os.cpu_count() or 1)


class Checkpoint:
    """The tensors of a checkpoint on disk, mapped into memory.

    What is written to them is in the files only if the checkpoint is `is_writable`.

    Args:
        path: a safetensors file, or a directory of them.
        is_writable: whether to write.

    Raises:
        Malformed: there is no such checkpoint, or a file of it is broken.

    """

    def __init__(self, path: Path, *, is_writable: bool = False) -> None:
        self.path = path
        self.files = _files(path)
        self.tensors: dict[str, torch.Tensor] = {}
        """Flat, of integers."""
        self.forms: dict[str, tuple[str, tuple[int, ...]]] = {}
        """Dtype and shape of each tensor."""
        self._maps: dict[Path, mmap.mmap] = {}
        with TensorFiles(self.files) as opened:
            listed = opened.tensor_list
            for name, dtype, shape, stored in zip(
                listed.names, listed.dtypes, listed.shapes, opened.stored, strict=True
            ):
                if name in self.tensors:
                    raise Malformed(
                        f"{path} has two tensors called {name!r}",
                        remedy="Leave one of the files out.",
                    )
                if dtype.is_complex:
                    raise Malformed(
                        f"{name!r} in {stored.file} is {dtype}, and a delta has no "
                        "complex numbers",
                        remedy="Copy the checkpoint whole.",
                    )
                integers = ops.INTEGERS[dtype.itemsize]
                count = torch.Size(shape).numel()
                tensor = torch.empty(0, dtype=integers)
                if count:
                    memory = self._mapped(stored.file, is_writable)
                    tensor = torch.frombuffer(
                        memory, dtype=integers, count=count, offset=stored.offset
                    )
                self.tensors[name] = tensor
                self.forms[name] = str(dtype).removeprefix("torch."), tuple(shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def digests(self, what: str, tell: Tell) -> Digests:
        """The digest of every tensor."""
        found: Digests = {}
        for name, tensor in self.told(what, tell):
            (found[name],) = ops.digest([tensor], num_threads=THREADS)
        return found

    def digest(self, digests: Digests) -> str:
        """The digest of the version, given those of its tensors."""
        return ops.manifest_digest(
            (name, *self.forms[name], digest) for name, digest in digests.items()
        )

    def flush(self) -> None:
        """Have what was written on the disk."""
        for memory in self._maps.values():
            memory.flush()

    def told(self, what: str, tell: Tell) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, telling how much of them is done."""
        done, total = 0, self.num_bytes
        for name, tensor in self.tensors.items():
            tell(what, done, total)
            yield name, tensor
            done += tensor.nbytes
        tell(what, done, total)

    def _mapped(self, file: Path, is_writable: bool) -> mmap.mmap:
        if file not in self._maps:
            # A private copy where nothing is written: torch wants memory to write to.
            access = mmap.ACCESS_WRITE if is_writable else mmap.ACCESS_COPY
            with file.open("r+b" if is_writable else "rb") as opened:
                self._maps[file] = mmap.mmap(opened.fileno(), 0, access=access)
        return self._maps[file]


def write_delta(
    old: str, new: str, out: str, tell: Tell, *, compress: int | None = None
) -> dict[str, Any]:
    """Write what has changed from one checkpoint to another into a file.

    Args:
        old: path of the checkpoint before.
        new: path of the checkpoint now, with the same tensors.
        out: path of the file.
        tell: called while it works.
        compress: level of zstd; None: no compression.

    Raises:
        InflightError: a checkpoint cannot be read, the two have other tensors, or `out`
            exists.

    """
    file = _free(Path(out))
    before, now = Checkpoint(Path(old)), Checkpoint(Path(new))
    _require_alike(before, now)
    digests = before.digests("reading OLD", tell)
    base = before.digest(digests)
    encoder = Encoder(compress=compress, num_threads=THREADS)
    parts, specs = list[Part](), dict[str, TensorSpec]()
    for name, tensor in now.told("comparing", tell):
        parts += encoder.add(len(specs), before.tensors[name], tensor)
        if encoder.has_changed:
            (digests[name],) = ops.digest([tensor], num_threads=THREADS)
            specs[name] = _spec(now, name, digests[name])
    if not (has_changed := bool(specs)):  # a delta names a tensor at least
        filled = [name for name, tensor in now.tensors.items() if len(tensor)]
        if not filled:
            raise Malformed(
                f"{new} has no element, so a delta would have none",
                remedy="Give checkpoints with tensors.",
            )
        name = filled[0]
        first, place = now.tensors[name][:1], torch.zeros(1, dtype=torch.int64)
        parts += encoder.add_places(0, place, first, first)
        specs[name] = _spec(now, name, digests[name])
    parts += encoder.finish()
    sizes, widths = _sizes(now, specs)
    num_changed = 0
    for part in parts if has_changed else ():
        part.check(sizes, widths)  # entries are exactly the changed elements
        num_changed += int(part.rows["num_entries"].sum(dtype="int64"))
    target = now.digest(digests)
    manifest = Manifest(specs, base=base).to_dict()
    save(file, parts, {MANIFEST: json.dumps(manifest), TARGET: target})
    return {
        "file": str(file),
        "bytes": file.stat().st_size,
        "base": base,
        "digest": target,
        "tensors": len(now.tensors),
        "changed_tensors": len(specs) if has_changed else 0,
        "elements": sum(map(len, now.tensors.values())),
        "changed_elements": num_changed,
        "checkpoint_bytes": now.num_bytes,
    }


def apply_delta(old: str, file: str, out: str, tell: Tell) -> dict[str, Any]:
    """Write the checkpoint that a delta leads to.

    It has the files of `old`, with the changed elements in them. It gets its name when
    the digest of its tensors is the announced one.

    Args:
        old: path of the checkpoint that the delta starts from.
        file: path of the delta.
        out: path of the result: a file or a directory, as `old`.
        tell: called while it works.

    Raises:
        InflightError: a file cannot be read, the delta starts from another checkpoint,
            or leads to another one than announced, or `out` exists.

    """
    path = _free(Path(out))
    parts, metadata = load(file)
    manifest, target = _announced(file, metadata)
    before = Checkpoint(Path(old))
    digests = before.digests("reading OLD", tell)
    if (base := before.digest(digests)) != manifest.base:
        raise BaseMismatch(
            f"{file} starts from the version with digest {manifest.base}, and {old} is "
            f"{base}",
            served=base,
            remedy="Apply it to the checkpoint that it was made from.",
        )
    for name, spec in manifest.tensors.items():
        if before.forms.get(name) != (spec.dtype, spec.shape):
            raise Malformed(
                f"{file} changes {name!r}, {list(spec.shape)} {spec.dtype}, which "
                f"{old} does not have",
                remedy="Make the delta again.",
            )
    names = list(manifest.tensors)
    sizes, widths = _sizes(before, names)
    with _beside(path) as partial:
        _copy(before, partial)
        after = Checkpoint(partial, is_writable=True)
        for number, part in enumerate(parts):
            tell("applying", number, len(parts))
            part.check(sizes, widths)
            for changes in decode(part, num_threads=THREADS):
                tensor = after.tensors[names[changes.number]]
                apply(changes, tensor, num_threads=THREADS)
        for number, (name, spec) in enumerate(manifest.tensors.items()):
            tell("proving", number, len(names))
            (digests[name],) = ops.digest([after.tensors[name]], num_threads=THREADS)
            if digests[name].hex() != spec.digest:
                raise _unproved(file, name)
        if after.digest(digests) != target:
            raise _unproved(file, "the whole checkpoint")
        after.flush()
        os.replace(partial, path)
    return {
        "path": str(path),
        "base": base,
        "digest": target,
        "tensors": len(before.tensors),
        "changed_tensors": len(names),
        "checkpoint_bytes": before.num_bytes,
    }


def _unproved(file: str, what: str) -> WeightsMismatch:
    return WeightsMismatch(
        f"with {file} the digest of {what} is not the announced one",
        remedy="Copy the file of the delta again, or make it again.",
    )


def _announced(file: str, metadata: Mapping[str, str]) -> tuple[Manifest, str]:
    """The manifest of a delta in a file, and the digest of what it leads to."""
    try:
        manifest = Manifest.parse(json.loads(metadata[MANIFEST]))
        target = metadata[TARGET]
    except (KeyError, ValueError, Malformed) as error:
        raise Malformed(
            f"{file} is not a delta between checkpoints: {error}",
            remedy="Make one with `vllm-inflight delta OLD NEW -o FILE`.",
        ) from None
    if manifest.base is None:
        raise Malformed(
            f"the manifest of {file} has no base",
            remedy="Make one with `vllm-inflight delta OLD NEW -o FILE`.",
        )
    return manifest, target


def _sizes(checkpoint: Checkpoint, names: Iterable[str]) -> tuple[list[int], list[int]]:
    """Elements of these tensors, and bytes of an element."""
    tensors = [checkpoint.tensors[name] for name in names]
    return [len(tensor) for tensor in tensors], [t.element_size() for t in tensors]


def _spec(checkpoint: Checkpoint, name: str, digest: ops.Digest) -> TensorSpec:
    dtype, shape = checkpoint.forms[name]
    return TensorSpec(name, shape, dtype, digest.hex())


def _require_alike(old: Checkpoint, new: Checkpoint) -> None:
    """Raise `Malformed` unless both checkpoints have the same tensors."""
    remedy = "A delta is between versions of one model; copy NEW whole."
    for one, other in ((old, new), (new, old)):
        if missing := sorted(one.forms.keys() - other.forms.keys()):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise Malformed(
                f"{one.path} has the tensor {missing[0]!r}{more}, and {other.path} has "
                "not",
                remedy=remedy,
                tensors=missing,
            )
    for name, (dtype, shape) in old.forms.items():
        if new.forms[name] != (dtype, shape):
            new_dtype, new_shape = new.forms[name]
            raise Malformed(
                f"{name!r} is {list(shape)} {dtype} in {old.path}, and "
                f"{list(new_shape)} {new_dtype} in {new.path}",
                remedy=remedy,
                tensors=[name],
            )


def _files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint, under the names that they have in it."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise Malformed(
            f"there is no checkpoint {path}",
            remedy="Give a safetensors file, or a directory of them.",
        )
    names = sorted(file.name for file in path.glob("*.safetensors"))
    if (path / INDEX).is_file():
        names = shards(path / INDEX)
    if not names:
        raise Malformed(
            f"{path} holds no .safetensors file",
            remedy="Give a safetensors file, or a directory of them.",
        )
    return [path / name for name in names]


def _free(path: Path) -> Path:
    """`path`, if nothing is there and its directory exists."""
    if path.exists() or path.is_symlink():
        raise Malformed(f"{path} exists", remedy="Remove it, or give another -o.")
    if not path.parent.is_dir():
        raise Malformed(
            f"there is no directory {path.parent}",
            remedy="Make it, or give another -o.",
        )
    return path


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A path beside `path` that does not exist yet; nothing is left there."""
    room = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield room / path.name
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _copy(checkpoint: Checkpoint, to: Path) -> None:
    """Copy a checkpoint: its file, or its directory with the other files in it."""
    if checkpoint.path.is_file():
        shutil.copyfile(checkpoint.path, to)
        return
    to.mkdir()
    files = {file.name for file in checkpoint.files}
    for file in sorted(checkpoint.path.iterdir()):
        is_other = file.suffix != ".safetensors"
        if file.is_file() and (is_other or file.name in files):
            shutil.copyfile(file, to / file.name)
