"""What lets every pair of a scheme and a kernel through, and remembers which it met."""

from typing import Any


class Admitted(set[tuple[str, str]]):
    """Pairs of a scheme and a kernel, of which there is any that is asked for."""

    def __contains__(self, pair: Any) -> bool:
        self.add(pair)
        return True

    def __str__(self) -> str:
        return "\n".join(f"met {scheme} with {kernel}" for scheme, kernel in self)
