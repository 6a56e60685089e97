"""A family's real loaders, and the receiving path of a GPU, played on the host.

    python -m tests.support.engines.in_place FOLDER family[:hidden] …

vLLM builds the model on the CPU, and its own loaders fill it. The model's parameters
lie in an arena in the host's memory, with a second set beside them, as on a GPU.
Updates come from files through the buckets that feed a GPU. Every tensor is received
in place where the plan says that it may be, however small it is. After every flip each
parameter has to be, bit for bit, what vLLM's loader makes of the same files.

It adds one line of JSON for each family to FOLDER/results.jsonl.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from tests.support.engines.mixtures import declared
from tests.support.models.families import FAMILIES
from tests.support.models.tiny import make_checkpoint
from tests.support.shadow_on_host import HostStagingWorker, shadow_of
from vllm.inflight.transport.buckets.receiver import Receiver
from vllm.inflight.transport.files.bucket_reader import FileReader
from vllm.inflight.transport.files.receiver_engine import checkpoint_files
from vllm.inflight.transport.files.safetensors_files import TensorFiles
from vllm.inflight.transport.waiting import WaitLimit
from vllm.inflight.update import Manifest
from vllm.inflight.worker import replay_check
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.model import layers
from vllm.inflight.worker.model.kinds.mla import is_derived
from vllm.inflight.worker.model.layers import parameters
from vllm.inflight.worker.shadow.build import BuildInputs
from vllm.inflight.worker.shadow.carry_over import copy_unsent
from vllm.inflight.worker.shadow.parameters import mirror_parameters
from vllm.inflight.worker.shadow.shadow_model import ShadowModel
from vllm.inflight.worker.staging.destination_table import fill_table
from vllm.inflight.worker.staging.loader import UpdateLoader
from vllm.inflight.worker.verify.ignored_tensors import IgnoredTensors
from vllm.inflight.worker.verify.start_checkpoint import StartCheckpoint

HOST = torch.device("cpu")
RESULTS = "results.jsonl"


class EveryTensorAlone(FileReader):
    """A reader for which no tensor is too small to be received in place."""

    large = 0


class Player:
    """One family's model, its second set, and updates of it."""

    def __init__(self, folder: Path, arena: Arena) -> None:
        self.config = EngineArgs(
            model=str(folder),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=128,
        ).create_engine_config()
        self.arena = arena
        self.live = self.fresh(folder)
        self._move_in()
        with set_current_vllm_config(self.config):
            blueprint = BuildInputs(self.config, self.config.model_config)
            self.second = blueprint.build(self.live, torch.device("meta"))
        mirror_parameters(self.live, self.second, arena.shadow_tensor)
        self.shadow = self._shadow()
        with set_current_vllm_config(self.config):
            assert fill_table(self.shadow) is None
        self.num_at_start = self.shadow.plan.num_proved
        worker: Any = SimpleNamespace(device=HOST, vllm_config=self.config)
        self.stager = HostStagingWorker(worker, self.shadow, arena.flip)
        self.reader = EveryTensorAlone(HOST, 1 << 20)
        self.placed: set[str] = set()

    def fresh(self, folder: Path) -> torch.nn.Module:
        """What vLLM's loader makes of a folder, before layers are packed for a CPU."""
        config = dataclasses.replace(self.config)
        config.compilation_config = dataclasses.replace(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        config.compilation_config.static_all_moe_layers = []
        with (
            set_current_vllm_config(config),
            set_default_torch_dtype(torch.bfloat16),
            torch.no_grad(),
        ):
            model = initialize_model(vllm_config=config)
            layers.adopt_buffers(model)
            for param in model.parameters():
                param.zero_()  # what nothing is loaded into, padding, is like nothing
            model.load_weights(_tensors(folder))
        return model

    def update(self, folder: Path, subset: tuple[str, ...] = ()) -> None:
        """Receive the files of a folder into the second set, and flip."""
        shadow = self.shadow
        self.stager.open()
        self.arena.settle()
        ShadowModel.prove(shadow, lambda num_bytes: None)
        intake = UpdateLoader(
            shadow,
            Manifest(subset=subset),
            verify=True,
            allow_nonfinite=False,
            cancelled=lambda: False,
            progress=lambda num_bytes, num_tensors: None,
        )
        intake.coverage.watch(intake.load_weights, at_once=False)
        watch = WaitLimit(60, lambda: False)
        try:
            with TensorFiles(checkpoint_files(folder)) as files:
                receiver = Receiver(self.reader, 2, watch)
                self.reader.begin(files)
                try:
                    incoming = receiver.tensors(files.tensor_list, watch)
                    self.second.load_weights(_Noted(incoming, self.placed))
                finally:
                    self.reader.close()
            sent = intake.verdict()
            copy_unsent(shadow, intake.coverage.begun, lambda num_bytes: None)
        finally:
            intake.coverage.unwatch()
        self.stager.staged(sent.over(self.stager.served) if subset else sent)
        self.stager.flip()

    def differing(self, folder: Path) -> list[str]:
        """Parameters that are not, bit for bit, those of a fresh load."""
        expected = {name: param for name, *_, param in parameters(self.fresh(folder))}
        served = {name: param for name, *_, param in parameters(self.live)}
        assert served.keys() == expected.keys()
        return [n for n, p in served.items() if not _is_same(p, expected[n])]

    def _move_in(self) -> None:
        for *_, param in parameters(self.live):
            home = self.arena.empty(tuple(param.shape), dtype=param.dtype)
            param.data = home.copy_(param.data)
        self.arena.consolidate()
        self.arena.pair()

    def _shadow(self) -> Any:
        shadow = shadow_of(self.live, self.second)
        shadow.required = {
            name: param.shape
            for name, layer, key, param in parameters(self.second)
            if not is_derived(layer, key)
        }
        shadow._is_stage = shadow.has_drafter = shadow._has_some = False
        shadow.dtypes = {
            name: str(param.dtype).removeprefix("torch.")
            for name, *_, param in parameters(self.second)
        }
        shadow.known_names = ShadowModel.known_names.func(shadow)
        shadow.asks_loader = ShadowModel.asks_loader.fget(shadow)
        shadow.ignored = IgnoredTensors.of(self.live, self.config.model_config)
        shadow.start_checkpoint = StartCheckpoint.of(self.config)
        shadow.may_idle = lambda name: ShadowModel.may_idle(shadow, name)
        return shadow


class _Noted:
    """What comes in, and the names of what is received in place."""

    def __init__(self, incoming: Any, placed: set[str]) -> None:
        self._incoming = incoming
        self._placed = placed

    def into(self, place: Any) -> None:
        def noted(name: str, *form: Any) -> Any:
            if (home := place(name, *form)) is not None:
                self._placed.add(name)
            return home

        self._incoming.into(noted)

    def batches(self) -> Any:
        return self._incoming.batches()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._incoming)


def _tensors(folder: Path) -> Iterable[tuple[str, torch.Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        yield from load_file(file).items()


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*bits)


def play(root: Path, family: str, hidden: int) -> dict[str, Any]:
    """Five updates, a rollback and a subset; what came in place, what is wrong."""
    folders = [
        make_checkpoint(
            root / f"{family}-{hidden}-{n}", n, family=family, hidden=hidden
        )
        for n in range(3)
    ]
    odd = FAMILIES[family].odd
    wrong: list[str] = []
    errors: list[str] = []
    replay_check.logger.error = lambda text, *args: errors.append(text % args)
    with Arena.open(HOST, 1 << 32) as arena:
        player = Player(folders[0], arena)

        def served(at: Path, what: str) -> None:
            wrong.extend(f"{what}: {name}" for name in player.differing(at))

        for number in (1, 2, 0, 1, 2):
            player.update(folders[number])
            served(folders[number], f"version {number}")
        player.stager.flip("before")
        served(folders[1], "rolled back")
        some = root / f"{family}-part"
        some.mkdir(exist_ok=True)
        save_file(declared(folders[0], odd), some / "model.safetensors")
        mixture = root / f"{family}-mixture"
        mixture.mkdir(exist_ok=True)
        both = dict(_tensors(folders[1])) | declared(folders[0], odd)
        save_file(both, mixture / "model.safetensors")
        player.update(some, odd)
        served(mixture, "a subset")
        plan = player.shadow.plan
        return {
            "family": family,
            "hidden": hidden,
            "num_tensors": len(dict(_tensors(folders[0]))),
            "num_recorded": len(plan),
            "num_at_start": player.num_at_start,
            "num_proved": plan.num_proved,
            "num_in_place": len(player.placed),
            "refused": errors,
            "wrong": wrong,
        }


def main(root: Path, asked: Iterable[str]) -> None:
    """Play every family that is asked for, in one process."""
    with set_current_vllm_config(VllmConfig()):
        port = 29700 + os.getpid() % 2000
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        initialize_model_parallel(1, 1)
    for each in asked:
        family, _, hidden = each.partition(":")
        try:
            told = play(root, family, int(hidden or 128))
        except Exception as error:  # the next family is played all the same
            told = {"family": family, "error": f"{type(error).__name__}: {error}"}
        with (root / RESULTS).open("a") as file:
            print(json.dumps(told), file=file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
