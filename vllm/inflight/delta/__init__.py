"""Weight deltas: which elements of tensors changed, and their new bits.

docs/delta-format.md defines the format. It is bitwise: a dtype is only its width, and
NaNs and negative zeros keep their bits.
"""

from vllm.inflight.delta.decode import apply, decode
from vllm.inflight.delta.decoded import Changes
from vllm.inflight.delta.encode import MAX_PART_BYTES, Encoder, changed
from vllm.inflight.delta.file import load, save
from vllm.inflight.delta.part import Block, Part, PlaceForm, ValueForm

__all__ = [
    "MAX_PART_BYTES",
    "Block",
    "Changes",
    "Encoder",
    "Part",
    "PlaceForm",
    "ValueForm",
    "apply",
    "changed",
    "decode",
    "load",
    "save",
]
