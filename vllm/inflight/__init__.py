"""vLLM in-flight: weights that change while tokens flow.

Rooms, in the order of the data (see docs/architecture.md):
trainer → wire → stage → commit → engine → outputs, with api as the door.
"""

__version__ = "0.1.0"
