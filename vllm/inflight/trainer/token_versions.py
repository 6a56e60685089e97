"""From version spans to one version for each token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm.inflight.errors import Malformed


def per_token_versions(
    spans: Iterable[Any] | None, num_tokens: int | None = None
) -> list[str | None]:
    """List the version that sampled each output token.

    Args:
        spans: `weight_versions` of one choice: dicts, as HTTP has them, or
            `VersionSpan` objects, as `LLM` and `AsyncLLM` have them. None, as for beam
            search, means that no version is known.
        num_tokens: how many tokens the choice has, if the list shall have that length:
            shorter spans are filled up with None, longer ones are cut off.

    Returns:
        One label for each token; None where no span covers the token.

    Raises:
        Malformed: a span has no version, start or end, or the spans overlap.

    """
    versions: list[str | None] = []
    for span in spans or ():
        version, start, end = (
            _fact(span, name) for name in ("version", "start", "end")
        )
        if not len(versions) <= start <= end:
            raise Malformed(
                f"version spans must follow each other, and a span of {version!r} has "
                f"the tokens {start} to {end} after {len(versions)} tokens"
            )
        versions += [None] * (start - len(versions))
        versions += [version] * (end - start)
    if num_tokens is None:
        return versions
    return (versions + [None] * (num_tokens - len(versions)))[:num_tokens]


def _fact(span: Any, name: str) -> Any:
    is_mapping = isinstance(span, Mapping)
    found = span.get(name) if is_mapping else getattr(span, name, None)
    if found is None:
        raise Malformed(f"a version span has version, start and end, got {span!r:.200}")
    return found
