"""A rank of a long run on a CPU that packs no matrices, as delta staging needs it."""

from tests.robustness.soak.rank import Rank as Rank
from tests.support.engines.unpacked import unpack

unpack()  # a worker imports this before it loads its model
