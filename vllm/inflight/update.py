"""The data of an update: version, manifest, phase, and the table of phase changes.

The module is plain data, without vLLM, devices or threads.
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
"""A larger manifest is rejected; 100,000 tensors take about 15 MiB."""

MAX_LABEL_CHARS = MAX_NAME_CHARS = 512
MAX_TENSORS, MAX_DIMENSIONS, INT64 = 1 << 20, 16, 1 << 63
MAX_PATTERNS, MAX_PATTERN_CHARS = 1024, 512
"""Limits of a manifest and of the patterns of its subset; numbers are below `INT64`."""

CHECKED, IS_CHECKED = "\0checked", b"yes"
"""Mark of a checked and packed manifest. JSON has no bytes, so no body can set it."""

IS_DIGEST = re.compile(r"[0-9a-f]{32}").fullmatch

DRAFT = "draft."
"""Prefix of the names of a drafter's tensors."""

WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""Upstream's names of the parts of the memory that a sleep gives back."""


class Phase(StrEnum):
    """The phase of an update."""

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
"""Phase → phases that can follow it."""

ACTIVE = frozenset({Phase.OPEN, Phase.STAGING, Phase.STAGED})
"""Phases in which an update occupies the shadow weights."""


class PauseMode(StrEnum):
    """What happens to running requests at a pause or a commit."""

    IN_PLACE = "in_place"
    RETRACT = "retract"
    ABORT = "abort"
    WAIT = "wait"

    @classmethod
    def parse(cls, value: str | None, default: str = "") -> PauseMode:
        """The mode named `value`; `keep` is upstream's word for `in_place`.

        None means `default`. `""` and 0 name no mode.
        """
        if value is None:
            value = default
        try:
            return cls("in_place" if value == "keep" else value)
        except ValueError:
            modes = ", ".join(mode.value for mode in cls)
            raise Malformed(
                f"mode must be one of {modes} (or keep), got {value!r}"
            ) from None


STRICTNESS = (PauseMode.WAIT, PauseMode.IN_PLACE, PauseMode.RETRACT, PauseMode.ABORT)
"""A pause can change to a stricter mode only: retracted requests stay retracted."""

PAUSE_MOVES: dict[PauseMode | None, frozenset[PauseMode]] = {
    None: frozenset(PauseMode),
    **{mode: frozenset(STRICTNESS[i:]) for i, mode in enumerate(STRICTNESS)},
}
"""Current mode (None: decoding) → modes that a pause may ask for."""


@dataclass(frozen=True, slots=True)
class Version:
    """A version of the weights, as committed."""

    label: str = "default"
    """The name that the trainer gave it, unchanged."""
    epoch: int = 0
    """Grows by one at each commit, rollback and rename; never reused."""
    digest: str | None = None
    """Content digest of its checkpoint; None for the weights loaded at start."""
    step: int | None = None
    """The trainer's step number, if the manifest has it."""
    committed_at: float | None = None
    """Commit time in seconds since 1970; None for the weights loaded at start."""

    def to_dict(self) -> dict[str, Any]:
        """The version as `/weight_info` reports it."""
        return {
            "weight_version": self.label,
            "epoch": self.epoch,
            "digest": self.digest,
            "step": self.step,
            "committed_at": self.committed_at,
        }


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor of a checkpoint: name, full shape, dtype and optional digest.

    An update can hold 100,000 of them. They can be in no reference cycle, so the
    garbage collector skips them (`gc=False`).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The tensors that a trainer announces, and how they map to the model."""

    tensors: Mapping[str, TensorSpec] = field(default_factory=dict)
    step: int | None = None
    name_map: Mapping[str, str] = field(default_factory=dict)
    """The trainer's name → the model's name."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the weights' `config.json`."""
    subset: tuple[str, ...] = ()
    """Patterns of the names in this update; other tensors keep their live values."""
    draft: bool = False
    """Whether all tensors are the drafter's; the target model keeps its weights."""
    base: str | None = None
    """Digest of the version that a delta starts from; None unless it is a delta."""

    @property
    def is_partial(self) -> bool:
        """Whether it leaves tensors of the model as they are served: a subset, a delta
        or a drafter's update."""
        return bool(self.subset) or self.draft or self.base is not None

    @classmethod
    def parse(cls, body: object) -> Manifest:
        """Read and check a manifest; raises `Malformed` with the wrong entry.

        Args:
            body: `{"format": 1, "tensors": [{"name", "shape", "dtype",
                "digest"?}], "step"?, "name_map"?, "config"?, "subset"?, "draft"?,
                "base"?}`.

        """
        return at_once(cls.unpacked(at_once(cls.packed(body))))

    @classmethod
    def packed(cls, body: object) -> Work[dict[str, Any]]:
        """Check a manifest, and pack its tensors and its `name_map`.

        Args:
            body: as for `parse`; its lists and objects may be packed already.

        Returns:
            Plain data for `head` and `unpacked`; all its large values are bytes.

        Raises:
            Malformed: an entry is wrong; the message names the entry.

        """
        if not isinstance(body, dict) or body.get("format") != 1:
            raise Malformed('manifest must be an object with "format": 1')
        if body.get(CHECKED) == IS_CHECKED:
            return body
        base = _base(body)
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
            tensors = yield from _packed_tensors(
                body.get("tensors", []), draft, is_delta=base is not None
            )
            name_map = yield from _packed_names(body.get("name_map") or {})
        except UnicodeEncodeError as error:
            raise Malformed(f"a name of the manifest is no text: {error}") from None
        return {
            "format": 1,
            "step": step,
            "draft": draft,
            "base": base,
            "subset": list(subset),
            "config": config,
            "tensors": tensors,
            "name_map": name_map,
            CHECKED: IS_CHECKED,
        }

    @classmethod
    def head(cls, packed: Mapping[str, Any]) -> Manifest:
        """The manifest of `packed`, without its tensors and its `name_map`."""
        return cls(
            step=packed["step"],
            config=packed["config"],
            subset=tuple(packed["subset"]),
            draft=packed["draft"],
            base=packed["base"],
        )

    @classmethod
    def unpacked(cls, packed: Mapping[str, Any]) -> Work[Manifest]:
        """The whole manifest of `packed`."""
        tensors: dict[str, TensorSpec] = {}
        for specs in blocks(packed["tensors"], _specs):
            tensors.update({spec.name: spec for spec in specs})
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
        """A manifest of `specs` under the names that `name_map` gives them."""
        rename = renamer(name_map)
        tensors: dict[str, TensorSpec] = {}
        for spec in specs:
            name = rename(spec.name)
            if name in tensors:
                raise Malformed(f"two tensors of the source are called {name!r}")
            tensors[name] = TensorSpec(name, spec.shape, spec.dtype, spec.digest)
        return cls(tensors, step, subset=tuple(subset))

    def to_dict(self) -> dict[str, Any]:
        """The manifest as JSON data, as `POST /start_weight_update` takes it."""
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
        if self.base is not None:
            body["base"] = self.base
        return body

    def model_name(self, sent_name: str) -> str:
        """The model's name of a sent tensor, by `name_map` and `draft`."""
        name = self.name_map.get(sent_name, sent_name)
        return drafters(name) if self.draft else name


_specs = msgspec.msgpack.Decoder(list[TensorSpec])


def drafters(name: str) -> str:
    """`name` with the drafter's prefix, which is added if it is missing."""
    return name if name.startswith(DRAFT) else DRAFT + name


def renamer(
    name_map: Mapping[str, str] | Callable[[str], str] | None,
) -> Callable[[str], str]:
    """`name_map` as a function; a name that a mapping lacks stays as it is."""
    if name_map is None:
        return lambda name: name
    if callable(name_map):
        return name_map
    return lambda name: name_map.get(name, name)


def check_label(label: object) -> str | None:
    """Check a version label (a string or None), and return it."""
    if label is None:
        return None
    if not isinstance(label, str) or not label or len(label) > MAX_LABEL_CHARS:
        raise Malformed(
            f"weight_version must be a string of 1 to {MAX_LABEL_CHARS} "
            f"characters, got {str(label)[:80]!r}"
        )
    return label


def check_flag(value: object, name: str) -> bool:
    """Check the field `name` (a bool or None), and return it; None means False."""
    if value is not None and not isinstance(value, bool):
        raise Malformed(f"{name} must be true or false, got {value!r:.80}")
    return bool(value)


def check_owner(value: object) -> str | None:
    """Check the field `owner` (a string or None), and return it."""
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARS:
        raise Malformed(
            f"owner must be a string of 1 to {MAX_NAME_CHARS} characters, got "
            f"{value!r:.80}"
        )
    return value


def check_subset(patterns: object) -> tuple[str, ...]:
    """Check the patterns of a subset, and return them; None gives no patterns."""
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
"""What an engine reports of a staged update.

`digest` is the digest of the whole version, None if it is not known. `sent` is the
digest of the sent tensors. `base` names the live weights below them, if `digest` is not
known.
"""


def difference(staged: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Compare what several engines have staged for one update.

    Args:
        staged: name of an engine → the `STAGED_FACTS` that it reported.

    Returns:
        A sentence with the digest of every engine if they differ, else None.

    """
    facts_of = {n: tuple(map(facts.get, STAGED_FACTS)) for n, facts in staged.items()}
    if len(set(facts_of.values())) < 2:
        return None
    digests = {digest for digest, _, _ in facts_of.values()}

    def described(digest: str | None, sent: str | None, base: str | None) -> str:
        if digest is None:
            return f"has no known digest, and tensors {sent} on top of weights {base}"
        more = f" and was sent {sent}" if len(digests) == 1 else ""
        return f"has digest {digest}{more}"

    each = "; ".join(f"{name} {described(*facts)}" for name, facts in facts_of.items())
    return (
        f"the engines staged different weights, so none of them commits: {each}. "
        "Give every engine the same tensors on top of the same version"
    )


def fingerprint(body: object) -> str:
    """A hash of a request body; equal bodies have equal hashes."""
    return at_once(fingerprinted(body))


def fingerprinted(body: object) -> Work[str]:
    """`fingerprint` in time slices; packed values are hashed block by block."""
    found: list[bytes] = []

    def note(value: object) -> int:
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


def _base(body: dict[str, Any]) -> str | None:
    """Check the field `base` of a manifest, and return it; None: no delta."""
    base = body.get("base")
    if base is None:
        return None
    if not isinstance(base, str) or not IS_DIGEST(base):
        raise Malformed(
            "manifest field 'base' must be the digest of the version that the delta "
            f"starts from, 32 lower-case hex digits, got {base!r:.80}"
        )
    if body.get("subset"):
        raise Malformed(
            "a manifest has either 'base' or 'subset': a delta names in 'tensors' "
            "what has changed, and all else stays as it is"
        )
    return base


def _packed_tensors(
    entries: Any, is_drafters: bool, *, is_delta: bool
) -> Work[dict[str, Any]]:
    """Check the tensors of a manifest; pack each as `[name, shape, dtype, digest]`."""
    is_list = isinstance(entries, list) or (
        is_packed(entries) and entries["kind"] == "list"
    )
    if not is_list or length(entries) > MAX_TENSORS:
        raise Malformed(
            f"manifest field 'tensors' must be a list of up to {MAX_TENSORS} tensors"
        )
    if is_delta and not length(entries):
        raise Malformed("the manifest of a delta must name a tensor, changed or not")
    # Several sets, since the growth of one with 100,000 names takes milliseconds.
    names = [set[str]() for _ in range(64)]
    packer, slice_, position = Packer(), TimeSlice(), 0
    for block in blocks(entries):
        for entry in block:
            name, *facts = _checked(position, entry)
            if is_delta and facts[-1] is None:
                raise Malformed(
                    f"manifest tensor #{position} ({name}): a delta must announce the "
                    "'digest' that the tensor has afterwards"
                )
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
    """Check a `name_map`, and pack it."""
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


def _checked(
    position: int, entry: object
) -> tuple[str, tuple[int, ...], str, str | None]:
    """Check one tensor of a manifest; return its name, shape, dtype and digest."""
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
