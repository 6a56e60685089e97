"""Runs at the start of every Python process of the tests, and keeps it calm.

Waiting is not spinning.

vLLM's processes wait for each other in loops around `sched_yield`. Since Linux 6.18 a
thread that yields may still keep others of its core waiting: on two cores, requests and
clients stood still for seconds, as long as anything decoded, without this package too.
A sleep of 0.2 ms lets go of the core. A sleep of no length does so too, for 50 µs, but
with it an engine of two ranks uses a fifth more of the processor.

Importing is not collecting. A tenth to a quarter of the ten seconds in which vLLM is
imported, by each process of each engine, are collections that find next to nothing.

A process that lives for `STACKS_AFTER_S` seconds writes the stacks of its threads to
its stderr, once. So what hangs says where, before whoever waits for it gives up. A
thread of Python writes them: `faulthandler` reads the frames of threads that run
meanwhile, and has crashed a process that was well.
"""

import gc
import os
import sys
import threading
import time
import traceback


def _sleep_instead() -> None:
    time.sleep(0.0002)


os.sched_yield = _sleep_instead

if "PYTEST_VERSION" in os.environ:
    gc.set_threshold(300_000, 10, 10)


def _write_stacks(after_s: float) -> None:
    time.sleep(after_s)
    for number, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame))
        sys.stderr.write(f"\nStack of thread {number} after {after_s:g} s:\n{stack}")
    sys.stderr.flush()


if "STACKS_AFTER_S" in os.environ:
    told_s = float(os.environ["STACKS_AFTER_S"])
    threading.Thread(target=_write_stacks, args=(told_s,), daemon=True).start()
