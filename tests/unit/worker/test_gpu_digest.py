"""The digest of a GPU equals the CPU's; Triton's interpreter stands in for a GPU."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.triton_compiler import compile_for_gpu, compiles
from tests.support.triton_interpreter import succeeds
from vllm.inflight import ops
from vllm.inflight.ops import gpu_digest as audit_module
from vllm.inflight.ops.gpu_digest import ROWS, GpuDigest, nonfinite_width, warm

pytest.importorskip("triton", reason="Triton is not installed")

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e8m0fnu,
    torch.int8,
    torch.int32,
]


def content(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bytes; every 7th value of a float is an infinity or a NaN."""
    torch.manual_seed(len(shape))
    if not dtype.is_floating_point:
        return torch.randint(-100, 100, shape, dtype=dtype)
    values = torch.randn(shape)
    values.view(-1)[::7] = torch.nan
    return values.to(dtype)


def check() -> None:
    """Runs where TRITON_INTERPRET was set before Triton was imported."""
    audit = GpuDigest(torch.device("cpu"), {})
    tensors = {
        f"{dtype}{shape}": content(dtype, *shape)
        for dtype in DTYPES
        for shape in ((), (1,), (3,), (8,), (33, 7), (5000,))
    }
    tensors["empty"] = torch.empty(0, dtype=torch.bfloat16)
    tensors["view"] = content(torch.bfloat16, 40, 30).t()[3:, 1::2]
    tensors["odd address"] = content(torch.bfloat16, 101)[1:]
    pairs = list(tensors.items())
    audit.add(pairs[:20])
    for pair in pairs[20:]:
        audit.add([pair])
    seen = {name: (digest, bad) for name, digest, bad in audit.results()}
    assert seen.keys() == tensors.keys()
    # Those that stay where they are may come together, and late.
    plan: Any = SimpleNamespace(is_home=lambda name, tensor: "int" not in name)
    num_passing = sum("int" in name for name, _ in pairs)
    for at_once, are_some_early in ((1000, True), (1 << 30, False)):
        audit_module.AT_ONCE_BYTES = at_once
        later = GpuDigest(torch.device("cpu"), {}, plan)
        for pair in pairs:
            later.add([pair])
        assert (len(later._added) > num_passing) == are_some_early
        assert {name: (d, bad) for name, d, bad in later.results()} == seen
    values = list(tensors.values())
    wanted = zip(ops.digest(values), ops.count_nonfinite(values), strict=True)
    for name, expected in zip(tensors, wanted, strict=True):
        assert seen[name] == expected, name
    check_runs()
    check_converted()


def check_warm() -> None:
    """Kernels are compiled for dtypes that no parameter has, and for packed ones."""
    packed = [getattr(torch, "float4_e2m1fn_x2", torch.uint8), torch.float8_e8m0fnu]
    warm(torch.device("cpu"), {*PLAIN, *packed, torch.bool, torch.int64})


def check_runs() -> None:
    """The digests of runs of elements add up to that of their tensor."""
    whole = content(torch.bfloat16, 200_000)
    cuts = [0, 4, 8, 1000, 1100, 131_072, 199_996, 200_000]
    runs = {f"{a}": (whole[a:b], 2 * a) for a, b in pairwise(cuts)}
    audit = GpuDigest(torch.device("cpu"), {})
    first_bytes = {name: first for name, (_, first) in runs.items()}
    audit.add([(name, run.clone()) for name, (run, _) in runs.items()], first_bytes)
    total = ops.Digest.ZERO
    for name, digest, _ in audit.results():
        run, first = runs[name]
        assert digest == ops.digest_slice(run, whole.shape, (first // 2,))
        total += digest
    assert total == ops.digest([whole])[0]


PLAIN = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def check_converted() -> None:
    """What is an infinity in the dtype that it is served in is counted."""
    found: dict[str, tuple[torch.Tensor, torch.dtype]] = {}
    for dtype in PLAIN:
        for served_as in PLAIN:
            limit = ops.nonfinite_limit(dtype, served_as)
            about = torch.arange(max(0, limit - 9), limit + 9)
            values = about.to(ops.INTEGERS[dtype.itemsize]).view(dtype)
            both = torch.cat([values, -values, torch.randn(999).to(dtype)])
            found[f"{dtype} {served_as}"] = both, served_as
    audit = GpuDigest(torch.device("cpu"), {}, None, lambda name, dtype: found[name][1])
    audit.add([(name, tensor) for name, (tensor, _) in found.items()])
    for name, _, bad in audit.results():
        tensor, served_as = found[name]
        assert bad == int((~tensor.to(served_as).isfinite()).sum()) >= 18, name


@pytest.mark.seconds
def test_digests_and_counts_are_those_of_the_cpu():
    succeeds(f"{__name__}:check")


@pytest.mark.seconds
def test_kernels_are_compiled_for_every_dtype_of_a_checkpoint():
    succeeds(f"{__name__}:check_warm")


def test_an_audit_of_nothing_says_nothing():
    assert GpuDigest(torch.device("cpu"), {}).results() == []


def test_a_digest_run_may_have_more_tensors_than_one_table_has_rows():
    audit = GpuDigest(torch.device("cpu"), {})
    empty = torch.empty(0, dtype=torch.int8)
    audit.add([(str(number), empty) for number in range(ROWS - 2)])
    audit.add([(str(number), empty) for number in range(ROWS - 2, 3 * ROWS)])
    results = audit.results()
    assert [name for name, *_ in results] == [str(n) for n in range(3 * ROWS)]
    assert {digest for _, digest, _ in results} == {ops.Digest.ZERO}


def test_a_table_is_made_on_the_host_and_copied_once():
    from vllm.inflight.ops.triton_kernels import CHUNKS_PER_PROGRAM, make_table

    with torch.device("meta"):  # whatever device is the default of a thread
        places = [(64, 3, 5), (8, CHUNKS_PER_PROGRAM + 1, 1 << 62)]
        table = make_table(places, torch.device("cpu"))
    assert table is not None
    assert table.rows.tolist() == [
        [64, 3, 0, 0, 5, 0],
        [8, CHUNKS_PER_PROGRAM + 1, 0, 1, 1 << 62, 1],
    ]
    assert table.owners.tolist() == [0, 1, 1]
    owned, owners = (each.untyped_storage().data_ptr() for each in table)
    assert owned == owners


def test_integer_tensors_are_not_searched_for_nonfinite_values():
    assert nonfinite_width(torch.int8) == 0


def test_memory_that_a_kernel_uses_is_recorded_on_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU only the call can be seen: no stream uses memory of the host."""
    users: list[Any] = []
    rows, page = (SimpleNamespace(record_stream=users.append) for _ in range(2))
    table = SimpleNamespace(rows=rows)
    triton_module = "vllm.inflight.ops.triton_kernels"
    monkeypatch.setattr(f"{triton_module}.make_table", lambda *_, **__: table)
    monkeypatch.setattr(f"{triton_module}.add_sums", lambda *_: None)
    audit: Any = GpuDigest(torch.device("cpu"), {})
    audit._stream, audit._pages = "a stream", [page]
    audit.add([("a", torch.ones(8))])
    assert users == ["a stream"] * 2


def compile_kernels() -> None:
    """Compile the digest for a GPU that need not be there, for every width."""
    from vllm.inflight.ops import triton_kernels as kernels

    tables = {"rows": "*i64", "owners": "*i32", "sums": "*i64"}
    tables |= {"first_row": "i32", "page": "i64"}
    for width in (0, 1, 2, 4, 8):
        sizes = [("BLOCK", kernels.CHUNKS_PER_STEP), ("NUM_STEPS", kernels.STEPS)]
        compile_for_gpu(kernels._audit, tables, [("WIDTH", width), *sizes])


@pytest.mark.seconds
def test_the_digest_compiles_for_a_gpu(tmp_path):
    compiles(f"{__name__}:compile_kernels", tmp_path)


def test_tables_of_memory_that_no_longer_comes_are_dropped(monkeypatch):
    """A trainer may lend other memory at each update."""
    from vllm.inflight.ops import triton_kernels

    monkeypatch.setattr(triton_kernels, "add_sums", lambda *_: None)
    tables: audit_module.Tables = {}
    lent = [torch.zeros(8) for _ in range(6)]
    for tensor in lent:
        digest = GpuDigest(torch.device("cpu"), tables)
        digest.add([("a", tensor)])
        digest.results()
    assert len(tables) <= 2
    (*_, last) = tables
    assert last[0][0] == lent[-1].data_ptr()
