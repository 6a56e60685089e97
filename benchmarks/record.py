"""The messages between the benchmark and its arms: plans and records."""

from __future__ import annotations

from dataclasses import dataclass, field

OURS, UPSTREAM = "ours", "upstream"


@dataclass
class Plan:
    """The work of an arm in one round."""

    num_streams: int
    warm_tokens: int
    """Tokens of every stream that come before the round is recorded."""
    steady_s: float
    checkpoints: list[str]
    """Published one after the other, decoding alone for `steady_s` around each."""
    every_s: float | None = None
    """Seconds from the call of one update to that of the next; None: `steady_s` after
    its return."""


@dataclass
class Update:
    """One update, as its caller saw it; times are this host's monotonic clock."""

    start: float
    end: float
    facts: dict[str, float] = field(default_factory=dict)
    """What the engine itself says about it."""
    called: float | None = None
    """When the engine got its first call, if a trainer has searched before."""


@dataclass
class Record:
    """The observations of an arm in one round."""

    arrivals: list[list[tuple[float, int]]]
    """Per stream: when how many tokens arrived at the client."""
    begun: float = 0.0
    ended: float = 0.0
    updates: list[Update] = field(default_factory=list)
    probe: list[int] = field(default_factory=list)
    """Greedy tokens under the weights published last."""
    served: list[int] = field(default_factory=list)
    """Of each rank, what `served_bits` tells of these weights, if the arm does."""
