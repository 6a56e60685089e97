"""Our state on objects of upstream: one object of ours each, under one name.

Whatever we remember of a request, a worker or an engine core is in one object, which
ends with it. Upstream has attributes that begin with `_inflight_`, so ours has the name
of the distribution. `patch/attributes.py` lists the classes of upstream that get one.
"""

from __future__ import annotations

from typing import Self

from vllm.inflight.errors import UpstreamChanged

ATTRIBUTE = "vllm_inflight"
"""The one attribute that we set on an object of upstream."""


class Attached:
    """Base of what we keep on an object of upstream; one class for each class there.

    The attribute is read from the object itself: some objects of upstream look names
    up in others, and modules of torch take attributes for parts of the model.
    """

    __slots__ = ()

    @classmethod
    def find(cls, owner: object) -> Self | None:
        """What `owner` has of this class, or None; `owner` is not changed."""
        found = owner.__dict__.get(ATTRIBUTE)
        if found is None or isinstance(found, cls):
            return found
        raise UpstreamChanged(_in_the_way(owner, found))

    @classmethod
    def of(cls, owner: object) -> Self:
        """What `owner` has of this class.

        Raises:
            UpstreamChanged: it has none.

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
        """Become what `owner` has, in the place of an earlier one.

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
    """One that is empty at first, and made when it is first asked for."""

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
