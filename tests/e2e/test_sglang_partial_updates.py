"""SGLang's partial updates: calls that begin a version, join one, and end one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor

from tests.support.engines.bare_core import Streams, add, prompt, publish
from tests.support.engines.core_door import Door, said
from tests.support.engines.script import OPTIONS
from tests.support.engines.sent_tensors import entry, halves, tensors
from tests.support.engines.torch_trainer import facts, training

pytestmark = pytest.mark.engine


def test_partial_updates_of_two_trainers_never_form_one_version(
    door: Door, folders: dict[str, Path]
) -> None:
    before = said(door.core)
    first, last = halves(tensors(folders["new"]))

    def send(part: Any, label: str | None = None) -> Any:
        body = {"serialized_named_tensors": [entry(part)], "weight_version": label}
        return door.post("/update_weights_from_tensor", **body)

    send(first, "one")
    assert "staged" in send(last, "two")["message"]  # another label, another version
    door.post("/pause_generation", mode="retract")  # whoever pauses begins anew
    assert "staged" in send(first)["message"]
    door.refused("/continue_generation")
    assert (said(door.core), door.label) == (before, "old")


@pytest.mark.parametrize("is_cut_alike", [True, False])
def test_repeating_a_piece_begins_a_new_version(
    door: Door, folders: dict[str, Path], expected: Any, is_cut_alike: bool
) -> None:
    first, last = halves(tensors(folders["new"]))

    def send(part: Any) -> Any:
        path = "/update_weights_from_tensor"
        return door.post(path, serialized_named_tensors=[entry(part)])

    lost = send(first)["update_id"]
    if not is_cut_alike:
        name = min(first)
        last[name] = first.pop(name)
        first, last = last, first
    again = send(first)
    assert again["update_id"] != lost
    assert door.get(f"/weight_update/{lost}")["phase"] == "aborted"
    done = send(last)
    assert (done["message"], done["update_id"]) == (
        "weights updated",
        again["update_id"],
    )
    assert said(door.core) == expected


def test_a_piece_without_a_label_does_not_join_a_version_that_has_one(
    door: Door, folders: dict[str, Path]
) -> None:
    first, last = halves(tensors(folders["new"]))
    path = "/update_weights_from_tensor"
    door.post(path, serialized_named_tensors=[entry(first)], weight_version="one")
    status, message = door.refused(path, serialized_named_tensors=[entry(last)])
    assert (status, "'one' is under way" in message, door.label) == (409, True, "old")
    door.post(path, serialized_named_tensors=[entry(last)], weight_version="one")
    assert door.label == "one"


@pytest.mark.parametrize("asked", [{"mode": "nap"}, {"lease_s": -1}, {"owner": ""}])
def test_a_rejected_pause_does_not_end_a_partial_version(
    door: Door, folders: dict[str, Path], asked: dict[str, Any]
) -> None:
    first, last = halves(tensors(folders["new"]))
    path = "/update_weights_from_tensor"
    door.post(path, serialized_named_tensors=[entry(first)])
    assert door.refused("/pause_generation", **asked)[0] == 400
    reply = door.post(path, serialized_named_tensors=[entry(last)])
    assert reply["message"] == "weights updated"


@pytest.mark.parametrize("owner, status", [("another", 423), ("", 400)])
def test_a_rejected_continue_does_not_end_a_partial_version(
    door: Door, folders: dict[str, Path], owner: str, status: int
) -> None:
    first, last = halves(tensors(folders["new"]))
    path = "/update_weights_from_tensor"
    door.post("/pause_generation", mode="retract", owner="trainer")
    door.post(path, serialized_named_tensors=[entry(first)])
    assert door.refused("/continue_generation", owner=owner)[0] == status
    reply = door.post(path, serialized_named_tensors=[entry(last)])
    assert reply["message"] == "weights updated"
    assert door.post("/continue_generation", owner="trainer")["paused"] is False


def test_tensors_that_no_parameter_uses_start_no_version(door: Door) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    reply = door.post(
        "/update_weights_from_tensor", serialized_named_tensors=[entry(extra)]
    )
    assert "no parameter" in reply["message"]
    assert door.get("/weight_update")["active"] is None


# ------------------------------------------------------- what fills no parameter
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED = f"{HEAD}: this engine uses its embedding as the head"
ROTARY = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}


@pytest.fixture(scope="module")
def tied_folders(checkpoint: Callable[..., Path]) -> dict[str, Path]:
    """Versions of a model whose head is its embedding, and are without one."""
    return {name: checkpoint(n, tied=True) for n, name in enumerate(("old", "new"))}


@pytest.fixture(scope="module")
def tied_core(tied_folders: dict[str, Path]) -> Iterator[EngineCore]:
    options = OPTIONS | {"max_num_seqs": 4, "dtype": "float32"}
    path = str(tied_folders["old"])
    config = EngineArgs(path, **options).create_engine_config()
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    yield core
    core.shutdown()


class Sender:
    """A trainer that sends pieces of the new version to a model with a tied head."""

    def __init__(self, core: EngineCore, folders: dict[str, Path]) -> None:
        publish(core, folders["old"], "old")
        self.door = Door(core)
        self.rest = tensors(folders["new"])
        embedding = self.rest[EMBEDDING]
        self.head = {HEAD: embedding.clone()}
        self.other = {HEAD: torch.roll(embedding, 1, dims=1)}

    def send(self, part: dict[str, Any], label: str | None = None) -> Any:
        path, body = "/update_weights_from_tensor", {"weight_version": label}
        return self.door.post(path, serialized_named_tensors=[entry(part)], **body)

    def refused(self, part: dict[str, Any], label: str | None = None) -> Any:
        path, body = "/update_weights_from_tensor", {"weight_version": label}
        return self.door.refused(path, serialized_named_tensors=[entry(part)], **body)

    @property
    def previous(self) -> str | None:
        before = self.door.get("/weight_info")["previous"]
        return None if before is None else str(before["weight_version"])

    @property
    def active(self) -> Any:
        return self.door.get("/weight_update")["active"]


@pytest.fixture
def sender(tied_core: EngineCore, tied_folders: dict[str, Path]) -> Sender:
    return Sender(tied_core, tied_folders)


@pytest.mark.parametrize("label", [None, "new"])
def test_a_tied_head_that_comes_last_and_is_the_embedding_costs_nothing(
    sender: Sender, label: str | None
) -> None:
    sender.send(sender.rest, label)
    served = sender.door.label
    reply = sender.send(sender.head, label)
    assert (reply["success"], "no parameter" in reply["message"]) == (True, True)
    assert (sender.door.label, sender.previous, sender.active) == (served, "old", None)


@pytest.mark.parametrize("verify", ["digest", "served"])
@pytest.mark.parametrize("label", [None, "new"])
def test_a_different_tied_head_that_arrives_last_rolls_its_version_back(
    sender: Sender, label: str | None, verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = sender.door.core.vllm_config
    monkeypatch.setattr(config, "additional_config", {"inflight": {"verify": verify}})
    before = said(sender.door.core)
    sender.send(sender.rest, label)
    status, message = sender.refused(sender.other, label)
    assert (
        status,
        TIED in message,
    ) == (422, True)
    assert "'old' is served again" in message
    assert (sender.door.label, sender.active) == ("old", None)
    assert said(sender.door.core) == before


def test_a_late_rejection_without_a_rollback_target_says_which_version_is_served(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender.send(sender.rest, "new")
    sender.door.core.vllm_inflight.live_version.forget_before()
    status, message = sender.refused(sender.other, "new")
    assert (status, "version 'new' stays served" in message) == (422, True)
    assert sender.door.label == "new"


def test_a_tied_head_that_comes_first_is_compared_with_what_follows(
    sender: Sender,
) -> None:
    before = said(sender.door.core)
    reply = sender.send(sender.other)
    assert reply["message"].startswith("staged: 0 of ")
    status, message = sender.refused(sender.rest)
    assert (
        status,
        TIED in message,
    ) == (422, True)
    assert (said(sender.door.core), sender.door.label) == (before, "old")
    sender.send(sender.head)
    assert sender.send(sender.rest)["message"] == "weights updated"


def test_a_head_that_comes_first_again_begins_the_next_version(sender: Sender) -> None:
    sender.send(sender.head, "one")
    sender.send(sender.rest, "one")
    twice = {name: 2 * tensor for name, tensor in sender.rest.items()}
    # Not compared with what is served: it is of the version that follows.
    sender.send({HEAD: twice[EMBEDDING]}, "two")
    sender.send(twice, "two")
    assert (sender.door.label, sender.previous) == ("two", "one")


@pytest.mark.parametrize("ends", ["a pause", "another label", "a rollback", "a begin"])
def test_a_version_that_begins_anew_is_not_compared_with_the_live_weights(
    sender: Sender, ends: str
) -> None:
    sender.send(sender.rest, "one")
    if ends == "a pause":
        sender.door.post("/pause_generation", mode="retract")
        sender.door.post("/continue_generation")
    elif ends == "a rollback":
        sender.door.post("/rollback_weights")
    elif ends == "a begin":
        sender.door.post("/begin_weight_update")
    reply = sender.send(sender.other, "two" if ends == "another label" else "one")
    assert reply["message"].startswith("staged: 0 of ")
    sender.door.post("/abort_weight_update")


def test_buffers_of_older_checkpoints_that_come_last_cost_nothing(
    sender: Sender,
) -> None:
    sender.send(sender.rest, "new")
    for _ in range(2):
        assert "no parameter" in sender.send(ROTARY, "new")["message"]
    assert (sender.door.label, sender.previous, sender.active) == ("new", "old", None)


def test_a_broadcast_head_that_comes_last_is_received_and_compared(
    sender: Sender, tied_folders: dict[str, Path], tmp_path: Path
) -> None:
    names = list(sender.rest)
    folders = {}
    for name, head in (("same", sender.head), ("other", sender.other)):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        save_file(sender.rest | head, folders[name] / "model.safetensors")
    receive = "/update_weights_from_distributed"
    with training() as trainer:
        assert sender.door.post("/init_weights_update_group", **trainer.group)[
            "success"
        ]
        assert trainer.heard() == "joined"
        for label, name in (("one", "same"), ("two", "other"), ("three", "same")):
            trainer.begin(folders[name], names)
            told = facts(folders[name], names)
            sender.door.post(receive, **told, weight_version=label)
            assert trainer.heard() == "sent"
            served = sender.previous
            trainer.begin(folders[name], [HEAD])
            told = facts(folders[name], [HEAD]) | {"weight_version": label}
            if name == "same":
                assert "no parameter" in sender.door.post(receive, **told)["message"]
                assert (sender.door.label, sender.previous) == (label, served)
            else:
                status, message = sender.door.refused(receive, **told)
                assert (status, "'one' is served again" in message) == (422, True)
            assert trainer.heard() == "sent"  # and the group is good for the next one
        sender.door.post("/destroy_weights_update_group", group_name=trainer.name)


# -------------------------------------------------------- a beginning and an end
def test_nothing_is_committed_between_the_begin_and_end_calls_of_a_version(
    sender: Sender, tied_folders: dict[str, Path]
) -> None:
    sender.door.post("/begin_weight_update")
    reply = sender.send(sender.rest, "new")
    assert "committed at POST /end_weight_update" in reply["message"]
    assert sender.door.label == "old"
    assert sender.send(sender.head, "new")["update_id"] == reply["update_id"]
    ended = sender.door.post("/end_weight_update")
    assert (ended["weight_version"], sender.door.label) == ("new", "new")
    assert (sender.previous, sender.active) == ("old", None)
    # An end whose reply was lost is an end.
    assert sender.door.post("/end_weight_update")["weight_version"] == "new"


def test_a_different_tied_head_is_rejected_at_the_end_of_the_version(
    sender: Sender,
) -> None:
    before = said(sender.door.core)
    sender.door.post("/begin_weight_update")
    sender.send(sender.rest, "new")
    sender.send(sender.other, "new")
    status, message = sender.door.refused("/end_weight_update")
    assert (
        status,
        TIED in message,
    ) == (422, True)
    assert (said(sender.door.core), sender.door.label) == (before, "old")
    assert sender.active is None


def test_the_commit_at_the_end_is_as_its_last_piece_asked(sender: Sender) -> None:
    add(sender.door.core, "r", prompt(1))
    Streams(sender.door.core).step(5)
    sender.door.post("/begin_weight_update")
    body = {"serialized_named_tensors": [entry(sender.rest)]}
    sender.door.post("/update_weights_from_tensor", **body, abort_all_requests=True)
    assert sender.door.post("/end_weight_update")["num_aborted"] == 1


def test_decoding_does_not_go_on_over_a_version_that_is_not_ended(
    sender: Sender,
) -> None:
    sender.door.post("/pause_generation", mode="retract")
    sender.door.post("/begin_weight_update")
    sender.send(sender.rest, "new")
    status, message = sender.door.refused("/continue_generation")
    assert (status, "POST /end_weight_update" in message) == (409, True)
    assert (sender.door.label, sender.active) == ("old", None)
    assert sender.door.get("/is_paused")["is_paused"] is False


@pytest.mark.parametrize("ended_by", ["an abort", "another update"])
def test_further_pieces_are_rejected_after_another_caller_ended_the_version(
    sender: Sender, tied_folders: dict[str, Path], ended_by: str
) -> None:
    first, last = halves(sender.rest)
    sender.door.post("/begin_weight_update")
    sender.send(first)
    sender.door.post("/abort_weight_update")
    if ended_by == "another update":
        path = str(tied_folders["old"])
        sender.door.post("/update_weights_from_disk", model_path=path)
    for call in ("a piece", "an end"):
        if call == "a piece":
            status, message = sender.refused(last)
            assert "begin the version again" in message
        else:
            sender.door.post("/begin_weight_update")
            sender.send(first)
            sender.door.post("/abort_weight_update")
            status, message = sender.door.refused("/end_weight_update")
        assert (status, "aborted" in message) == (409, True)
    assert sender.active is None


def test_two_engines_of_one_process_remember_their_own_pieces(
    sender: Sender, door: Door, folders: dict[str, Path]
) -> None:
    first, last = halves(tensors(folders["new"]))
    path = "/update_weights_from_tensor"
    lost = door.post(path, serialized_named_tensors=[entry(first)])["update_id"]
    sender.send(sender.rest)
    # A piece that comes again begins anew, whatever another engine was sent meanwhile.
    again = door.post(path, serialized_named_tensors=[entry(first)])["update_id"]
    assert again != lost
    done = door.post(path, serialized_named_tensors=[entry(last)])
    assert done["update_id"] == again
