"""Long histories of deltas and all else that changes weights, beside a model of them.

The model is a dictionary of tensors for each version. After every move the engine has
to serve just what the model says.
"""

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config.weight_transfer import WeightTransferConfig

from tests.support.deltas import delta_between, stepped
from tests.support.engines.mirrored import mirrored
from tests.support.engines.probe import greedy
from tests.support.engines.sleeping_with_a_log import sleeping_with_a_log
from tests.support.engines.unpacked import CAN_UNPACK_EXPERTS, unpacked
from tests.support.models.families import cpu_options
from vllm.inflight import ops
from vllm.inflight.errors import InflightError
from vllm.inflight.trainer import Publisher
from vllm.inflight.trainer.deltas.published import version_digest
from vllm.inflight.update import TensorSpec

pytestmark = pytest.mark.engine

Tensors = dict[str, torch.Tensor]
Served = tuple[Tensors, str, list[list[int]]]
"""A version, its digest, and its tokens."""

LENGTH = 60
"""Moves of a history."""
MOVES = {
    **{"delta": 40, "rollback": 12, "damaged": 10, "nothing": 3, "whole": 3},
    **{"subset": 3, "elsewhere": 3, "trainer again": 4, "sleep": 3, "deep sleep": 2},
    **{"restart": 1, "aborted": 8},
}
"""What may come next, and how often of all."""
DAMAGES = ("lost", "twice", "cut off", "other bits", "other base", "out of order")

STAGING = {"inflight": {"staging": "delta", "delta_gib": 0.05}}


def digest_of(weights: Tensors) -> str:
    """The digest of a version."""
    digests = ops.digest(list(weights.values()))
    return version_digest(
        {
            name: TensorSpec(
                name,
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                digest.hex(),
            )
            for (name, tensor), digest in zip(weights.items(), digests, strict=True)
        }
    )


class History:
    """An engine, a trainer of it, and what they have to agree upon.

    Args:
        llm: the engine.
        weights: of the first version.
        folder: for files.
        seed: decides about all moves.
        may_sleep: whether the engine can.
        has_log: whether it keeps the way back beside an update that it logs.
        start: starts the engine again; None if it does not end.
        without: moves that do not come.

    """

    def __init__(
        self,
        llm: Any,
        weights: Tensors,
        folder: Path,
        seed: int,
        *,
        may_sleep: bool,
        has_log: bool,
        start: Callable[[], Any] | None = None,
        without: Collection[str] = (),
    ) -> None:
        self._llm, self._folder, self._random = llm, folder, Random(seed)
        self._has_log, self._start, self._first = has_log, start, dict(weights)
        left_out = {*without, *([] if may_sleep else ["sleep", "deep sleep"])}
        left_out |= set() if start else {"restart"}
        self._moves = {m: n for m, n in MOVES.items() if m not in left_out}
        self.served, self._before = dict(weights), None
        """What the engine has to serve, and may be rolled back to."""
        self._next = dict(weights)
        self.num_deltas = 0
        self._to = self._trainer()
        for _ in range(2):  # the digest of what an engine starts with is not known
            self._publish()
        self.num_deltas = 0

    def _trainer(self) -> Publisher:
        kept = self._folder / "kept.safetensors"
        return Publisher(self._llm, lambda: self._next, delta_file=kept)

    def _publish(self, **how: Any) -> Any:
        outcome = self._to.publish(**how)
        self._before, self.served = self.served, dict(self._next)
        self.num_deltas += outcome.is_delta
        return outcome

    def move(self, name: str | None = None) -> str:
        """Do this, or what comes next; returns what it was."""
        if name is None:
            names, counts = zip(*self._moves.items(), strict=True)
            (name,) = self._random.choices(names, counts)
        getattr(self, "_" + name.replace(" ", "_"))()
        return str(name)

    def _step(self, share: float) -> Tensors:
        return stepped(self.served, self._random.randrange(1 << 30), share)

    def _delta(self) -> None:
        self._next = self._step(self._random.choice((0.0005, 0.01, 0.05)))
        self._publish()

    def _nothing(self) -> None:
        self._next = dict(self.served)
        self._publish()

    def _whole(self) -> None:
        self._next = self._step(1.0)
        assert not self._publish().is_delta

    def _subset(self) -> None:
        new = self._step(0.1)
        # A layer's matrices may be one parameter of the engine.
        layers = sorted({name.rpartition(".")[0].rpartition(".")[0] for name in new})
        layer = self._random.choice(layers)
        chosen = {n for n in new if n.rpartition(".")[0].rpartition(".")[0] == layer}
        self._next = {n: new[n] for n in chosen}
        self._to.publish(subset=sorted(chosen))
        self._before, self.served = self.served, {**self.served, **self._next}
        self._next = dict(self.served)

    def _rollback(self) -> None:
        if self._before is None:
            return
        self._to.rollback()
        self.served, self._before = self._before, self.served

    def _elsewhere(self) -> None:
        """Another trainer's version."""
        self._before, self.served = self.served, self._step(0.5)
        file = self._folder / "elsewhere.safetensors"
        save_file(self.served, file)
        self._llm.update_weights_from_disk(str(file))

    def _trainer_again(self) -> None:
        self._to.close()
        self._to = self._trainer()

    def _sleep(self) -> None:
        self._llm.sleep(level=1)
        self._llm.wake_up()
        self._before = None  # its memory was given back

    def _deep_sleep(self) -> None:
        """The weights are lost, and the next version fills them in place."""
        self._llm.sleep(level=2)
        self._llm.wake_up()
        assert self._llm.weight_info()["weights"] == "gone"
        with pytest.raises(InflightError):
            self._to.rollback()
        self._next = self._step(0.01)
        assert not self._publish().is_delta
        self._before = None

    def _restart(self) -> None:
        """The engine ends, and another one serves what this one has started with."""
        assert self._start is not None
        self._to.close()
        self._llm = self._start()
        self._to = self._trainer()
        self._before, self.served = None, dict(self._first)
        self._next = self._step(0.01)
        assert not self._publish().is_delta
        self._before = None  # whose digest is not known

    def _damaged(self, what: str | None = None) -> None:
        """A delta by hand that something happens to; then nothing changes."""
        what = what or self._random.choice(DAMAGES)
        options = {"max_part_bytes": 64 << 10, "values": "raw"}
        base, new = digest_of(self.served), self._step(0.3)
        manifest, parts = delta_between(self.served, new, base, **options)
        chunks = [{name: parts[name].clone()} for name in parts]
        at = self._random.randrange(len(chunks))
        (name,) = chunks[at]
        if what == "lost":
            del chunks[at]
        elif what == "twice":
            chunks.insert(at, dict(chunks[at]))
        elif what == "cut off":
            chunks[at] = {name: parts[name][:-8].clone()}
        elif what == "other bits":
            chunks[at][name][len(parts[name]) // 2] ^= 1
        elif what == "other base":
            manifest["base"] = digest_of(new)
        else:
            self._random.shuffle(chunks)
        try:
            update_id = self._llm.start_weight_update(manifest=manifest)["update_id"]
            try:
                file = self._folder / "chunk.safetensors"
                for chunk in chunks:
                    save_file(chunk, file)
                    info = {"update_info": {"path": str(file)}}
                    self._llm.update_weights(info, update_id=update_id)
                self._llm.finish_weight_update(update_id=update_id)
            except InflightError:
                if self._llm.weight_update_status()["active"] is not None:
                    self._llm.abort_weight_update(update_id=update_id)
                raise
        except InflightError as error:
            assert what != "out of order", error
            self._was_not_committed()
            return
        # A bit may be one of the padding. Then the delta leads to the same version.
        assert what in ("out of order", "other bits")
        self._before, self.served = self.served, new

    def _aborted(self) -> None:
        """A version that is staged, and not wanted any more."""
        file = self._folder / "aborted.safetensors"
        save_file(self._step(self._random.choice((0.01, 1.0))), file)
        update_id = self._llm.start_weight_update()["update_id"]
        self._llm.update_weights({"path": str(file)}, update_id=update_id)
        if self._random.random() < 0.7:
            self._llm.prepare_weight_update(update_id=update_id)
        self._llm.abort_weight_update(update_id=update_id)
        self._was_not_committed()

    def _was_not_committed(self) -> None:
        """An update ended, which may have been written over what was served before."""
        if not self._has_log:
            self._before = None

    def check(self, what: object) -> None:
        """The engine serves what it has to, and can go back to what it has to."""
        previous = self._llm.weight_info()["previous"]
        if self._before is not None:
            assert previous["digest"] == digest_of(self._before), what
        assert self._llm.weight_info()["digest"] == digest_of(self.served), what
        assert self._llm.weight_update_status()["active"] is None, what

    def said(self) -> Served:
        """What the engine serves, its digest, and what it says."""
        return dict(self.served), self._llm.weight_info()["digest"], greedy(self._llm)

    def close(self) -> None:
        """Compare with the same version sent whole: tokens, and live weights."""
        self._to.close()
        said, scrubbed = greedy(self._llm), self._llm.verify_weights()["result"]
        with Publisher(self._llm, lambda: self.served, delta="off") as to:
            to.publish()
        assert greedy(self._llm) == said
        assert scrubbed == "equal"


@contextmanager
def unpacked_with_a_log() -> Iterator[None]:
    with unpacked(), sleeping_with_a_log():
        yield


KINDS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "second set": nullcontext,
    "second set as on a GPU": mirrored,
    "delta staging": unpacked_with_a_log,
}
"""Engines by how they have their weights twice, or do not."""


@pytest.fixture(scope="module", params=["second set", "delta staging"])
def engine(
    request: pytest.FixtureRequest,
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
) -> Iterator[tuple[Callable[..., Any], bool]]:
    """Starts an engine, and whether it has a log."""
    has_log = request.param == "delta staging"

    def made(folder: Path | None = None, **options: Any) -> Any:
        family = options.pop("family", None)
        shape = {} if family is None else {"family": family}
        options |= {} if family is None else cpu_options(family)
        options |= {"additional_config": STAGING} if has_log else {}
        local = WeightTransferConfig(backend="local")
        folder = folder or checkpoint(0, **shape)
        return start(folder, weight_transfer_config=local, **options), folder

    with KINDS[request.param]():
        yield made, has_log


def weights_of(folder: Path) -> Tensors:
    """All tensors of a checkpoint."""
    files = folder.glob("*.safetensors")
    return {name: t for file in files for name, t in load_file(file).items()}


def played(history: History, length: int, given: Mapping[int, str] = {}) -> None:
    """Play a history.

    Args:
        history: at its first version.
        length: its moves.
        given: those of them that are not left to chance, by their number. After all
            of them, a delta is rolled back.

    """
    moves: list[str] = []
    history.check("the first version")
    given = {**given, length: "delta", length + 1: "rollback"}
    for number in range(length + 2):
        moves.append(history.move(given.get(number)))
        history.check(moves)
    history.close()


@pytest.fixture(scope="module")
def tiny(engine: tuple[Callable[..., Any], bool]) -> tuple[Any, Path, bool]:
    """An engine that may sleep, where it has started, and whether it has a log."""
    made, has_log = engine
    llm, folder = made()
    llm.llm_engine.vllm_config.model_config.enable_sleep_mode = True
    return llm, folder, has_log


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 12))]
)
def test_a_history_is_that_of_its_model(
    tiny: tuple[Any, Path, bool],
    engine: tuple[Callable[..., Any], bool],
    tmp_path: Path,
    seed: int,
) -> None:
    llm, folder, has_log = tiny

    def again() -> Any:
        llm, _ = engine[0]()
        llm.llm_engine.vllm_config.model_config.enable_sleep_mode = True
        return llm

    can = {"may_sleep": True, "has_log": has_log, "start": again}
    given = {20: "sleep", 30: "deep sleep", 40: "restart"}
    played(History(llm, weights_of(folder), tmp_path, seed, **can), LENGTH, given)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_delta_changes_nothing_and_the_next_one_works(
    tiny: tuple[Any, Path, bool], tmp_path: Path, damage: str
) -> None:
    llm, folder, has_log = tiny
    can = {"may_sleep": False, "has_log": has_log}
    history = History(llm, weights_of(folder), tmp_path, 0, **can)
    for number in range(2):
        history._delta()
        history._damaged(damage)
        history.check((damage, number))
    if damage not in ("out of order", "other bits"):  # which may be a version
        history._delta()
        assert history.num_deltas == 3
    history.close()


@pytest.mark.parametrize("engine", KINDS, indirect=True)
def test_a_chain_of_fifty_deltas_with_rollbacks_equals_fresh_engines(
    tiny: tuple[Any, Path, bool],
    engine: tuple[Callable[..., Any], bool],
    tmp_path: Path,
) -> None:
    llm, folder, has_log = tiny
    can = {"may_sleep": False, "has_log": has_log}
    history, seen = History(llm, weights_of(folder), tmp_path, 0, **can), []
    for number in range(50):
        history._delta()
        history.check(number)
        if number % 7 == 3:
            for _ in range(2):
                history._rollback()
                history.check(number)
        if number % 14 == 3 or number == 49:  # after two rollbacks, and at the end
            seen.append(history.said())
    assert history.num_deltas == 50
    history.close()
    are_those_of_fresh_engines(engine[0], folder, seen, tmp_path / "fresh")


def are_those_of_fresh_engines(
    made: Callable[..., Any], like: Path, seen: list[Served], folder: Path
) -> None:
    """Start an engine on the last version, and give it the others as whole ones."""
    shutil.copytree(like, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    assert len({digest for _, digest, _ in seen}) == len(seen) > 3
    for number, (weights, digest, tokens) in enumerate(reversed(seen)):
        save_file(weights, folder / "model.safetensors")
        if not number:
            llm, _ = made(folder)
            assert greedy(llm) == tokens
        llm.update_weights_from_disk(str(folder))
        assert llm.weight_info()["digest"] == digest
        assert greedy(llm) == tokens


FAMILIES = ("qwen3", "gemma2", "phi3", "gpt2", "olmo3")
CORE = [("qwen3", False), ("gemma2", True), ("deepseek_v2", True)]
"""With `CORE_OF_RANKS`, every pair of two dense families, number of ranks, and way to
run; and latent attention with experts. A compiler takes most of a minute a family."""
SHORT = 24
"""Moves of a history of these."""


@pytest.mark.parametrize(
    ("family", "is_eager"),
    [
        pytest.param(*cell, marks=() if cell in CORE else pytest.mark.slow)
        for cell in product((*FAMILIES, "deepseek_v2"), (True, False))
    ],
)
def test_families_have_histories_too(
    engine: tuple[Callable[..., Any], bool],
    tmp_path: Path,
    family: str,
    is_eager: bool,
) -> None:
    made, has_log = engine
    if family == "deepseek_v2" and not CAN_UNPACK_EXPERTS:
        pytest.skip("experts are packed")
    llm, folder = made(family=family, enforce_eager=is_eager)
    # A layer of experts is one parameter of all of them, so none comes alone.
    without = ("subset",) if family == "deepseek_v2" else ()
    can = {"may_sleep": False, "has_log": has_log, "without": without}
    length = SHORT if (family, is_eager) in CORE else LENGTH
    played(History(llm, weights_of(folder), tmp_path, 5, **can), length)


@pytest.mark.skipif(not CAN_UNPACK_EXPERTS, reason="experts are packed")
@pytest.mark.parametrize("engine", ["second set as on a GPU"], indirect=True)
def test_latent_attention_has_a_history_where_loads_are_replayed(
    engine: tuple[Callable[..., Any], bool], tmp_path: Path
) -> None:
    llm, folder = engine[0](family="deepseek_v2")
    can = {"may_sleep": False, "has_log": False, "without": ("subset",)}
    played(History(llm, weights_of(folder), tmp_path, 5, **can), SHORT)


TWO = {"tensor_parallel_size": 2}
SHARED_OUT = TWO | {"enable_expert_parallel": True}
OF_RANKS = {
    True: "tests.support.engines.unpacked_ranks.Unpacked",
    False: "tests.support.engines.mirrored_ranks.Mirrored",
}
"""By whether there is a log: the extension without which the CPU build packs."""
CORE_OF_RANKS = [("qwen3", True), ("gemma2", False)]


@pytest.mark.parametrize(
    ("family", "ranks", "seed"),
    [
        pytest.param(None, TWO, 0, id="dense"),
        *(
            pytest.param(
                family,
                TWO | {"enforce_eager": is_eager},
                3,
                id=f"{family}-{'eager' if is_eager else 'compiled'}",
                marks=() if (family, is_eager) in CORE_OF_RANKS else pytest.mark.slow,
            )
            for family, is_eager in product(FAMILIES, (True, False))
        ),
        pytest.param("qwen3_moe", SHARED_OUT, 1, marks=pytest.mark.slow, id="experts"),
        pytest.param(
            "deepseek_v3", SHARED_OUT, 2, marks=pytest.mark.slow, id="latent attention"
        ),
    ],
)
@pytest.mark.parametrize(
    "has_log",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["log", "second set"],
)
def test_a_history_of_two_ranks(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_log: bool,
    family: str | None,
    ranks: dict[str, Any],
    seed: int,
) -> None:
    if ranks is SHARED_OUT and not CAN_UNPACK_EXPERTS:
        pytest.skip("experts are packed")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    folder = checkpoint(0, **({} if family is None else {"family": family}))
    llm = start(
        folder,
        weight_transfer_config=WeightTransferConfig(backend="local"),
        additional_config=STAGING if has_log else {},
        worker_extension_cls=OF_RANKS[has_log],
        **({} if family is None else cpu_options(family)),
        **ranks,
    )
    # A layer of experts is one parameter of all of them, so none comes alone.
    without = ("subset",) if ranks is SHARED_OUT else ()
    can = {"may_sleep": False, "has_log": has_log, "without": without}
    is_short = "enforce_eager" in ranks
    history = History(llm, weights_of(folder), tmp_path, seed, **can)
    played(history, SHORT if is_short else LENGTH)
