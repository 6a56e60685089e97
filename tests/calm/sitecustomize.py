"""Runs at the start of every Python process of the tests: waiting is not spinning.

vLLM's processes wait for each other in loops around `sched_yield`. Since Linux 6.18 a
thread that yields may still keep others of its core waiting: on two cores, requests and
clients stood still for seconds, as long as anything decoded, without this package too.
A sleep of no length lets go of the core for about 50 µs.
"""

import os
import time


def _sleep_instead() -> None:
    time.sleep(0)


os.sched_yield = _sleep_instead
