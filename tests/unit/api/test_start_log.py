"""A server says at its start what it does."""

from argparse import Namespace
from types import SimpleNamespace

import pytest

from tests.support.route_stub import Engine
from vllm.inflight.api.server import start_log
from vllm.inflight.config import ADMIN_KEY_ENV


async def lines_of(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, **args: object
) -> list[str]:
    lines: list[str] = []

    def info(text: str, *values: object) -> None:
        lines.append(text % values)

    monkeypatch.setattr(start_log.logger, "info", info)
    await start_log.log_start(engine, Namespace(**{"api_key": None} | args))
    return lines


async def line(monkeypatch: pytest.MonkeyPatch, engine: Engine, **args: object) -> str:
    (found,) = await lines_of(monkeypatch, engine, **args)
    return found


async def test_the_start_log_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADMIN_KEY_ENV, raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert (await line(monkeypatch, Engine())).partition(": ")[2] == (
        "shadow weights of 1.44 MiB in host memory; transport none (files by path "
        "only); control routes for this host only, without a key; prefix cache "
        "versioned; pauses: obey"
    )


async def test_the_start_log_names_transport_and_kind_of_key_but_no_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ADMIN_KEY_ENV, raising=False)
    engine = Engine()
    engine.vllm_config.weight_transfer_config = SimpleNamespace(backend="inflight_nccl")
    found = await line(monkeypatch, engine, api_key=["s3cret"])
    assert "transport inflight_nccl" in found
    assert "callers with the API key" in found and "s3cret" not in found
    monkeypatch.setenv(ADMIN_KEY_ENV, "s3cret2")
    found = await line(monkeypatch, engine, api_key=["s3cret"])
    assert "callers with the admin key" in found and "s3cret" not in found


async def test_the_start_log_says_why_there_are_no_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Off(Engine):
        async def call_utility_all_async(self, _: str, *__: object) -> list[dict]:
            return [{"ok": {"bytes": 0, "reason": "staging is off"}}]

    assert "no updates in flight (staging is off)" in await line(monkeypatch, Off())


async def test_the_start_log_says_how_large_the_log_of_delta_staging_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OneSet(Engine):
        async def call_utility_all_async(self, _: str, *__: object) -> list[dict]:
            sizes = {"bytes": 2 << 30, "host_bytes": 5 << 30, "bucket_bytes": 1 << 29}
            return [{"ok": sizes | {"has_logs": True, "reason": None}}]

    assert (
        "one set of weights, and a log of 2.00 GiB, which goes on in up to 5.00 GiB of "
        "host memory; buckets take 0.50 GiB more"
    ) in await line(monkeypatch, OneSet())


@pytest.mark.parametrize(
    ("device", "executor", "has_logs", "is_advised"),
    [
        ("cuda", "uni", True, True),
        ("cuda", "mp", True, False),
        ("cpu", "uni", True, False),
        ("cuda", "uni", False, False),
    ],
)
async def test_delta_staging_advises_a_process_for_a_worker_that_has_none(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    executor: str,
    has_logs: bool,
    is_advised: bool,
) -> None:
    class OnDevice(Engine):
        async def call_utility_all_async(self, _: str, *__: object) -> list[dict]:
            return [{"ok": {"bytes": 1 << 30, "reason": None, "has_logs": has_logs}}]

    engine = OnDevice()
    engine.vllm_config.device_config = SimpleNamespace(device_type=device)
    parallel = SimpleNamespace(distributed_executor_backend=executor)
    engine.vllm_config.parallel_config = parallel
    _, *more = await lines_of(monkeypatch, engine)
    assert ["--distributed-executor-backend mp" in each for each in more] == (
        [True] if is_advised else []
    )
