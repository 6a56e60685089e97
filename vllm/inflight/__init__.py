"""vLLM in-flight: a vLLM whose weights are replaced while it decodes.

The packages are processes, in the order of the data (see docs/architecture.md):
trainer → transport → worker → engine → outputs → api. `patch` connects them to vLLM.
"""

__version__ = "0.1.0"
