"""Imported last of all by a server that processes are forked off.

What is there by then stays: no collection of theirs goes through it, which would take a
quarter of a second each and copy its pages.
"""

import gc

gc.collect()
gc.freeze()
