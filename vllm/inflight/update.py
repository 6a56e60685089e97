"""The vocabulary of an update: version, manifest, phase, and the table of moves.

Plain data: nothing here knows of vLLM, of devices or of threads.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import msgspec

from vllm.inflight.errors import Malformed
from vllm.inflight.packed import (
    Packer,
    TimeSlice,
    Work,
    at_once,
    blocks,
    is_packed,
    length,
    unpack,
)

MAX_MANIFEST_BYTES = 64 << 20
"""A manifest larger than this is refused; one of 100,000 tensors has about 15 MiB."""

MAX_LABEL_CHARS = MAX_NAME_CHARS = 512
MAX_TENSORS, MAX_DIMENSIONS, INT64 = 1 << 20, 16, 1 << 63
MAX_PATTERNS, MAX_PATTERN_CHARS = 1024, 512
"""Of a manifest, whose numbers are below `INT64`; of its subset."""

CHECKED, IS_CHECKED = "\0checked", b"yes"
"""In a manifest that was checked and packed. JSON has no bytes: no body claims it."""

IS_DIGEST = re.compile(r"[0-9a-f]{32}").fullmatch

DRAFT = "draft."
"""How the names of a drafter's tensors begin."""


class Phase(StrEnum):
    """Where an update stands."""

    OPEN = "open"
    STAGING = "staging"
    STAGED = "staged"
    COMMITTED = "committed"
    ABORTED = "aborted"
    ROLLED_BACK = "rolled_back"


MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.OPEN: frozenset({Phase.STAGING, Phase.ABORTED}),
    Phase.STAGING: frozenset({Phase.STAGED, Phase.ABORTED}),
    Phase.STAGED: frozenset({Phase.COMMITTED, Phase.ABORTED}),
    Phase.COMMITTED: frozenset({Phase.ROLLED_BACK}),
    Phase.ABORTED: frozenset(),
    Phase.ROLLED_BACK: frozenset({Phase.COMMITTED}),
}
"""Every legal move of an update; there is no other way to change a phase."""

ACTIVE = frozenset({Phase.OPEN, Phase.STAGING, Phase.STAGED})
"""Phases in which an update holds the second set of weights."""


class PauseMode(StrEnum):
    """What happens to running requests at a pause or a commit."""

    IN_PLACE = "in_place"
    RETRACT = "retract"
    ABORT = "abort"
    WAIT = "wait"

    @classmethod
    def parse(cls, value: str) -> PauseMode:
        """The mode named `value`; `keep` is upstream's word for `in_place`."""
        try:
            return cls("in_place" if value == "keep" else value)
        except ValueError:
            modes = ", ".join(mode.value for mode in cls)
            raise Malformed(
                f"mode must be one of {modes} (or keep), got {value!r}"
            ) from None


STRICTNESS = (PauseMode.WAIT, PauseMode.IN_PLACE, PauseMode.RETRACT, PauseMode.ABORT)
"""A pause may become stricter; what it has let go of does not come back."""

PAUSE_MOVES: dict[PauseMode | None, frozenset[PauseMode]] = {
    None: frozenset(PauseMode),
    **{mode: frozenset(STRICTNESS[i:]) for i, mode in enumerate(STRICTNESS)},
}
"""The mode in force (None: decoding) → the modes that a pause may ask for."""


@dataclass(frozen=True, slots=True)
class Version:
    """A version of the weights as it was committed."""

    label: str = "default"
    """The name the trainer gave it, echoed exactly."""
    epoch: int = 0
    """Counts commits, rollbacks and renames of this engine; never reused."""
    digest: str | None = None
    """Digest of the checkpoint it came from; None for the weights loaded at start."""
    step: int | None = None
    """The trainer's step number, if its manifest told."""
    committed_at: float | None = None
    """Seconds since 1970, when it went live; None for the weights loaded at start."""

    def to_dict(self) -> dict[str, Any]:
        """As `/weight_info` reports it."""
        return {
            "weight_version": self.label,
            "epoch": self.epoch,
            "digest": self.digest,
            "step": self.step,
            "committed_at": self.committed_at,
        }


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor of a checkpoint: name, full shape, dtype, and maybe its digest.

    A hundred thousand are kept as long as an update takes. Collections of garbage pass
    them over, for they can be in no cycle.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a trainer announces it will send."""

    tensors: Mapping[str, TensorSpec] = field(default_factory=dict)
    step: int | None = None
    name_map: Mapping[str, str] = field(default_factory=dict)
    """From the names the trainer sends to the names the model knows."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the `config.json` of the model that the weights are of."""
    subset: tuple[str, ...] = ()
    """Patterns of the names that may come; all others keep what is served."""
    draft: bool = False
    """Whether all of it is the drafter's, and the model keeps what is served."""

    @classmethod
    def parse(cls, body: Any) -> Manifest:
        """Read a manifest; raises `Malformed` naming the entry that is wrong.

        Args:
            body: `{"format": 1, "tensors": [{"name", "shape", "dtype",
                "digest"?}], "step"?, "name_map"?, "config"?, "subset"?, "draft"?}`.

        """
        return at_once(cls.unpacked(at_once(cls.packed(body))))

    @classmethod
    def packed(cls, body: Any) -> Work[dict[str, Any]]:
        """Check a manifest, and pack its tensors and its `name_map`.

        Args:
            body: as for `parse`; lists and objects in it may be packed already.

        Returns:
            What `head` and `unpacked` read: plain data, which is small but for bytes.

        Raises:
            Malformed: an entry is wrong; the message names it.

        """
        if not isinstance(body, dict) or body.get("format") != 1:
            raise Malformed('manifest must be an object with "format": 1')
        if body.get(CHECKED) == IS_CHECKED:
            return body
        if body.get("base"):
            raise Malformed(
                "manifest field 'base' is not supported by this release: send whole "
                "tensors"
            )
        draft = body.get("draft", False)
        if not isinstance(draft, bool):
            raise Malformed(f"manifest field 'draft' must be true or false: {draft!r}")
        step = body.get("step")
        if step is not None and not (type(step) is int and -INT64 <= step < INT64):
            raise Malformed(f"manifest field 'step' must be an int64: {step!r:.80}")
        config = yield from unpack(body.get("config") or {})
        if not isinstance(config, dict):
            raise Malformed("manifest field 'config' must be an object")
        subset = check_subset((yield from unpack(body.get("subset"))))
        if draft:
            subset = tuple(map(drafters, subset))
        try:
            tensors = yield from _packed_tensors(body.get("tensors", []), draft)
            name_map = yield from _packed_names(body.get("name_map") or {})
        except UnicodeEncodeError as error:
            raise Malformed(f"a name of the manifest is no text: {error}") from None
        return {
            "format": 1,
            "step": step,
            "draft": draft,
            "subset": list(subset),
            "config": config,
            "tensors": tensors,
            "name_map": name_map,
            CHECKED: IS_CHECKED,
        }

    @classmethod
    def head(cls, packed: Mapping[str, Any]) -> Manifest:
        """What `packed` made, without what can have many entries."""
        return cls(
            step=packed["step"],
            config=packed["config"],
            subset=tuple(packed["subset"]),
            draft=packed["draft"],
        )

    @classmethod
    def unpacked(cls, packed: Mapping[str, Any]) -> Work[Manifest]:
        """The manifest that `packed` was made of."""
        tensors: dict[str, TensorSpec] = {}
        for specs in blocks(packed["tensors"], _specs):
            tensors.update((spec.name, spec) for spec in specs)
            yield
        name_map = yield from unpack(packed["name_map"])
        return replace(cls.head(packed), tensors=tensors, name_map=name_map)

    @classmethod
    def of(
        cls,
        specs: Iterable[TensorSpec],
        *,
        step: int | None = None,
        name_map: Mapping[str, str] | Callable[[str], str] | None = None,
        subset: Iterable[str] = (),
    ) -> Manifest:
        """A manifest of `specs`, whose names `name_map` turns into the model's."""
        rename = renamer(name_map)
        tensors: dict[str, TensorSpec] = {}
        for spec in specs:
            name = rename(spec.name)
            if name in tensors:
                raise Malformed(f"two tensors of the source are called {name!r}")
            tensors[name] = TensorSpec(name, spec.shape, spec.dtype, spec.digest)
        return cls(tensors, step, subset=tuple(subset))

    def to_dict(self) -> dict[str, Any]:
        """As it travels in `POST /start_weight_update`."""
        body: dict[str, Any] = {
            "format": 1,
            "tensors": [
                {"name": t.name, "shape": list(t.shape), "dtype": t.dtype}
                | ({"digest": t.digest} if t.digest else {})
                for t in self.tensors.values()
            ],
        }
        if self.step is not None:
            body["step"] = self.step
        if self.name_map:
            body["name_map"] = dict(self.name_map)
        if self.config:
            body["config"] = dict(self.config)
        if self.subset:
            body["subset"] = list(self.subset)
        if self.draft:
            body["draft"] = True
        return body

    def model_name(self, sent_name: str) -> str:
        """What the model knows a tensor as; see `name_map` and `draft`."""
        name = self.name_map.get(sent_name, sent_name)
        return drafters(name) if self.draft else name


_specs = msgspec.msgpack.Decoder(list[TensorSpec])


def drafters(name: str) -> str:
    """The name of a drafter's tensor, whether it is told to be one or not."""
    return name if name.startswith(DRAFT) else DRAFT + name


def renamer(
    name_map: Mapping[str, str] | Callable[[str], str] | None,
) -> Callable[[str], str]:
    """`name_map` as a function; names a mapping leaves out keep their name."""
    if name_map is None:
        return lambda name: name
    if callable(name_map):
        return name_map
    return lambda name: name_map.get(name, name)


def check_label(label: Any) -> str | None:
    """`label` if it can name a version (any string), None if it is None."""
    if label is None:
        return None
    if not isinstance(label, str) or not label or len(label) > MAX_LABEL_CHARS:
        raise Malformed(
            f"weight_version must be a string of 1 to {MAX_LABEL_CHARS} "
            f"characters, got {str(label)[:80]!r}"
        )
    return label


def check_subset(patterns: Any) -> tuple[str, ...]:
    """`patterns` if they can declare a subset, none if it is None."""
    if patterns is None:
        return ()
    if not isinstance(patterns, list | tuple) or not 0 < len(patterns) <= MAX_PATTERNS:
        raise Malformed(f"subset must be a list of 1 to {MAX_PATTERNS} patterns")
    for pattern in patterns:
        if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_PATTERN_CHARS:
            raise Malformed(
                f"a pattern of a subset must be a string of 1 to {MAX_PATTERN_CHARS} "
                f"characters, got {str(pattern)[:80]!r}"
            )
    return tuple(patterns)


STAGED_FACTS = "digest", "sent", "base"
"""What an engine tells of a staged update: the digest of the whole version (None if it
is not known), the digest of the tensors that were sent, and where the first is not
known, what the engine serves below them."""


def difference(staged: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Why engines that have staged one update would serve different weights.

    Args:
        staged: name of an engine → the `STAGED_FACTS` that it told.

    Returns:
        A sentence with the digest of every engine; None if all of them are alike.

    """
    told = {n: tuple(map(facts.get, STAGED_FACTS)) for n, facts in staged.items()}
    if len(set(told.values())) < 2:
        return None
    digests = {digest for digest, _, _ in told.values()}

    def described(digest: str | None, sent: str | None, base: str | None) -> str:
        if digest is None:
            return f"has no known digest, and tensors {sent} on top of weights {base}"
        more = f" and was sent {sent}" if len(digests) == 1 else ""
        return f"has digest {digest}{more}"

    each = "; ".join(f"{name} {described(*facts)}" for name, facts in told.items())
    return (
        f"the engines staged different weights, so none of them commits: {each}. "
        "Give every engine the same tensors on top of the same version"
    )


def fingerprint(body: Any) -> str:
    """Equal for two request bodies that say the same; see `fingerprinted`."""
    return at_once(fingerprinted(body))


def fingerprinted(body: Any) -> Work[str]:
    """The same, in slices: of what is packed, each block is read by itself."""
    found: list[bytes] = []

    def note(value: Any) -> int:
        if not isinstance(value, bytes):
            raise Malformed(f"{value!r:.80} is no plain data")
        found.append(value)
        return len(found)

    text = json.dumps(body, sort_keys=True, default=note).encode()
    hashed = hashlib.blake2b(text, digest_size=16)
    for block in found:
        hashed.update(hashlib.blake2b(block, digest_size=16).digest())
        yield
    return hashed.hexdigest()


def _packed_tensors(entries: Any, is_drafters: bool) -> Work[dict[str, Any]]:
    """The tensors of a manifest, each checked, as `[name, shape, dtype, digest]`."""
    is_list = isinstance(entries, list) or (
        is_packed(entries) and entries["kind"] == "list"
    )
    if not is_list or length(entries) > MAX_TENSORS:
        raise Malformed(f"manifest field 'tensors' must list up to {MAX_TENSORS}")
    # Several sets, since one of 100,000 names takes milliseconds to grow.
    names = [set[str]() for _ in range(64)]
    packer, slice_, position = Packer(), TimeSlice(), 0
    for block in blocks(entries):
        for entry in block:
            name, *facts = _checked(position, entry)
            alike = names[hash(name) % len(names)]
            if name in alike:
                raise Malformed(f"manifest names {name!r} twice")
            alike.add(name)
            position += 1
            packer.add([drafters(name) if is_drafters else name, *facts])
            if slice_.is_over():
                yield
    return packer.packed()


def _packed_names(name_map: Any) -> Work[dict[str, Any]]:
    """A `name_map`, checked."""
    is_map = isinstance(name_map, dict)
    if is_packed(name_map):
        is_map = name_map["kind"] == "dict"
    packer, models, slice_ = Packer(dict), set[str](), TimeSlice()
    for block in blocks(name_map) if is_map else ():
        for sent, name in block:
            is_map &= isinstance(sent, str) and isinstance(name, str)
            if not is_map:
                break
            models.add(name)
            packer.add((sent, name))
            if slice_.is_over():
                yield
    if not is_map:
        raise Malformed("manifest field 'name_map' must map names to names")
    packed = packer.packed()
    if len(models) != packer.length:
        raise Malformed("manifest field 'name_map' maps two names to one")
    return packed


def _checked(position: int, entry: Any) -> tuple[str, tuple[int, ...], str, str | None]:
    """Name, shape, dtype and digest of one tensor of a manifest."""
    where = f"manifest tensor #{position}"
    if not isinstance(entry, dict):
        raise Malformed(f"{where} must be an object")
    name, shape, dtype = entry.get("name"), entry.get("shape"), entry.get("dtype")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise Malformed(f"{where}: 'name' must be 1 to {MAX_NAME_CHARS} characters")
    sizes = shape if isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS else [-1]
    for size in sizes:
        if type(size) is not int or not 0 <= size < INT64:
            raise Malformed(f"{where} ({name}): 'shape' must be a list of sizes")
    if not isinstance(dtype, str):
        raise Malformed(f"{where} ({name}): 'dtype' must be a string like 'bfloat16'")
    digest = entry.get("digest")
    if digest is not None and not (
        isinstance(digest, str) and IS_DIGEST(digest) is not None
    ):
        raise Malformed(f"{where} ({name}): 'digest' must be 32 hex digits")
    return name, tuple(sizes), dtype.removeprefix("torch."), digest
