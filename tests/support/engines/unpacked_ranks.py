"""A worker extension for CPU engines of several ranks whose matrices are not packed."""

from tests.support.engines.unpacked import unpack

unpack()  # a worker imports this before it loads its model


class Unpacked:
    """It adds nothing."""
