"""The jobs, in the order in which they get their GPUs."""

from dataclasses import dataclass, replace
from pathlib import Path

from docs.gpu_runs import read
from tests.support.gpu_lanes.num_gpus import usable

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Job:
    """A command of bash, or tests of pytest, on one GPU or more."""

    name: str
    shares: tuple[float, ...]  # of each GPU that it needs; 1.0 is a whole one
    limit: int  # seconds, after which it is ended
    command: str = ""  # $PYTHON is the interpreter, $OUT the folder for results
    tests: str = ""  # arguments of pytest, instead of a command
    shard: str = "1/1"  # 1/3 is the first third of its tests
    least: int = 60  # seconds; it does not begin when fewer are left
    cores: int = 0  # CPU cores that no other job uses meanwhile
    on: tuple[int, ...] = ()  # its GPUs; by default those with the most room
    alone: bool = False  # it needs whole GPUs: later jobs leave those in `on` to it
    quiet: bool = False  # it measures time: no other such job runs meanwhile


def bench(
    name: str,
    shares: tuple[float, ...],
    limit: int,
    arguments: str,
    environment: str = "",
    **more: bool,
) -> Job:
    """A benchmark whose engine has the first GPUs to itself."""
    command = f"{environment} $PYTHON -m benchmarks.{arguments} --out $OUT".strip()
    on = tuple(range(len(shares)))
    return Job(
        *(name, shares, limit, command), least=150, cores=12, on=on, quiet=True, **more
    )


DELTA = "gpu.delta --shares 0.001 0.01 --trace --every 1 --arms"
KERNELS = "$PYTHON -m benchmarks.gpu.delta_kernels --out $OUT"
MEMORY = "$PYTHON -m benchmarks.gpu.memory --out $OUT"
EXPERTS = """'{"data_parallel_size": 2, "enable_expert_parallel": true}'"""
EXPERTS = f"gpu --shapes experts --ranks 2 --rounds 1 --engine {EXPERTS}"
STEPS = "--device cuda --rates 1e-4 --train-steps 300 --batch 16 --length 256"
STEPS = f"$PYTHON -m benchmarks.delta.steps {STEPS} --out $OUT/delta-steps.json"
SOAK = "PYTHONPATH=tests/support/calm:$PYTHONPATH $PYTHON -m tests.robustness.soak"
SOAK = f"{SOAK} --seconds 600 --out $OUT --backend"
BESIDE = """--backend inflight_ipc --engine '{"gpu_memory_utilization": 0.6}'"""
SWEEP = "gpu.delta --trace --updates 6 --shares 0.0001 0.001 0.01 0.03 0.1 0.25 --arms"
CHOICE = "'auto 0.03' 'auto 0.04' 'auto 0.1' 'auto 0.25' 1.0"
CHOICE = f"gpu.delta --updates 4 --shares {CHOICE} --arms device"
SPARSE = "gpu.delta --updates 6 --shares 0.01 --arms device delta 'upstream, sparse'"
MIXTURE = "gpu.delta --updates 6 --shares 0.01 --shape experts --arms device"
ON_ONE = [
    bench(
        f"bench-delta-{name}-ipc",
        (1.0,),
        limit,
        f"{command} {BESIDE}",
        "BENCH_TRAINER_GPU=0",
    )
    for name, limit, command in (
        ("device", 390, f"{SWEEP} device"),
        ("log", 390, f"{DELTA} delta"),
        ("sparse", 560, SPARSE),
        ("choice", 300, CHOICE),
        ("experts", 390, MIXTURE),
    )
]
"""On one GPU: the trainer has its weights beside those of the engine."""
DELTAS = [
    bench("bench-delta-device", (1.0, 0.4), 390, f"{DELTA} device"),
    bench("bench-delta-log", (1.0, 0.4), 420, f"{DELTA} delta"),
    bench("bench-delta-upstream", (1.0, 0.4), 240, f"{DELTA} upstream"),
    Job("bench-kernels", (1.0,), 180, KERNELS, cores=12, on=(0,), quiet=True),
]
"""They come first."""
FRAMEWORKS = [
    bench("bench-verl", (1.0,), 400, "frameworks verl --rounds 1", alone=True),
    bench(
        "bench-openrlhf-and-prime-rl",
        *((1.0,), 560, "frameworks openrlhf_ipc prime_rl --rounds 1"),
        alone=True,
    ),
    bench(
        *("bench-openrlhf", (1.0, 0.4), 420, "frameworks openrlhf --rounds 1"),
        alone=True,
    ),
    bench("bench-pauses", (1.0, 1.0), 400, "frameworks.pauses --shape 8B", alone=True),
    bench("bench-experts", (1.0, 1.0, 0.4), 500, EXPERTS, alone=True),
]
"""They come after the tests that have never run."""
LARGE = "gpu.delta --shape 32B --shares 0.01 --updates 6 --arms device delta"
STAGES = """gpu --shapes 14B --ranks 4 --backend inflight_ipc --arms ours --rounds 1"""
STAGES += """ --engine '{"pipeline_parallel_size": 2}'"""
OF_RANKS = [
    bench("bench-32B", (1.0, 1.0, 0.6), 560, f"{LARGE} upstream"),
    bench("bench-32B-ipc", (1.0, 1.0, 0.6), 480, f"{LARGE} --backend inflight_ipc"),
    bench("bench-stages", (1.0,) * 4, 400, STAGES, "BENCH_TRAINER_GPU=3"),
]
"""Engines of several ranks."""
LAST = [
    Job("bench-memory", (0.5,), 300, MEMORY),
    Job("bench-steps", (0.2,), 800, STEPS, least=200),
    Job("soak-nccl", (0.05, 0.05), 900, f"{SOAK} inflight_nccl", least=780),
    Job("soak-ipc", (0.05,), 900, f"{SOAK} inflight_ipc", least=780),
    Job("soak-log", (0.05,), 900, f"{SOAK} inflight_ipc --staging delta", least=780),
]
WHOLE_AND_1 = "gpu.delta --shares 0.01 --updates 6 --arms"
BOTH = f"{WHOLE_AND_1} device upstream --ranks"
ENGINES = "--streams {streams} --engine '{{\"data_parallel_size\": {number}}}'"
SHARDED = {
    4: f"{BOTH} 2 --trainer-ranks 2",
    8: f"{BOTH} 4 --trainer-ranks 4 --shape 70B",
}
"""Number of GPUs → a trainer of several ranks, of which each has its shards alone."""
GROUPS = {
    4: f"{BOTH} 3 {ENGINES.format(streams=96, number=3)}",
    8: f"{BOTH} 7 {ENGINES.format(streams=112, number=7)}",
}
"""Number of GPUs → engines of 8B in one group with their trainer."""
MANY = {
    number: [
        bench("bench-shards", (1.0,) * number, 560, SHARDED[number]),
        bench("bench-engines", (*(1.0,) * (number - 1), 0.4), 480, GROUPS[number]),
    ]
    for number in SHARDED
}
"""Number of GPUs → the benchmarks that are for as many."""
SHARDS = {"families": 3, "family_ranks": 3, "quantised_ranks": 2, "drafters": 2}
SHARDS |= {"delta_staging": 2, "delta_staging_ranks": 2, "ranks_fed_from_third_gpu": 2}
SHARDS |= {"quantised_deltas": 3, "quantised": 3, "adopted_direct_writes": 2}
"""The files of tests/gpu that take longest, and over how many jobs each is spread."""
ALONE = ["arena", "examples", "sleep", "soak", "out_of_memory", "production_size"]
ALONE += ["routed_experts", "colocated_round", "sglang_handles"]
"""They take most memory of their GPUs, or look at all of it."""


def tests(path: str, num_gpus: int) -> list[Job]:
    """The jobs of a file of tests/gpu, on as many GPUs as its tests can use."""
    name = Path(path).stem.removeprefix("test_")
    used = min(num_gpus, usable(ROOT / path)[1])
    job = Job(name, (0.045,) * used, 1000, tests=path)
    if name in ALONE:
        last = tuple(range(num_gpus - used, num_gpus))
        return [replace(job, shares=(1.0,) * used, on=last, alone=True)]
    shards = range(1, SHARDS.get(name, 0) + 1)
    return [
        replace(job, name=f"{name}-{n}", shard=f"{n}/{len(shards)}") for n in shards
    ] or [job]


def jobs(num_gpus: int) -> list[Job]:
    """Those for a host of so many GPUs, in their order.

    Of files that docs/gpu-runs.json knows, and of those that it does not, the ones that
    take longest come first.
    """
    known = read()
    files = (str(each.relative_to(ROOT)) for each in ROOT.glob("tests/gpu/test_*.py"))
    found = [job for file in sorted(files) for job in tests(file, num_gpus)]
    found.sort(key=lambda job: (job.tests in known, job.shard == "1/1"))
    alone = [job for job in found if job.alone]
    rest = [job for job in found if not job.alone]
    # Jobs that are alone wait for the others. On four GPUs they have the last at once.
    early = [job for job in alone if num_gpus >= 4 and len(job.on) == 1]
    queue = [
        *early,
        *MANY.get(num_gpus, []),
        *(ON_ONE if num_gpus == 1 else []),
        *DELTAS,
        *OF_RANKS,
        *(job for job in rest if job.tests not in known),
        *FRAMEWORKS,
        *(job for job in rest if job.tests in known),
        *(job for job in alone if job not in early),
        *LAST,
    ]
    return [job for job in queue if len(job.shares) <= num_gpus]
