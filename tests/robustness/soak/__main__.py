"""A long run: `python -m tests.robustness.soak --seconds 1200`, or `make soak`.

A real engine under mixed load, an update every second, faults in between. Versions come
from files, and from this process in shared memory, or from a trainer's process, if the
engine is configured with a backend that has one. On a GPU the engine has CUDA graphs,
and sleeps now and then. The last line says how much was done, and what was lost or
torn; the exit status is 1 if anything was, or if memory, threads, descriptors, files or
groups grow.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.support.gpu.exact import be_exact

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
be_exact()  # as the judge's replay is
# oneDNN keeps what it has compiled for 1024 shapes, about 1 MiB for each new length of
# a prompt, updates or not: memory would grow for hours until all lengths have come.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
# NCCL's service that reports on peers (RAS) keeps sockets of groups that have ended.
os.environ.setdefault("NCCL_RAS_ENABLE", "0")

NUM_CLIENTS = 6
JUDGED_SHARE = 0.2
"""Of all requests; the judge takes those that it has time for, and at least ..."""
LEAST_JUDGED = 0.05
UPDATE_EVERY_S = 1.0
LONGEST_TURN_S = 120.0
HEALTH_S = 8.0
LOG_GIB = {"delta_gib": 0.004, "delta_host_gib": 0.02}
"""Of delta staging: a version that differs everywhere has room beside the weights, and
a part of the way back moves into host memory for the next one."""
AUDIT_SHARE = 0.15
"""Of the turns after which what is served is compared with a fresh load of files."""
FAULT_SHARE = 0.35
"""Of the turns that begin with a fault."""
MOST_SHOWN = 20


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.robustness.soak", description=__doc__
    )
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument(
        "--least",
        type=int,
        default=0,
        help="updates and faults that a run has; a slow host takes longer than asked",
    )
    parser.add_argument("--seed", default=str(random.randrange(1 << 32)))
    parser.add_argument("--ranks", type=int, default=1, help="tensor parallel")
    parser.add_argument(
        "--backend",
        choices=("local", "inflight_gloo", "inflight_nccl", "inflight_ipc"),
        help="of the engine; by default what the host has GPUs for, and else local",
    )
    parser.add_argument("--staging", choices=("auto", "delta"), default="auto")
    parser.add_argument("--out", type=Path, default=Path("out/soak"))
    return parser.parse_args()


def start(folder: Path, ranks: int, backend: str, staging: str) -> Any:
    """An engine in processes of its own."""
    import torch
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from tests.support.engines.script import OPTIONS

    on_gpu = torch.cuda.is_available()
    of_log = LOG_GIB if staging == "delta" else {}
    inflight = {"health_s": HEALTH_S, "staging": staging} | of_log
    own: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": not on_gpu,
        "enable_sleep_mode": on_gpu,
        # In use after a minute: memory that grows then is none of the cache.
        "num_gpu_blocks_override": 1024,
        "tensor_parallel_size": ranks,
        "weight_transfer_config": {"backend": backend},
        "worker_extension_cls": "tests.robustness.soak.rank.Rank",
        "additional_config": {"inflight": inflight},
    }
    if staging == "delta" and not on_gpu:
        own["worker_extension_cls"] = "tests.robustness.soak.unpacked_rank.Rank"
    if on_gpu:
        # This process has computed on a CPU's threads, and is not to be forked.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    # A core for each rank; what stages, and this process, have the others, if any.
    cores = sorted(os.sched_getaffinity(0), reverse=True)[:ranks]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, cores)))
    return AsyncLLM.from_engine_args(AsyncEngineArgs(str(folder), **OPTIONS | own))


async def soak(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Run for the seconds asked for, or longer (`--least`); returns what was found."""
    import torch
    from vllm.v1.engine.exceptions import EngineDeadError

    from tests.robustness.soak.far import FILES, Far, usual_backend
    from tests.robustness.soak.faults import (
        FAULTS,
        nothing_held,
        suffer,
        trainer_killed,
    )
    from tests.robustness.soak.history import History
    from tests.robustness.soak.judge import Answer, Judge, covered
    from tests.robustness.soak.load import Load
    from tests.robustness.soak.pulse import Pulse
    from tests.robustness.soak.trainer import Trainer, split
    from tests.support.models.tiny import make_checkpoint
    from tests.support.waiting import until
    from vllm.inflight.errors import InflightError

    folders = {name: make_checkpoint(root / name, i) for i, name in enumerate("abc")}
    for folder in folders.values():
        split(folder)
    backend = options.backend or usual_backend()
    on_gpu = torch.cuda.is_available()
    pulse = Pulse(options.ranks, lambda: trainer.is_steady)
    history = History("aa")
    judge = Judge(folders, history)
    engine = start(folders["a"], options.ranks, backend, options.staging)
    has_logs = (await engine.weight_info())["staging"]["has_logs"]
    assert has_logs is (options.staging == "delta")
    answers: asyncio.Queue[Answer] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    # Torch gives each thread that computes a pool of others, which count as growth.
    judge_thread = ThreadPoolExecutor(1, "judge")

    async def judge_all() -> None:
        """Look at every span, and replay what there is time for."""
        while True:
            answer = await answers.get()
            # A version is live before the call that brought it has returned.
            async with asyncio.timeout(60):
                while answer.spans and answer.spans[-1][2] > max(history.epochs):
                    await asyncio.sleep(0.01)
            found = covered(answer, history)
            torn = [f"{answer.name}: {found}"] if found else []
            if answer.eras and not torn and answers.qsize() < 100:
                judged = loop.run_in_executor(judge_thread, judge.torn, answer)
                torn = await judged
            history.num_torn += len(torn)
            history.wrong += torn
            answers.task_done()

    load = Load(
        engine,
        history,
        seed=options.seed,
        judged_share=JUDGED_SHARE,
        judge=answers.put_nowait,
    )
    far = None
    if backend != FILES:
        far = Far(engine, backend, options.ranks, folders["a"])
        await far.join()
    trainer = Trainer(
        engine, far, folders, history, seed=options.seed, can_sleep=on_gpu
    )
    background = [
        asyncio.create_task(load.run(NUM_CLIENTS)),
        asyncio.create_task(judge_all()),
        asyncio.create_task(pulse.run()),
    ]
    asking, judging, beating = background
    began = time.monotonic()
    kinds = [each for each in FAULTS if far is not None or each is not trainer_killed]
    if options.staging == "delta":  # an update that is aborted leaves the way back
        kinds.remove(nothing_held)

    def is_enough() -> bool:
        done = min(history.num_updates, sum(history.faults.values()))
        return done >= options.least

    try:
        while (left := began + options.seconds - time.monotonic()) > 0 or (
            not is_enough()
        ):
            for task in background:
                if task.done():
                    task.result()
            turn = time.monotonic()
            try:
                async with asyncio.timeout(LONGEST_TURN_S):
                    if trainer.rng.random() < FAULT_SHARE:
                        await suffer(trainer, trainer.rng.choice(kinds), root / "fault")
                    await trainer.act()
                    if trainer.rng.random() < AUDIT_SHARE:
                        await trainer.audit()
                    await engine.check_health()
            except (InflightError, EngineDeadError, TimeoutError):
                history.wrong.append(f"the trainer met {traceback.format_exc()}")
                break  # what is served from here on is not known
            rest = min(UPDATE_EVERY_S - (time.monotonic() - turn), left)
            await asyncio.sleep(max(0.0, rest))
        load.close()
        await asking
        await answers.join()
        beating.cancel()
        judging.cancel()
        took_s = time.monotonic() - began
        slopes = pulse.slopes()
    finally:
        for task in background:
            task.cancel()
        await trainer.close()
        engine.shutdown()
        judge_thread.shutdown(cancel_futures=True)
    shares = judge.num_answers / max(1, load.num_requests)
    if shares < LEAST_JUDGED:
        history.wrong.append(f"only {shares:.1%} of the answers were replayed")
    history.wrong += [f"{n} grow: {s}" for n, s in slopes.items() if s["grows"]]
    if (grown := history.tensors_grow()) is not None:
        history.wrong.append(f"tensors of a rank grow: {grown}")
    try:
        until(lambda: not pulse.left_behind())  # those of others come and go
    except AssertionError:
        left_behind = sorted(pulse.left_behind())
        history.wrong.append(f"left in shared memory: {left_behind}")
    return {
        "seconds": round(took_s, 1),
        "seed": options.seed,
        "ranks": options.ranks,
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {_device()}",
        "backend": backend,
        "staging": options.staging,
        "updates": history.num_updates,
        "sent": history.num_sent,
        "joined": 0 if far is None else far.num_joined,
        "turns": history.num_turns,
        "rollbacks": history.num_rollbacks,
        "renames": history.num_renames,
        "pauses": history.num_pauses,
        "audits": history.num_audits,
        "faults": history.faults,
        "requests": load.num_requests,
        "ends": load.ends,
        "tokens": load.num_tokens,
        "replayed": {"answers": judge.num_answers, "tokens": judge.num_tokens},
        "gaps_ms": load.gaps.to_dict(),
        "gaps_while_stopped_ms": load.gaps_stopped.to_dict(),
        "pulse": slopes,
        "memory_by_process": pulse.by_process(),
        "held": history.held,
        "lost": history.num_lost,
        "torn": history.num_torn,
        "wrong": history.wrong,
        "beats": [
            [b.at_s, round(b.memory_mib, 2), b.threads, b.descriptors, round(b.gpu_mib)]
            for b in pulse.beats
        ],
    }


def _device() -> str:
    """What the engine runs on."""
    from vllm.platforms import current_platform

    name = current_platform.get_device_name(0)
    return "CPU build" if current_platform.is_cpu() else str(name)


def tell(found: dict[str, Any]) -> None:
    """The report, in lines; the last one is the shortest."""
    print(f"{found['date']}, {found['machine']}, {found['seconds']:.0f} s")
    print(
        f"updates {found['updates']}, rollbacks {found['rollbacks']}, renames "
        f"{found['renames']}, pauses {found['pauses']}, audits {found['audits']}"
    )
    print(
        f"{found['sent']} of the updates by {found['backend']}, in {found['joined']} "
        f"groups; the engine slept {found['turns']} times"
    )
    print(f"faults survived: {json.dumps(found['faults'])}")
    print(f"requests {found['requests']}, ended: {json.dumps(found['ends'])}")
    print(f"replayed without the engine: {json.dumps(found['replayed'])}")
    print(f"gaps between two tokens, ms: {json.dumps(found['gaps_ms'])}")
    print(
        f"the same, paused or retracted: {json.dumps(found['gaps_while_stopped_ms'])}"
    )
    for name, slope in found["pulse"].items():
        told = "grows" if slope["grows"] else "flat"
        told = told if slope["is_judged"] else "(too short a run to judge)"
        print(
            f"{name} {told}: {slope['now']}, {slope['per_hour']:+} per hour "
            f"(limit {slope['limit_per_hour']})"
        )
    for what in found["wrong"][:MOST_SHOWN]:
        print(f"WRONG {what}")
    print(
        f"{found['updates']} updates, {sum(found['faults'].values())} faults, "
        f"{found['tokens']} tokens, {found['lost']} lost, {found['torn']} torn",
        flush=True,
    )


def main() -> int:
    """Run, tell, and keep the figures; 1 if anything was wrong."""
    options = arguments()
    print(f"seed {options.seed}, {options.seconds:g} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="vllm-inflight-soak-") as root:
        found = asyncio.run(soak(options, Path(root)))
    options.out.mkdir(parents=True, exist_ok=True)
    name = time.strftime("%Y%m%d-%H%M%S.json", time.gmtime())
    (options.out / name).write_text(json.dumps(found, indent=1) + "\n")
    tell(found)
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
