"""The trainer: versions in every way there is, rollbacks, renames, pauses and sleep.

Whatever it asks, it notes in the history what the engine must serve from then on.
"""

import asyncio
import random
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.robustness.soak.far import Far
from tests.robustness.soak.history import History
from tests.robustness.soak.judge import MLP
from tests.support.engines.mixtures import mixed
from vllm.inflight.api.control.methods import control_of
from vllm.inflight.calls import StartUpdate
from vllm.inflight.trainer import Publisher

FILE = "model.safetensors"
SUBSET = ["*.mlp.*"]
MODES = ("in_place", "in_place", "in_place", "retract", "abort", "wait")


class Trainer:
    """Drives one `AsyncLLM`, from its event loop.

    Attributes:
        far: the trainer that is a process of its own; None without one.

    """

    def __init__(
        self,
        engine: Any,
        far: Far | None,
        folders: Mapping[str, Path],
        history: History,
        *,
        seed: str,
        can_sleep: bool,
    ) -> None:
        self.engine, self.folders, self.history = engine, folders, history
        self.far = far
        self._is_awake, self._can_sleep = True, can_sleep
        self.rng = random.Random(f"trainer {seed}")
        self.tensors = {name: load_file(p / FILE) for name, p in folders.items()}
        self._to_publish: dict[str, Any] = {}
        self._publisher = Publisher(engine, lambda: self._to_publish)

    async def close(self) -> None:
        """Let the publisher's thread and the other process end."""
        if self.far is not None:
            await self.far.close()
        await asyncio.to_thread(self._publisher.close)

    @property
    def is_steady(self) -> bool:
        """Whether all that holds memory now also holds it most of the time."""
        return self._is_awake and (self.far is None or self.far.is_up)

    async def act(self) -> str:
        """Do one thing at random; returns what."""
        ways = {
            self.publish if self.far is None else self.send: 5.0,
            self.from_disk: 4.0,
            self.phase_by_phase: 3.0,
            self.take_turn: 0.7 if self._can_sleep else 0.0,
            self.roll_back: 1.5,
            self.rename: 0.7,
            self.pause: 1.2,
        }
        (way,) = self.rng.choices(list(ways), list(ways.values()))
        await way()
        return way.__name__

    # ---------------------------------------------------------------- updates
    def next_version(self) -> tuple[str, str, list[str] | None]:
        """Label, content, and the patterns of a subset or None."""
        name = self.rng.choice(sorted(self.folders))
        label = f"{name}-{uuid.UUID(int=self.rng.getrandbits(128)).hex[:8]}"
        if self.rng.random() < 0.3:
            return label, self.history.now.content[0] + name, SUBSET
        return label, name + name, None

    async def publish(self) -> None:
        """Through the publisher, in shared memory, with every digest."""
        label, content, subset = self.next_version()
        self._to_publish = self.tensors[content[1]]
        mode = self._mode()
        with self._treating(mode):
            outcome = await asyncio.to_thread(
                self._publisher.publish, label, mode=mode, subset=subset
            )
        reply = {"weight_version": outcome.version, "digest": outcome.digest}
        self._updated(reply | {"epoch": outcome.epoch}, label, content)

    async def start(self, **fields: Any) -> dict[str, Any]:
        """Open an update whose pieces are files, whatever transport is configured."""
        start = StartUpdate(transport="local", **fields)
        return await control_of(self.engine).start(start)

    async def send(self) -> None:
        """From another process, over a wire or in memory that it lends."""
        label, content, _ = self.next_version()
        content = content[1] * 2
        mode = self._mode()
        assert self.far is not None
        await self.far.join()
        with self._treating(mode):
            reply = await self.far.send(self.folders[content[0]], label, mode)
        self._updated(reply, label, content)
        self.history.num_sent += 1

    async def from_disk(self) -> None:
        """In one call, from files."""
        label, content, subset = self.next_version()
        path = self.folders[content[1]]
        if subset is not None:
            path = part(path, "mlp")
        mode = self._mode()
        with self._treating(mode):
            reply = await self.engine.update_weights_from_disk(
                str(path), label, mode=mode, subset=subset
            )
        self._updated(reply, label, content)

    async def phase_by_phase(self) -> None:
        """The four phases, in two chunks where it is all of the tensors."""
        label, content, subset = self.next_version()
        manifest = None if subset is None else {"format": 1, "subset": subset}
        parts = ("mlp", "rest") if subset is None else ("mlp",)
        mode = self._mode()
        started = await self.start(
            weight_version=label,
            manifest=manifest,
            base_version=self.history.now.label,
        )
        for chunk, name in enumerate(parts):
            path = part(self.folders[content[1]], name)
            info = {"update_info": {"path": str(path)}}
            # Asked twice, as a trainer does whose reply was lost.
            for _ in range(2):
                await self.engine.update_weights(info, started["update_id"], chunk)
        with self._treating(mode):
            reply = await self.engine.finish_weight_update(
                label, mode=mode, update_id=started["update_id"]
            )
        self._updated(reply, label, content)

    def _updated(self, reply: dict[str, Any], label: str, content: str) -> None:
        before = self.history.now
        self.history.serves(reply, label, content)
        self.history.can_go_back = before
        self.history.num_updates += 1

    # -------------------------------------------------------------- the others
    async def roll_back(self) -> None:
        """To the version before, where it is held; else a refusal is right."""
        before, now = self.history.can_go_back, self.history.now
        if before is None:
            await self.from_disk()
            return
        mode = self._mode()
        with self._treating(mode):
            reply = await self.engine.rollback_weights(mode=mode)
        self.history.serves(reply, before.label, before.content)
        self.history.can_go_back = now
        self.history.num_rollbacks += 1

    async def rename(self) -> None:
        """A version without bytes."""
        label = f"renamed-{self.rng.randrange(1 << 30)}"
        reply = await control_of(self.engine).rename(label)
        self.history.serves(reply, label, self.history.now.content)
        self.history.num_renames += 1

    async def pause(self) -> None:
        """A pause with a lease; an update may come while it lasts."""
        mode = self.rng.choice(MODES)
        with self._treating(mode), self.history.stopping():
            await self.engine.pause_generation(
                mode=mode,
                flush_cache=mode == "retract" and self.rng.random() < 0.5,
                lease_s=60.0,
                owner="soak",
            )
            if self.rng.random() < 0.5:
                await self.from_disk_while_paused()
            await self.engine.continue_generation("soak")
        self.history.num_pauses += 1

    async def from_disk_while_paused(self) -> None:
        """The commit of an update leaves a pause as it is."""
        label, content, _ = self.next_version()
        content = content[1] * 2
        reply = await self.engine.update_weights_from_disk(
            str(self.folders[content[0]]), label
        )
        self._updated(reply, label, content)

    async def take_turn(self) -> None:
        """The engine gives its memory back, and wakes up with other weights."""
        label, content, _ = self.next_version()
        content = content[1] * 2
        engine = self.engine
        with self.history.stopping(), self._asleep():
            await engine.pause_generation(mode="retract", lease_s=60.0, owner="soak")
            await engine.release_memory_occupation()
            await engine.wake_up(["weights"])
            reply = await engine.update_weights_from_disk(
                str(self.folders[content[0]]), label
            )
            await engine.wake_up(["kv_cache"])
            await engine.continue_generation("soak")
        self._updated(reply, label, content)
        if (await engine.weight_info())["previous"] is None:
            self.history.can_go_back = None
        self.history.num_turns += 1

    async def audit(self) -> None:
        """Compare every parameter of every rank with a fresh load, and the digests."""
        whole, mlp = self.history.now.content
        folder = self.folders[whole]
        if whole != mlp:
            folder = folder.parent / f"mixed-{whole}{mlp}"
            if not folder.exists():
                mixed(self.folders[whole], self.folders[mlp], SUBSET, folder)
        with self.history.stopping():  # a model is loaded between two steps
            ranks = await self.engine.collective_rpc(
                "tests_differing", args=(str(folder),)
            )
            held = await self.engine.collective_rpc("tests_held")
        for rank, names in enumerate(ranks):
            if names:
                self.history.wrong.append(f"rank {rank} serves other {names}")
        self.history.note_held(held)
        found = await self.engine.verify_weights()
        if found["result"] == "different":
            self.history.wrong.append(f"not what was committed: {found['different']}")
        self.history.num_audits += 1

    @contextmanager
    def _asleep(self) -> Iterator[None]:
        self._is_awake = False
        yield
        self._is_awake = True

    def _mode(self) -> str:
        return self.rng.choice(MODES)

    def _treating(self, mode: str) -> ExitStack:
        """Note what a call in `mode` may do to requests, for as long as it lasts."""
        during = ExitStack()
        if mode == "abort":
            during.enter_context(self.history.aborting())
        if mode in ("wait", "retract"):
            during.enter_context(self.history.stopping())
        return during


def part(folder: Path, name: str) -> Path:
    """The file with `mlp` or `rest` of a checkpoint, beside its folder."""
    return folder.parent / f"{folder.name}-parts" / f"{name}.safetensors"


def split(folder: Path) -> None:
    """Write the MLPs of a checkpoint and the rest of it into files of their own."""
    tensors = load_file(folder / FILE)
    part(folder, "mlp").parent.mkdir()
    for name, is_mlp in (("mlp", True), ("rest", False)):
        some = {n: t for n, t in tensors.items() if (MLP in n) == is_mlp}
        save_file(some, part(folder, name))
