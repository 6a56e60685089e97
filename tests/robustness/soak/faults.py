"""Faults of trainers and controllers, each with the answer that is right for it.

After every one the engine must serve what it served before, and take the next update.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file
from vllm.v1.engine.exceptions import EngineDeadError

from tests.robustness.soak.trainer import Trainer, part
from vllm.inflight.errors import InflightError

Fault = Callable[[Trainer, Path], Awaitable[str | None]]
"""What was done; returns the code of the error that came of it, or None."""

VICTIM = "model.layers.1.mlp.down_proj.weight"
LEASE_S = 0.4
PATIENCE_S = 30.0


async def broken_off(trainer: Trainer, at: Path) -> str | None:
    """A trainer that dies after half of its tensors: the deadline ends its update."""
    del at
    engine = trainer.engine
    name = f"broken-off-{uuid.uuid4().hex}"
    # On a busy host these alone are too much for the deadline, with the same end.
    await _code(trainer.start(update_id=name, deadline_s=0.5))
    half = part(trainer.folders["a"], "rest")
    await _code(engine.update_weights({"update_info": {"path": str(half)}}, name))
    return await _ended(engine, name)


async def trainer_killed(trainer: Trainer, at: Path) -> str | None:
    """A trainer's process that is killed after half of its tensors."""
    del at
    assert trainer.far is not None
    return await trainer.far.die_half_way(trainer.folders["b"])


async def deadline_too_short(trainer: Trainer, at: Path) -> str | None:
    """More to do than there is time for."""
    del at
    return await _from_disk(trainer, trainer.folders["b"], deadline_s=1e-4)


async def wrong_name(trainer: Trainer, at: Path) -> str | None:
    """A tensor that the model does not know, in the place of one that it does."""
    tensors = dict(trainer.tensors["a"])
    tensors[VICTIM.replace("down", "dawn")] = tensors.pop(VICTIM)
    return await _from_disk(trainer, _written(tensors, at))


async def missing_tensor(trainer: Trainer, at: Path) -> str | None:
    """One that never comes."""
    tensors = {n: t for n, t in trainer.tensors["a"].items() if n != VICTIM}
    return await _from_disk(trainer, _written(tensors, at))


async def wrong_shape(trainer: Trainer, at: Path) -> str | None:
    """A row too few."""
    tensors = dict(trainer.tensors["a"])
    tensors[VICTIM] = tensors[VICTIM][:-1].contiguous()
    return await _from_disk(trainer, _written(tensors, at))


async def not_a_number(trainer: Trainer, at: Path) -> str | None:
    """A loss that has exploded."""
    tensors = dict(trainer.tensors["a"])
    tensors[VICTIM] = tensors[VICTIM].clone()
    tensors[VICTIM][3, 5] = torch.nan
    return await _from_disk(trainer, _written(tensors, at))


async def torn_file(trainer: Trainer, at: Path) -> str | None:
    """A file that was cut while it was copied."""
    whole = _written(trainer.tensors["b"], at).read_bytes()
    at.write_bytes(whole[: len(whole) * 2 // 3])
    return await _from_disk(trainer, at)


async def no_file(trainer: Trainer, at: Path) -> str | None:
    """A path to nothing."""
    return await _from_disk(trainer, at.with_name("nowhere"))


async def wrong_digest(trainer: Trainer, at: Path) -> str | None:
    """Other bytes than were announced."""
    del at
    tensors = [
        {
            "name": name,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype),
            "digest": "0" * 32 if name == VICTIM else None,
        }
        for name, tensor in trainer.tensors["c"].items()
    ]
    manifest = {"format": 1, "tensors": tensors}
    return await _from_disk(trainer, trainer.folders["c"], manifest=manifest)


async def duplicate_begin(trainer: Trainer, at: Path) -> str | None:
    """A call repeated is the same update; a second trainer has to wait."""
    del at
    engine, body = trainer.engine, {"update_id": f"twice-{trainer.rng.random()}"}
    for _ in range(2):
        await trainer.start(**body)
    codes = {
        await _code(trainer.start(update_id="another")),
        await _code(trainer.start(**body, weight_version="other")),
    }
    await engine.abort_weight_update(body["update_id"])
    return " ".join(sorted(map(str, codes)))


async def given_up(trainer: Trainer, at: Path) -> str | None:
    """A trainer that changes its mind when all is there."""
    del at
    engine = trainer.engine
    begun = await trainer.start()
    await engine.update_weights({"update_info": {"path": str(trainer.folders["b"])}})
    await engine.abort_weight_update(begun["update_id"])
    return await _code(engine.finish_weight_update(update_id=begun["update_id"]))


async def finished_empty(trainer: Trainer, at: Path) -> str | None:
    """A finish without a tensor."""
    del at
    await trainer.start()
    return await _code(trainer.engine.finish_weight_update())


async def wrong_expectation(trainer: Trainer, at: Path) -> str | None:
    """A trainer that does not know what is served; its update stays, and is aborted."""
    del at
    engine = trainer.engine
    await trainer.start()
    await engine.update_weights({"update_info": {"path": str(trainer.folders["b"])}})
    code = await _code(engine.finish_weight_update(expect_version="what was"))
    await engine.abort_weight_update()
    return code


async def nothing_held(trainer: Trainer, at: Path) -> str | None:
    """A rollback to a version that an update has begun to overwrite."""
    del at
    engine, half = trainer.engine, part(trainer.folders["a"], "rest")
    await trainer.start()
    await engine.update_weights({"update_info": {"path": str(half)}})
    await engine.abort_weight_update()
    return await _code(engine.rollback_weights())


async def controller_gone(trainer: Trainer, at: Path) -> str | None:
    """A pause that nobody ends: its lease does."""
    del at
    mode = trainer.rng.choice(("in_place", "retract"))
    with trainer.history.stopping():
        await trainer.engine.pause_generation(
            mode=mode, flush_cache=False, lease_s=LEASE_S, owner="gone"
        )
        async with asyncio.timeout(PATIENCE_S):
            while await trainer.engine.is_paused():
                await asyncio.sleep(0.05)
    return None


async def paused_by_another(trainer: Trainer, at: Path) -> str | None:
    """A controller that would end the pause of another."""
    del at
    engine = trainer.engine
    with trainer.history.stopping():
        await engine.pause_generation(
            mode="in_place", flush_cache=False, lease_s=60.0, owner="mine"
        )
        code = await _code(engine.continue_generation("not mine"))
        await engine.continue_generation("mine")
    return code


async def core_hangs(trainer: Trainer, at: Path) -> str | None:
    """A core that stands still: its health says so, and then that it is well again."""
    del at
    engine, family = trainer.engine, psutil.Process().children(recursive=True)
    (core,) = (p for p in family if "EngineCore" in p.name())
    answers = []
    with trainer.history.stopping():
        core.suspend()
        try:
            answers.append(await _health(engine, EngineDeadError))
        finally:
            core.resume()
        answers.append(await _health(engine, None))
    return " ".join(answers)


FAULTS: dict[Fault, str | None] = {
    broken_off: "deadline_exceeded",
    trainer_killed: "aborted",
    deadline_too_short: "deadline_exceeded",
    wrong_name: "weights_mismatch",
    missing_tensor: "weights_mismatch",
    wrong_shape: "weights_mismatch",
    not_a_number: "weights_mismatch",
    torn_file: "malformed",
    no_file: "malformed",
    wrong_digest: "weights_mismatch",
    duplicate_begin: "conflict update_in_progress",
    given_up: "wrong_phase",
    finished_empty: "weights_mismatch",
    wrong_expectation: "version_conflict",
    nothing_held: "nothing_to_roll_back",
    controller_gone: None,
    paused_by_another: "owned_by_another",
    core_hangs: "unwell well",
}
"""Every fault, and the answer that is right."""

COSTLESS = (
    *(controller_gone, paused_by_another, core_hangs),
    *(no_file, torn_file, finished_empty, duplicate_begin),
)
"""These write no byte of an update, so that what is held for a rollback stays held."""


async def suffer(trainer: Trainer, fault: Fault, at: Path) -> None:
    """Let one fault happen; what it must not have changed is compared."""
    history, engine = trainer.history, trainer.engine
    before = await _info(engine)
    code = await fault(trainer, at)
    after = await _info(engine)
    if fault not in COSTLESS and after["previous"] is None:
        history.can_go_back = before["previous"] = None
    name = fault.__name__
    if code != FAULTS[fault]:
        history.wrong.append(f"{name}: answered {code!r}, not {FAULTS[fault]!r}")
    if after != before:
        history.wrong.append(f"{name}: {before} became {after}")
    if (await engine.weight_update_status())["active"] is not None:
        history.wrong.append(f"{name}: left an update under way")
        await engine.abort_weight_update()
    history.faults[name] = history.faults.get(name, 0) + 1


async def _info(engine: Any) -> dict[str, Any]:
    """What an update may change; a scrub of the engine's own ends whenever it does."""
    info: dict[str, Any] = await engine.weight_info()
    return {name: value for name, value in info.items() if name != "scrub"}


async def _from_disk(trainer: Trainer, path: Path, **options: Any) -> str | None:
    return await _code(
        trainer.engine.update_weights_from_disk(str(path), "never", **options)
    )


async def _code(call: Awaitable[Any]) -> str | None:
    try:
        await call
    except InflightError as error:
        return error.code
    return None


async def _health(engine: Any, wanted: type[Exception] | None) -> str:
    """Ask until the engine's health is as wanted."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await engine.check_health()
                found = None
            except EngineDeadError as error:
                found = type(error)
            if found is wanted:
                return "well" if wanted is None else "unwell"
            await asyncio.sleep(0.1)


async def _ended(engine: Any, update_id: str) -> str | None:
    """The code of the error that ends an update by itself."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            status = await engine.weight_update_status(update_id)
            if status["phase"] == "aborted":
                code: str = status["error"]["code"]
                return code
            await asyncio.sleep(0.05)


def _written(tensors: dict[str, Any], at: Path) -> Path:
    save_file(tensors, at)
    return at
