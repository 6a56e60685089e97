"""The table of releases: what holds in which one, and what differs."""

import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from docs import release_runs
from tests.releases import site
from vllm.inflight import upstream
from vllm.inflight.engine.scheduling.stamp_reports import RequestStamps
from vllm.inflight.engine.scheduling.version_stamp import STAMP_FIELD
from vllm.inflight.outputs.reply_state import ReplyState
from vllm.inflight.releases import table
from vllm.inflight.releases.table import (
    AS_IN_REFERENCE,
    REFERENCE,
    SUPPORTED,
    differing,
)


@pytest.mark.parametrize(
    ("since", "before", "release", "holds"),
    [
        (None, None, "0.29.0", True),
        ("0.31.0", None, "0.30.0", False),
        ("0.31.0", None, "0.31.0", True),
        (None, "0.32.0", "0.31.0", True),
        (None, "0.32.0", "0.32.0", False),
        ("0.30.0", "0.32.0", "0.31.0", True),
        # Patch releases and candidates count as their release.
        ("0.32.0", None, "0.32.1", True),
        ("0.32.0", None, "0.32.0rc1", True),
        # A build without a number counts as the reference.
        ("0.33.0", None, "dev", False),
    ],
)
def test_a_record_holds_from_its_first_release_until_before_the_other(
    since: str | None, before: str | None, release: str, holds: bool
) -> None:
    assert table.holds(since, before, release) is holds


def test_an_entry_holds_from_its_release_until_the_next_entry() -> None:
    entries = {"0.29.0": "old", "0.31.0": AS_IN_REFERENCE, "0.33.0": "new"}
    found = [differing(entries, "usual", release) for release in SUPPORTED]
    assert found == ["old", "old", "usual", "usual", "new"]
    assert differing(entries, "usual", "0.34.0") == "new"
    assert differing({"0.33.0": "new"}, "usual", "0.29.0") == "usual"
    assert differing({"0.29.0": "old"}, "usual", REFERENCE) == "usual"
    assert differing(None, "usual", "0.29.0") == "usual"


@pytest.mark.parametrize("release", SUPPORTED)
@pytest.mark.parametrize("name", sorted(table.ADAPTERS))
def test_every_release_has_an_adapter(
    name: str, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "installed", lambda: release)
    assert isinstance(table.adapter(name), type)


def test_a_stand_in_exists_for_every_name_that_a_release_lacks() -> None:
    places = [p for entries in table.PLACES.values() for p in entries.values()]
    ours = [p for p in places if isinstance(p, str) and p.startswith("vllm.inflight")]
    assert ours
    for place in ours:
        module, _, name = place.partition(":")
        assert hasattr(table.import_module(module), name), place


def output(name: str, *tokens: int, ended: str | None = None, **more: Any) -> Any:
    facts = {"pooling_output": None, "kv_transfer_params": None} | more
    return SimpleNamespace(
        request_id=name, new_token_ids=list(tokens), finish_reason=ended, **facts
    )


def told(stamps: RequestStamps, stamp: str | None, *outputs: Any) -> list[str | None]:
    stamps.tell(SimpleNamespace(outputs=outputs), stamp)
    return [(o.kv_transfer_params or {}).get(STAMP_FIELD) for o in outputs]


def test_a_request_is_told_a_stamp_when_it_differs_from_the_one_before() -> None:
    stamps = RequestStamps()
    assert told(stamps, "one", output("a", 1), output("b")) == ["one", None]
    assert told(stamps, "one", output("a", 2), output("b", 3)) == [None, "one"]
    assert told(stamps, "two", output("a", 4), output("b", 5)) == ["two", "two"]
    assert told(stamps, None, output("a", 6)) == [None]
    pooled = output("c", pooling_output=object(), ended="stop")
    assert told(stamps, "two", pooled) == ["two"]


def test_a_stamp_travels_beside_the_parameters_of_a_connector() -> None:
    each = output("a", 1, kv_transfer_params={"do_remote_decode": True})
    told(RequestStamps(), "one", each)
    assert each.kv_transfer_params == {"do_remote_decode": True, STAMP_FIELD: "one"}


def test_nothing_is_remembered_of_requests_that_have_ended() -> None:
    stamps = RequestStamps()
    told(stamps, "one", output("a", 1), output("b", 2, ended="stop"))
    stamps.forget("a")
    assert stamps._told == {}


def test_spans_begin_where_the_stamp_changes() -> None:
    state = ReplyState()
    assert state.spans(0) == []
    assert state.spans(3) is None
    for stamp, num_tokens in (("one", 0), ("one", 2), ("two", 5)):
        state.begin_span(stamp, num_tokens)
    spans = [(s.version, s.start, s.end) for s in state.spans(7) or ()]
    assert spans == [("one", 0, 5), ("two", 5, 7)]
    assert isinstance((state.spans(7) or [None])[0], upstream.WeightVersionSpan)


def test_a_wheel_for_gpus_gets_the_kernels_of_the_installed_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(release: str, into: Path) -> Path:
        wheel = into / "vllm-9.9.0-cp38-abi3-manylinux_2_28_x86_64.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("vllm/version.py", "__version__ = '9.9.0'")
            archive.writestr("vllm/_C_gpu.abi3.so", "for GPUs")
            archive.writestr(
                "vllm-9.9.0.dist-info/METADATA", "Name: vllm\nVersion: 9.9.0\n"
            )
        return wheel

    monkeypatch.setattr(site, "RELEASES", tmp_path)
    monkeypatch.setattr(site, "download", download)
    folder = site.site_of("9.9.0")
    assert (folder / "vllm" / "version.py").read_text() == "__version__ = '9.9.0'"
    assert not (folder / "vllm" / "_C_gpu.abi3.so").exists()
    assert list((folder / "vllm").glob("*.so"))
    about = (folder / "vllm-9.9.0+cpu.dist-info" / "METADATA").read_text()
    assert "Version: 9.9.0+cpu" in about
    assert site.site_of("9.9.0") == folder, "it is made once"


def test_the_table_of_releases_counts_the_results_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    junit = tmp_path / "0.29.0.xml"
    junit.write_text(
        "<testsuite><testcase/><testcase/><testcase><failure/></testcase></testsuite>"
    )
    monkeypatch.setattr(release_runs, "FILE", tmp_path / "runs.json")
    monkeypatch.setattr("sys.argv", ["release_runs", str(junit)])
    release_runs.main()
    line = next(
        each for each in release_runs.releases().split("\n") if "0.29.0" in each
    )
    assert "2 passed, 1 failed" in line
