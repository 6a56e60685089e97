"""What this package uses in releases of vLLM that lack a name.

`releases.PLACES` says which release gets which of these.
"""

from __future__ import annotations


class NoSuchClass:
    """In place of a class of upstream: no object is one of it."""
