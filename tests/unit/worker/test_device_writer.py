"""The kernels that write a delta agree with torch; Triton's interpreter runs them."""

import ctypes
import gc
import weakref
from itertools import product

import numpy as np
import pytest
import torch

from tests.support.deltas import random_bits, scattered, with_changes
from tests.support.shadow_on_host import shows, version
from tests.support.triton_compiler import compile_for_gpu, compiles
from tests.support.triton_interpreter import succeeds
from tests.unit.worker.test_delta_writer import delta, samples_of, started, stepped
from vllm.inflight import ops
from vllm.inflight.delta import Encoder
from vllm.inflight.delta.decode import require_sound
from vllm.inflight.delta.device_decode import Launches
from vllm.inflight.delta.part import PlaceForm
from vllm.inflight.errors import Malformed
from vllm.inflight.worker.delta.destinations import Destinations
from vllm.inflight.worker.delta.device_writer import (
    DeviceWriter,
    copy_elements,
    own_place,
    warm,
)
from vllm.inflight.worker.delta.targets import Targets
from vllm.inflight.worker.delta.writer import DeltaWriter
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.replay_plan import Copied, Entry, view_of
from vllm.inflight.worker.shadow.change_log import ChangeLog
from vllm.inflight.worker.shadow.changed_elements import elements
from vllm.inflight.worker.shadow.swap import swap_reference
from vllm.inflight.worker.staging import loader
from vllm.inflight.worker.verify.drift import drift

pytest.importorskip("triton", reason="Triton is not installed")

CPU = torch.device("cpu")
NOTHING = torch.empty(0)
HERE = {"cut": np.s_[:, 25:], "rows": np.s_[10:30]}
"""Tensors of which a rank has these elements."""


def copied(tensor, param, part, view) -> Copied:
    """The copy of a part of a tensor into a view of a parameter."""
    return Copied(param, view_of(view), view_of(part), NOTHING, is_exact=True)


def entry(tensor, *copies) -> Destinations:
    made = Entry(tensor.shape, tensor.dtype, list(copies), is_proved=True)
    return Destinations.of(made)


def check() -> None:
    """Runs where TRITON_INTERPRET was set before Triton was imported."""
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    old = {
        "fused": random_bits(bf16, 40 * 64).view(40, 64),
        "turned": random_bits(bf16, 48 * 32).view(48, 32),
        "cut": random_bits(bf16, 64 * 50).view(64, 50),
        "rows": random_bits(bf16, 64 * 50).view(64, 50),
        "norm": random_bits(torch.float32, 3001),
        "scaled": random_bits(fp8, 5000),
    }
    live = {
        "qkv": torch.zeros(100, 64, dtype=bf16),
        "turned": torch.zeros(32, 48, dtype=bf16),
        "cut": torch.zeros(64, 25, dtype=bf16),
        "rows": torch.zeros(20, 50, dtype=bf16),
        "norm": torch.zeros(3001),
        "scaled": torch.zeros(5000, dtype=torch.uint8).view(fp8),
    }
    views = {
        "fused": ("qkv", old["fused"], live["qkv"][50:90]),
        "turned": ("turned", old["turned"], live["turned"].t()),
        "cut": ("cut", old["cut"][HERE["cut"]], live["cut"]),
        "rows": ("rows", old["rows"][HERE["rows"]], live["rows"]),
        "norm": ("norm", old["norm"], live["norm"]),
        "scaled": ("scaled", old["scaled"], live["scaled"]),
    }
    for _, part, view in views.values():
        view.copy_(part)
    shadow = {name: param.clone() for name, param in live.items()}
    new = {
        name: with_changes(
            tensor.reshape(-1), scattered(tensor.numel(), 0.2), most=90
        ).view(tensor.shape)
        for name, tensor in old.items()
    }
    new["norm"][7], new["scaled"].view(torch.uint8)[9] = torch.inf, 0x7F
    encoder, parts = Encoder(), []
    for number, name in enumerate(old):
        parts += encoder.add(number, old[name], new[name])
    (part,) = [*parts, *encoder.finish()]
    part.check([t.numel() for t in old.values()], [t.itemsize for t in old.values()])
    places = [
        entry(old[name], copied(old[name], param, part_of, view))
        for name, (param, part_of, view) in views.items()
    ]
    writer = DeviceWriter(CPU, live, shadow, Targets.of(places))
    logs = []

    def note(log):
        # Whatever fails from here on, the elements are known.
        for name, param in shadow.items():
            bits = ops.INTEGERS[param.itemsize]
            assert torch.equal(elements(param, bits), elements(live[name], bits))
        assert (log.offsets == -1).all()
        logs.append(log)

    launches = Launches(CPU)
    changes = writer.write([part], note, launches)
    launches.run()
    require_sound([changes.fault])
    (log,) = logs
    expected = {name: param.clone() for name, param in live.items()}
    of_view = {
        "qkv": lambda p: p[50:90],
        "turned": lambda p: p.t(),
    }
    for name, (param, _, _) in views.items():
        part_of = new[name][HERE.get(name, ...)]
        of_view.get(param, lambda p: p)(expected[param]).copy_(part_of)
    for name, param in expected.items():
        bits = ops.INTEGERS[param.itemsize]
        assert torch.equal(elements(shadow[name], bits), elements(param, bits)), name
    for (name, tensor), (a, b, bad, num) in zip(
        old.items(), writer.results().tolist(), strict=True
    ):
        difference = ops.Digest(a % 2**64, b % 2**64)
        whole = [ops.digest([each])[0] for each in (tensor, new[name])]
        bits = ops.INTEGERS[tensor.itemsize]
        differ = tensor.view(bits) != new[name].view(bits)
        if name in HERE:
            cut = [each[HERE[name]] for each in (tensor, new[name])]
            first = cut[0].storage_offset()
            whole = [ops.digest_part(each, each.stride(), first) for each in cut]
            differ = differ[HERE[name]]
        assert whole[0] + difference == whole[1], name
        assert num == int(differ.sum()), name
        now = new[name][HERE.get(name, ...)]
        is_bad = ~now.float().isfinite() & differ
        assert bad == int(is_bad.sum()), (name, bad)
    check_logged(part, places, live, expected, writer.results().tolist())
    # After a flip the other set is brought up by the log.
    some = {"qkv", "norm"}
    logs = [log.without(some), log.without(log.params - some)]
    assert copy_elements(logs, shadow, live) == log.num_bytes
    for name, param in expected.items():
        bits = ops.INTEGERS[param.itemsize]
        assert torch.equal(elements(live[name], bits), elements(param, bits)), name


def divided() -> None:
    """Places of turned and cut tensors are divided in 32 bits, and in 64 if they need
    them; a place that malformed data makes too large is written in neither case."""
    from pytest import MonkeyPatch

    from vllm.inflight.worker.delta import device_writer
    from vllm.inflight.worker.delta import triton_kernels as kernels

    bf16 = torch.bfloat16
    forms = {
        "turned": (lambda p: p.t(), lambda t: t, (12, 20), (20, 12)),
        "columns": (lambda p: p, lambda t: t[:, 8:], (12, 20), (12, 12)),
        "deep": (lambda p: p.permute(2, 0, 1), lambda t: t, (5, 4, 6), (4, 6, 5)),
        "steps": (lambda p: p, lambda t: t[1::2, ::3], (12, 21), (6, 7)),
    }
    real, ran, missed = kernels.write, [], []

    def write(table, *args, place_bytes, index_bits):
        ran.append((place_bytes, index_bits))
        kind = np.int32 if place_bytes == 4 else np.int64
        for address, num in table.view(-1, kernels.COLUMNS)[:, [0, 5]].tolist():
            memory = (ctypes.c_byte * (num * place_bytes)).from_address(address)
            places = np.frombuffer(memory, dtype=kind)
            missed.append(int(places[3]))
            # The last bits of a place that is too large, or less than 0, are in it.
            places[3] += -1 << 31 if place_bytes == 4 else 1 << 32
        real(table, *args, place_bytes=place_bytes, index_bits=index_bits)

    # In the second case one of the tensors is too long alone.
    for most, sizes in ((1 << 31, (4, 32)), (250, (8, 64))):
        olds, lives, places = [], {}, []
        for name, (view, part, shape, served) in forms.items():
            old = random_bits(bf16, torch.Size(shape).numel(), 1).view(shape)
            lives[name] = torch.zeros(served, dtype=bf16)
            view(lives[name]).copy_(part(old))
            olds.append(old)
            places.append(entry(old, copied(old, name, part(old), view(lives[name]))))
        news = [
            with_changes(old.reshape(-1), scattered(old.numel(), 0.3), most=9)
            for old in olds
        ]
        encoder, parts = Encoder(), []
        for number, (old, new) in enumerate(zip(olds, news, strict=True)):
            parts += encoder.add(number, old, new.view(old.shape))
        (part,) = [*parts, *encoder.finish()]
        part.check([old.numel() for old in olds], [2] * len(olds))
        shadow = {name: param.clone() for name, param in lives.items()}
        with MonkeyPatch.context() as patched:
            patched.setattr(device_writer, "MOST_SHORT", most)
            patched.setattr(kernels, "write", write)
            writer = DeviceWriter(CPU, lives, shadow, Targets.of(places))
            launches = Launches(CPU)
            writer.write([part], lambda log: None, launches)
            launches.run()
        assert ran.pop() == sizes and not ran
        for (name, (view, part, *_)), old, new, at in zip(
            forms.items(), olds, news, missed, strict=True
        ):
            new[at] = old.view(-1)[at]
            wanted = part(new.view(old.shape)).contiguous().view(torch.int16)
            assert torch.equal(
                view(shadow[name]).contiguous().view(torch.int16), wanted
            )
        missed.clear()


def check_logged(part, places, live, expected, results) -> None:
    """With delta staging the same goes into a log, and nothing is written yet."""
    before = {name: param.clone() for name, param in live.items()}
    log = ChangeLog(CPU, 1 << 20)
    writer = DeviceWriter(CPU, live, log, Targets.of(places))
    launches = Launches(CPU)
    # Where a tensor is cut, the places are needed before: they are decoded here then.
    changes = writer.write([part], None, launches)
    launches.run()
    require_sound([changes.fault])
    assert writer.results().tolist() == results
    # No room is taken by what other ranks serve.
    assert log.num_elements == sum(num for *_, num in results)
    for name, param in live.items():
        bits = ops.INTEGERS[param.itemsize]
        assert torch.equal(elements(param, bits), elements(before[name], bits))
    assert swap_reference(log.entries.stretches, before) == log.expected()
    for name, param in expected.items():
        bits = ops.INTEGERS[param.itemsize]
        assert torch.equal(elements(before[name], bits), elements(param, bits)), name
    # Host memory that the log goes on in makes no difference.
    half = ChangeLog(CPU, log.num_bytes // 2, 1 << 20)
    writer = DeviceWriter(CPU, live, half, Targets.of(places))
    writer.write([part], None, launches)
    launches.run()
    assert writer.results().tolist() == results and half.host_bytes
    again = {name: param.clone() for name, param in live.items()}
    assert swap_reference(half.entries.stretches, again) == half.expected()
    for name, param in expected.items():
        bits = ops.INTEGERS[param.itemsize]
        assert torch.equal(elements(again[name], bits), elements(param, bits)), name
    # Without room it is told what may be missing, and a little more.
    for capacity in (1 << 10, log.num_bytes - 64):
        small = ChangeLog(CPU, capacity)
        launches = Launches(CPU)
        writer = DeviceWriter(CPU, live, small, Targets.of(places))
        writer.write([part], None, launches)
        assert not small.has_room
        assert 1 <= small.num_bytes / log.num_bytes < 1.5


def malformed() -> None:
    """Offsets that are noted stay within the parameter, whatever the data is, even if
    what follows the decoding does not run."""
    from pytest import MonkeyPatch

    from vllm.inflight.worker.delta import triton_kernels as kernels

    def fails(*args: object, **options: object) -> None:
        raise RuntimeError("no launch")

    size = 200_000
    runs = torch.cat([torch.arange(n * 40_000, n * 40_000 + 6_000) for n in range(4)])
    short = torch.cat([torch.arange(n * 64, n * 64 + 50) for n in range(4)])
    forms = set()
    for num, at in ((300, torch.arange(0, 300, 2)), (300, short), (size, runs)):
        old = torch.zeros(num, dtype=torch.int16)
        new = with_changes(old, at, most=9)
        encoder, logs = Encoder(values="raw"), []
        (part,) = [*encoder.add(0, old, new), *encoder.finish()]
        part.check([num], [2])
        forms.add(int(part.rows["form"][0]))
        begin = int(part.rows["places_at"][0])
        if part.rows["form"][0] == PlaceForm.BITMAP:
            part.data[begin : begin + num // 8] = 0
            part.data[begin + num // 8] = 0xFF  # the last bits are beyond the end
        else:
            part.data[begin : begin + 4].view(torch.int32)[0] = 1 << 30
        target = {"0": old.clone()}
        writer = DeviceWriter(CPU, {"0": old}, target, Targets.of([own_place(0, old)]))
        launches = Launches(CPU)
        with MonkeyPatch.context() as patch:
            patch.setattr(kernels, "write", fails)
            writer.write([part], logs.append, launches)
            with pytest.raises(RuntimeError, match="no launch"):
                launches.run()
        assert int(logs[0].offsets.min()) >= -1
        assert int(logs[0].offsets.max()) < num, part.rows["form"]
    assert forms == {PlaceForm.BITMAP, PlaceForm.RUNS}


def compile_kernels() -> None:
    """Compile the kernels for a GPU that need not be there."""
    from vllm.inflight.worker.delta import triton_kernels as kernels

    tables = {"rows": "*i64", "owners": "*i32"}
    for width, integer in kernels.INTEGERS.items():
        constants = [("INTEGER", integer), ("BLOCK", kernels.BLOCK)]
        compile_for_gpu(kernels._copy, tables, constants)
        constants += [("WIDTH", width), ("COLUMNS", kernels.COLUMNS)]
        sums = {"sums": "*i64", "log_sums": "*i64"}
        for (place, index_bits), is_logged in product(
            [(4, 0), (4, 32), (8, 0), (8, 32), (8, 64)], (False, True)
        ):
            own = [("INDEX_BITS", index_bits), ("IS_LOGGED", is_logged)]
            own += [("PLACE", kernels.INTEGERS[place])]
            compile_for_gpu(kernels._write, tables | sums, [*constants, *own])


def staged() -> None:
    """A chain of deltas, written by the kernels into shadow weights of the host."""

    class OnDevice(DeltaWriter):
        def begin(self):
            super().begin()
            self._on_device = DeviceWriter(
                CPU, self._live, self._new, self._targets, self._samples
            )

    loader.DeltaWriter = OnDevice
    with Arena.open(CPU, 1 << 26) as arena:
        sets, old = started(arena), version(1)
        for seed in range(3):
            # A third of the norm's 16 elements is a bitmap, a single one is whole.
            new = stepped(old, seed, share=0.3 if seed else 0.05)
            manifest, parts = delta(old, new, sets.stager.served.digest())
            broken = {name: part.clone() for name, part in parts.items()}
            broken["delta.0.data"][:12] = 255  # chunks, or places
            with pytest.raises(Malformed, match="malformed: row "):
                sets.stage(broken.items(), manifest=manifest)
            assert shows(sets.live, old)
            sets.stage(parts.items(), manifest=manifest)
            assert shows(sets.second, new)
            sets.stager.flip()
            assert shows(sets.live, new)
            samples = sets.stager.served.samples
            assert drift(samples_of(new), samples)["overall"] == 0
            old = new


def given_up() -> None:
    """The memory that the tables refer to lives until the kernels have run, even if
    nobody keeps the log of places: else the tables themselves would get it."""
    bf16 = torch.bfloat16
    old = random_bits(bf16, 5000)
    new = with_changes(old, scattered(old.numel(), 0.2))
    encoder = Encoder()
    (part,) = [*encoder.add(0, old, new), *encoder.finish()]
    part.check([old.numel()], [old.itemsize])
    live, shadow = {"norm": old}, {"norm": old.clone()}
    places = [entry(old, copied(old, "norm", old, live["norm"]))]
    writer = DeviceWriter(CPU, live, shadow, Targets.of(places))
    launches = Launches(CPU)
    memory = []
    changes = writer.write(
        [part], lambda log: memory.append(weakref.ref(log.offsets)), launches
    )
    memory += [weakref.ref(changes.places), weakref.ref(changes.bits)]
    del changes
    gc.collect()
    assert len(memory) == 3 and all(each() is not None for each in memory)
    launches.run()
    assert torch.equal(shadow["norm"].view(torch.int16), new.view(torch.int16))
    assert all(each() is None for each in memory)


def large() -> None:
    """The same when a shadow model gives up the log of a delta that changes much."""

    class OnDevice(DeltaWriter):
        def begin(self):
            super().begin()
            self._on_device = DeviceWriter(
                CPU, self._live, self._new, self._targets, self._samples
            )

    loader.DeltaWriter = OnDevice
    noted, num_given_up = [], 0
    run = Launches.run

    def run_all(launches):
        nonlocal num_given_up
        assert all(each() is not None for each in noted)
        run(launches)
        num_given_up += sum(each() is None for each in noted)
        noted.clear()

    Launches.run = run_all
    with Arena.open(CPU, 1 << 26) as arena:
        sets, old = started(arena), version(1)
        sets.shadow.nbytes = sum(tensor.nbytes for tensor in old.values())
        note = sets.shadow.note_changed

        def note_changed(log):
            noted.append(weakref.ref(log.offsets))
            note(log)

        sets.shadow.note_changed = note_changed
        for seed in range(3):
            new = stepped(old, seed, share=0.3)
            manifest, parts = delta(old, new, sets.stager.served.digest())
            sets.stage(parts.items(), manifest=manifest)
            assert shows(sets.second, new)
            sets.stager.flip()
            old = new
    assert num_given_up


def warmed() -> None:
    """Warming runs every kernel that a delta of these dtypes needs."""
    from vllm.inflight.delta import triton_kernels as codec
    from vllm.inflight.worker.delta import triton_kernels as kernels

    ran = []
    names = ["decode_gaps", "decode_others", "decode_runs"]
    rooms = [codec] * 3 + [kernels] * 3
    names += ["write", "sample", "copy"]
    for module, name in zip(rooms, names, strict=True):
        real = getattr(module, name)

        def run(*args, real=real, name=name, **options):
            sizes = options.get("place_bytes", 0), options.get("index_bits", 0)
            ran.append((name, *sizes))
            return real(*args, **options)

        setattr(module, name, run)
    names = ["decode_gaps", "decode_others", "decode_runs", "sample"]

    def wanted(place_bytes, index_bits):
        short = [(name, place_bytes, 0) for name in names]
        return [*short, *(("write", place_bytes, bits) for bits in (0, index_bits))]

    warm(CPU, {torch.bfloat16, torch.float32, torch.float8_e4m3fn})
    assert sorted(ran) == sorted([*wanted(4, 32), ("copy", 0, 0)] * 3)
    ran.clear()
    every = {torch.int8, torch.bfloat16, torch.float32, torch.float64}
    warm(CPU, every, is_logged=True, has_long=True)
    assert sorted(ran) == sorted((wanted(4, 32) + wanted(8, 64)) * 4)


@pytest.mark.seconds
def test_kernels_are_compiled_by_writing_a_delta():
    succeeds(f"{__name__}:warmed")


@pytest.mark.seconds
def test_kernels_stage_a_chain_of_deltas():
    succeeds(f"{__name__}:staged")


@pytest.mark.seconds
@pytest.mark.parametrize("delta_of", ["given_up", "large"])
def test_what_kernels_write_into_lives_until_they_have_run(delta_of):
    succeeds(f"{__name__}:{delta_of}")


@pytest.mark.seconds
def test_noted_offsets_stay_within_the_parameter_whatever_the_data_is():
    succeeds(f"{__name__}:malformed")


@pytest.mark.seconds
def test_places_are_divided_in_32_bits_or_in_64():
    succeeds(f"{__name__}:divided")


@pytest.mark.seconds
def test_kernels_write_what_torch_would():
    succeeds(f"{__name__}:check")


@pytest.mark.seconds
def test_the_kernels_compile_for_a_gpu(tmp_path):
    compiles(f"{__name__}:compile_kernels", tmp_path)
