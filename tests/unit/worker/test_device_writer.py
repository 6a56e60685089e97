"""The kernels that write a delta agree with torch; Triton's interpreter runs them."""

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
from vllm.inflight.delta.decode import decode_unproved, require_sound
from vllm.inflight.delta.device_decode import Launches
from vllm.inflight.errors import Malformed
from vllm.inflight.worker.delta.destinations import Destinations
from vllm.inflight.worker.delta.device_writer import DeviceWriter, copy_elements, warm
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
    changes = decode_unproved(part, launches=launches)
    writer.write(changes, note, launches)
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
    real, ran = kernels.write, []

    def write(*args, **options):
        ran.append(options["index_bits"])
        real(*args, **options)

    for most, index_bits in ((1 << 31, 32), (0, 64)):
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
        changes = decode_unproved(part)
        # One place of each tensor is so large that its last 32 bits are in it.
        beyond = changes.first_places + 3
        missed = [int(changes.places[at]) for at in beyond]
        changes.places[beyond] += 1 << 32
        shadow = {name: param.clone() for name, param in lives.items()}
        with MonkeyPatch.context() as patched:
            patched.setattr(device_writer, "MOST_SHORT", most)
            patched.setattr(kernels, "write", write)
            writer = DeviceWriter(CPU, lives, shadow, Targets.of(places))
            launches = Launches(CPU)
            writer.write(changes, lambda log: None, launches)
            launches.run()
        assert ran.pop() == index_bits and not ran
        for (name, (view, part, *_)), old, new, at in zip(
            forms.items(), olds, news, missed, strict=True
        ):
            new[at] = old.view(-1)[at]
            wanted = part(new.view(old.shape)).contiguous().view(torch.int16)
            assert torch.equal(
                view(shadow[name]).contiguous().view(torch.int16), wanted
            )


def check_logged(part, places, live, expected, results) -> None:
    """With delta staging the same goes into a log, and nothing is written yet."""
    before = {name: param.clone() for name, param in live.items()}
    log = ChangeLog(CPU, 1 << 20)
    writer = DeviceWriter(CPU, live, log, Targets.of(places))
    launches = Launches(CPU)
    # Where a tensor is cut, the places are needed before: they are decoded here then.
    changes = decode_unproved(part, launches=launches)
    writer.write(changes, None, launches)
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
    small = ChangeLog(CPU, 1 << 10)
    DeviceWriter(CPU, live, small, Targets.of(places)).write(changes, None, launches)
    assert small.num_bytes == log.num_bytes
    assert not small.has_room


def compile_kernels() -> None:
    """Compile both kernels for a GPU that need not be there."""
    from vllm.inflight.worker.delta import triton_kernels as kernels

    tables = {"rows": "*i64", "owners": "*i32"}
    for width, integer in kernels.INTEGERS.items():
        constants = [("INTEGER", integer), ("BLOCK", kernels.BLOCK)]
        compile_for_gpu(kernels._copy, tables, constants)
        constants += [("WIDTH", width), ("COLUMNS", kernels.COLUMNS)]
        sums = {"sums": "*i64", "log_sums": "*i64"}
        for index_bits, is_logged in product((0, 32, 64), (False, True)):
            own = [("INDEX_BITS", index_bits), ("IS_LOGGED", is_logged)]
            compile_for_gpu(kernels._write, tables | sums, [*constants, *own])


def staged() -> None:
    """A chain of deltas, written by the kernels into shadow weights of the host."""

    class OnDevice(DeltaWriter):
        def begin(self):
            super().begin()
            self._on_device = DeviceWriter(CPU, self._live, self._new, self._targets)

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
    changes = decode_unproved(part, launches=launches)
    memory = [weakref.ref(changes.places), weakref.ref(changes.bits)]
    writer.write(changes, lambda log: memory.append(weakref.ref(log.offsets)), launches)
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
            self._on_device = DeviceWriter(CPU, self._live, self._new, self._targets)

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
            ran.append(f"{name} {options.get('index_bits', '')}".strip())
            return real(*args, **options)

        setattr(module, name, run)
    names.remove("write")
    names += ["write 0", "write 32", "write 64"]
    warm(CPU, {torch.bfloat16, torch.float32, torch.float8_e4m3fn})
    assert sorted(ran) == sorted(names * 3)
    ran.clear()
    warm(CPU, {torch.bfloat16}, is_logged=True)
    assert sorted(ran) == sorted(name for name in names if name != "copy")


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
def test_places_are_divided_in_32_bits_or_in_64():
    succeeds(f"{__name__}:divided")


@pytest.mark.seconds
def test_kernels_write_what_torch_would():
    succeeds(f"{__name__}:check")


@pytest.mark.seconds
def test_the_kernels_compile_for_a_gpu(tmp_path):
    compiles(f"{__name__}:compile_kernels", tmp_path)
