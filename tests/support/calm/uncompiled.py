"""Imported before most of vLLM: no compiler is run for its helpers on a CPU.

Functions of a few lines, such as the one by which a rank finds the tokens of its part
of the vocabulary, are compiled at their first call, in each process of each engine. A
C++ compiler takes ten seconds for that, or the other ranks spin until the file of an
earlier run is found. Models that are to be compiled still are.
"""

from vllm.platforms import current_platform

if current_platform.is_cpu():
    type(current_platform).simple_compile_backend = "eager"
