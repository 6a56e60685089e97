"""Digests of tensors and counts of non-finite values, computed by the native core."""

from vllm.inflight.ops.digests import (
    INTEGERS,
    NAN_BYTES,
    NATIVE,
    NONFINITE,
    Digest,
    count_nonfinite,
    counts_of_part,
    digest,
    digest_of_changes,
    digest_part,
    digest_reference,
    digest_slice,
    has_memory,
    manifest_digest,
    nan_bytes,
    native_core,
    nonfinite_limit,
)
from vllm.inflight.ops.reference import row_major

__all__ = [
    "INTEGERS",
    "NAN_BYTES",
    "NATIVE",
    "NONFINITE",
    "Digest",
    "count_nonfinite",
    "counts_of_part",
    "digest",
    "digest_of_changes",
    "digest_part",
    "digest_reference",
    "digest_slice",
    "has_memory",
    "manifest_digest",
    "nan_bytes",
    "native_core",
    "nonfinite_limit",
    "row_major",
]
