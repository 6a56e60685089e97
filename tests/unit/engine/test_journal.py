"""The note on what is served: how a version is had again, and the file itself."""

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.route_stub import Engine, served
from tests.support.waiting import until
from vllm.inflight.api.server.routes import InflightEndpoints
from vllm.inflight.calls import ReadJournal, StartUpdate
from vllm.inflight.engine.compat import queries
from vllm.inflight.engine.transaction import Update
from vllm.inflight.engine.update import journal as journals
from vllm.inflight.engine.update.journal import MAX_STEPS, Journal, Recipe, extended
from vllm.inflight.engine.update.ledger import Ledger
from vllm.inflight.errors import ConfigError
from vllm.inflight.update import Phase, Version


def made(
    recipe: Recipe | None,
    path: str | None,
    draft_path: str | None = None,
    subset: tuple[str, ...] = (),
    *,
    has_drafter: bool = False,
) -> Recipe | None:
    update = Update("u", 1, "", None, None, None, 0.0)
    if path or draft_path:
        paths = {"path": path, "draft_path": draft_path}
        update.files = paths | {"subset": list(subset), "name_map": {}}
    return extended(recipe, update, has_drafter=has_drafter)


def paths(recipe: Recipe | None) -> list[tuple[str | None, str | None]] | None:
    if recipe is None:
        return None
    return [(step["path"], step["draft_path"]) for step in recipe]


def test_the_recipe_of_a_whole_version_has_one_step() -> None:
    for before in ((), None, made((), "a")):
        assert paths(made(before, "b")) == [("b", None)]


def test_the_recipe_of_a_subset_extends_the_recipe_of_its_base() -> None:
    whole = made((), "a")
    assert paths(made(whole, "b", subset=("*.mlp.*",))) == [("a", None), ("b", None)]
    assert made(None, "b", subset=("*.mlp.*",)) is None


def test_a_version_that_did_not_come_from_files_cannot_be_restored() -> None:
    streamed = made(made((), "a"), None)
    assert streamed is None
    assert paths(made(streamed, "b")) == [("b", None)]


def test_model_and_drafter_are_each_restored_from_their_last_source() -> None:
    both = made((), "a", "d", has_drafter=True)
    assert paths(both) == [("a", "d")]
    again = made(both, "b", has_drafter=True)
    assert paths(again) == [("a", "d"), ("b", None)]
    drafts = made(again, None, "e", has_drafter=True)
    assert paths(drafts) == [("a", "d"), ("b", None), (None, "e")]
    assert paths(made(drafts, "c", has_drafter=True)) == [
        ("a", "d"),
        (None, "e"),
        ("c", None),
    ]
    # Of a drafter that came with nothing that is known, nothing is known.
    assert made(None, "b", has_drafter=True) is None


@pytest.mark.parametrize("ends", [(Phase.ABORTED,), (Phase.STAGED, Phase.COMMITTED)])
def test_an_ended_update_keeps_no_tensor_names(ends: tuple[Phase, ...]) -> None:
    ledger = Ledger()
    names = {"format": 1, "name_map": {"a": "b"}}
    update, _ = ledger.start(StartUpdate(source="/models/new", manifest=names), 60.0)
    assert update.files is not None
    for phase in (Phase.STAGING, *ends):
        assert ledger.move(update, phase)
    assert update.files is None
    assert update.source == "/models/new"


def test_a_recipe_has_a_maximum_length() -> None:
    recipe: Recipe | None = ()
    for _ in range(MAX_STEPS):
        recipe = made(recipe, "b", subset=("x",))
        assert recipe is not None
    assert made(recipe, "b", subset=("x",)) is None


def journal(path: Path, index: int = 0, rank: int = 0) -> Journal:
    config: Any = SimpleNamespace(
        additional_config={"inflight": {"journal": str(path)}},
        parallel_config=SimpleNamespace(
            data_parallel_index=index, world_size=1, rank=rank
        ),
        model_config=SimpleNamespace(model="qwen"),
    )
    return Journal(config)


def test_the_last_journal_entry_is_read_back_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "served.json"
    first = journal(path)
    assert first.told()["found"] is None
    for epoch in (1, 2):
        first.note(Version(f"v{epoch}", epoch, "d" * 32), made((), "a"))
    first.close()
    found = journal(path).told()["found"]
    assert (found["model"], found["weight_version"]) == ("qwen", "v2")
    assert [step["path"] for step in found["recipe"]] == ["a"]
    assert [each.name for each in tmp_path.iterdir()] == ["served.json"]


def test_the_last_journal_entry_is_written_on_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, replace = tmp_path / "served.json", journals._replace
    slow = journal(path)

    def slowly(*args: Any) -> None:
        time.sleep(0.5)
        replace(*args)

    monkeypatch.setattr(journals, "_replace", slowly)
    for epoch in range(50):
        slow.note(Version(f"v{epoch}", epoch), ())
    slow.close()
    assert not slow._writer.is_alive()
    assert '"v49"' in path.read_text()


@pytest.mark.parametrize("which", [{"index": 1}, {"rank": 1}])
def test_the_second_of_several_engines_writes_nothing(
    tmp_path: Path, which: dict[str, int]
) -> None:
    """Of data-parallel engines, and of those of an external launcher."""
    second = journal(tmp_path / "served.json", **which)
    second.note(Version("v", 1), ())
    second.close()
    assert second.told()["path"] is None and not list(tmp_path.iterdir())


NOTED = {"model": "m", "weight_version": "v", "step": None, "digest": "d"}


@pytest.mark.parametrize(
    "content",
    [
        *("weights", "[1]", "{}", '{"format": 2}', '{"format": 1}', "[" * 100_000),
        json.dumps({"format": 1, **NOTED}),
        *(
            json.dumps({"format": 1, **NOTED, "recipe": recipe})
            for recipe in ([{}], [[]], 1, [{"path": "a", "draft_path": None}])
        ),
    ],
    ids=str.__len__,
)
def test_a_file_that_is_not_a_journal_is_rejected_and_kept(
    tmp_path: Path, content: str
) -> None:
    path = tmp_path / "precious"
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"{path} is not a journal"):
        journal(path)
    assert path.read_text() == content


def test_a_journal_path_that_cannot_be_written_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none/served\.json cannot be read and"):
        journal(tmp_path / "none" / "served.json")


def test_an_entry_that_cannot_be_serialised_is_reported_and_the_next_is_written(
    tmp_path: Path,
) -> None:
    noting = journal(tmp_path / "served.json")
    noting.note(Version("v1", 1), [object()])  # type: ignore[arg-type]
    until(lambda: noting.told()["error"] is not None, "nothing is told")
    noting.note(Version("v2", 2), ())
    noting.close()
    assert noting.told()["error"] is None
    assert "v2" in (tmp_path / "served.json").read_text()


def test_an_entry_that_cannot_be_written_is_reported_and_blocks_nothing(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    noting = journal(folder / "served.json")
    (folder / "served.json").unlink()
    folder.rmdir()
    noting.note(Version("v1", 1), ())
    until(lambda: noting.told()["error"], "it does not tell that it could not write")
    assert "No such file" in noting.told()["error"]
    folder.mkdir()
    noting.note(Version("v2", 2), ())
    noting.close()
    assert noting.told()["error"] is None
    assert json.loads((folder / "served.json").read_text())["weight_version"] == "v2"


class Server(Engine):
    """One of several API servers before one engine, which has a journal."""

    def __init__(self, index: int, kept: Journal) -> None:
        super().__init__()
        self.client_index = index
        self._controller = SimpleNamespace(live_version=SimpleNamespace(journal=kept))

    async def call_utility_all_async(self, name: str, method: str, body: Any) -> Any:
        if method != "journal":
            return await super().call_utility_all_async(name, method, body)
        return [{"ok": queries.journal(self._controller, ReadJournal(**body))}]

    async def start(self) -> None:
        path = str(self._controller.live_version.journal.told()["path"])
        app = served(self, additional_config={"inflight": {"journal": path}})
        plugin = InflightEndpoints()
        plugin.attach_router(app)
        await plugin.init_state(self, None, app.state.args)


async def test_no_server_answers_before_the_first_has_restored(tmp_path: Path) -> None:
    kept = journal(tmp_path / "served.json")
    second = asyncio.create_task(Server(1, kept).start())
    await asyncio.sleep(0.3)
    assert not second.done()
    await Server(0, kept).start()
    await asyncio.wait_for(second, 30)
    # It may have failed: then they answer as well.
    await asyncio.wait_for(Server(1, kept).start(), 30)
    kept.close()
