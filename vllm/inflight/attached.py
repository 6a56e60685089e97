"""Our state on objects of upstream: one object of ours each, under one name.

All that the package remembers of a request, a worker or an engine core is in one object
that lives as long as the request, worker or core. Upstream has attributes that begin
with `_inflight_`, so ours has the name of the distribution.
`patch/records/attributes.py` lists the classes of upstream that get such an object.
"""

from __future__ import annotations

from typing import Self

from vllm.inflight.errors import UpstreamChanged

ATTRIBUTE = "vllm_inflight"
"""The one attribute that we set on an object of upstream."""


class Attached:
    """Base class of our state; each class of upstream has one subclass.

    The attribute is read from the `__dict__` of the object. Some objects of upstream
    look names up in other objects, and torch modules take attributes for submodules.
    """

    __slots__ = ()

    @classmethod
    def find(cls, owner: object) -> Self | None:
        """The state of this class on `owner`, or None."""
        found = owner.__dict__.get(ATTRIBUTE)
        if found is None or isinstance(found, cls):
            return found
        raise UpstreamChanged(_in_the_way(owner, found))

    @classmethod
    def of(cls, owner: object) -> Self:
        """The state of this class on `owner`.

        Raises:
            UpstreamChanged: `owner` has none.

        """
        found = owner.__dict__.get(ATTRIBUTE)
        return found if isinstance(found, cls) else cls._not_found(owner)

    @classmethod
    def _not_found(cls, owner: object) -> Self:
        if (found := owner.__dict__.get(ATTRIBUTE)) is not None:
            raise UpstreamChanged(_in_the_way(owner, found))
        raise UpstreamChanged(
            f"this {type(owner).__name__} of vLLM has no {cls.__name__} of "
            "vllm-inflight: vLLM made it in a way that vllm-inflight does not know"
        )

    def attach(self, owner: object) -> Self:
        """Set this state on `owner`, in place of an earlier one.

        Raises:
            UpstreamChanged: the attribute of `owner` holds something that is not ours.

        """
        before = owner.__dict__.get(ATTRIBUTE)
        if before is not None and not isinstance(before, Attached):
            raise UpstreamChanged(_in_the_way(owner, before))
        # Not by setattr: a module of torch, for one, has a setter of its own.
        owner.__dict__[ATTRIBUTE] = self
        return self


class AttachedOnDemand(Attached):
    """State that is created empty at its first use."""

    __slots__ = ()

    @classmethod
    def _not_found(cls, owner: object) -> Self:
        made = owner.__dict__.setdefault(ATTRIBUTE, cls())  # one, if threads ask
        return made if isinstance(made, cls) else super()._not_found(owner)


def _in_the_way(owner: object, found: object) -> str:
    return (
        f"{type(owner).__name__}.{ATTRIBUTE} holds a {type(found).__name__} that "
        "vllm-inflight did not put there; use a vLLM that vllm-inflight was tested on"
    )
