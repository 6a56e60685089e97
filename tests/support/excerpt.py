"""What to read of a long output: the first error, which is the cause, and the end."""

import re

MOST = 12_000
"""Characters from the first error on, and as many of the end."""

ERROR = re.compile(
    r"^.*(\bERROR\b|\bFATAL\b|Traceback \(|Timeout \(|Fatal Python)", re.M
)


def excerpt(text: str, most: int = MOST) -> str:
    """A text from its first error on; of a long one the middle is left out."""
    found = ERROR.search(text)
    text = text[found.start() if found else 0 :]
    if len(text) <= 2 * most:
        return text
    left_out = f"\n[{len(text) - 2 * most} characters are left out]\n"
    return text[:most] + left_out + text[-most:]
