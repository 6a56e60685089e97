"""The door of an adopted call, where kernels know the places of parameters."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from vllm.inflight.errors import Conflict
from vllm.inflight.worker.adopted_call import AdoptedCall
from vllm.inflight.worker.model import layers
from vllm.inflight.worker.staging.adopted import door as extension_door
from vllm.inflight.worker.staging.adopted import weight_memory
from vllm.inflight.worker.staging.adopted.door import Door

CPU = torch.device("cpu")


def replace_data(layer: torch.nn.Module) -> None:
    layer.weight.data = torch.ones(2, 2)


def replace_parameter(layer: torch.nn.Module) -> None:
    layer.weight = torch.nn.Parameter(torch.ones(2, 2))


def replace_past_torch(layer: torch.nn.Module) -> None:
    layer._parameters["weight"] = torch.nn.Parameter(torch.ones(2, 2))


def replace_layer(model: torch.nn.Module) -> None:
    model[0] = torch.nn.Linear(2, 2, bias=False)


@pytest.mark.parametrize("clones", [False, True])
@pytest.mark.parametrize("replace", [replace_data, replace_parameter])
def test_a_parameter_that_a_method_replaces_is_put_back_and_the_call_has_failed(
    replace: Callable[[torch.nn.Module], None], clones: bool
) -> None:
    """Graphs would go on with the memory that they know."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    param, place = model[0].weight, model[0].weight.data_ptr()
    door = Door(lambda _: None, model, torch.nn.Module(), clones=clones, device=CPU)
    door.bring_home()
    assert door.failure is None
    replace(model[0])
    door.bring_home()
    assert model[0].weight is param and param.data_ptr() == place
    assert isinstance(door.failure, Conflict)
    assert "0.weight of the shadow model" in door.failure.message


@pytest.mark.parametrize("clones", [False, True])
def test_a_parameter_that_is_replaced_past_torch_is_put_back_at_the_end(
    clones: bool,
) -> None:
    """Torch does not tell of it, and to look at each layer at each call takes long."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    param = model[0].weight
    door = Door(lambda _: None, model, torch.nn.Module(), clones=clones, device=CPU)
    door.call = call = AdoptedCall("it", door.note)
    door([])
    replace_past_torch(model[0])
    call.end()
    with pytest.raises(Conflict, match=r"0\.weight of the shadow model"):
        door.require_all_through(())
    assert model[0].weight is param


def test_a_layer_that_a_method_replaces_is_put_back_and_the_call_has_failed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    layer = model[0]
    door = Door(lambda _: None, model, torch.nn.Module(), clones=False, device=CPU)
    replace_layer(model)
    door.bring_home()
    assert model[0] is layer
    assert isinstance(door.failure, Conflict)


def test_layers_that_are_made_anew_during_a_load_may_have_other_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))

    def load(_: object) -> None:
        replace_parameter(model[0])

    door = Door(load, model, torch.nn.Module(), clones=True, device=CPU)
    door.call = AdoptedCall("it", door.note)
    door([])
    door.bring_home()
    assert door.failure is None
    param = model[0].weight
    replace_data(model[0])
    door([])  # a load later: what was put there before is not taken over
    assert isinstance(door.failure, Conflict)
    assert param.data_ptr() != model[0].weight.data_ptr()


def test_meta_parameters_that_a_method_replaces_are_put_back_too() -> None:
    """They have no address that would differ."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False, device="meta"))
    place = model[0].weight.untyped_storage()._cdata
    door = Door(lambda _: None, model, torch.nn.Module(), clones=True, device=CPU)
    model[0].weight.data = torch.ones(2, 2, device="meta")
    door.bring_home()
    assert model[0].weight.untyped_storage()._cdata == place
    assert isinstance(door.failure, Conflict)


def test_parameters_that_a_load_has_replaced_are_known_when_they_are_noted() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    door = Door(lambda _: None, model, torch.nn.Module(), clones=True, device=CPU)
    door.memory.note()
    replace_parameter(model[0])
    door.note_homes()
    (known,) = door.memory.of(model[0].weight.data)
    assert known.param is model[0].weight
    replace_layer(model)
    door.note_homes()
    replace_parameter(model[0])  # of the new layer
    door.note_homes()
    (known,) = door.memory.of(model[0].weight.data)
    assert known.param is model[0].weight


def test_places_that_were_found_while_a_load_moved_them_are_found_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    door = Door(lambda _: None, model, torch.nn.Module(), clones=True, device=CPU)
    door.memory.moved()

    def parameters(walked: torch.nn.Module) -> Any:
        yield from list(layers.parameters(walked))
        if walked is model and door.memory.models:
            monkeypatch.undo()
            replace_parameter(model[0])
            door.memory.moved()

    monkeypatch.setattr(weight_memory, "parameters", parameters)
    door.memory.note()
    (known,) = door.memory.of(model[0].weight.data)
    assert known.param is model[0].weight


@pytest.mark.parametrize("clones", [False, True])
def test_the_model_is_walked_again_only_when_a_load_has_changed_it(
    clones: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer may make a call for each of hundreds of tensors."""
    walks: list[torch.nn.Module] = []

    def parameters(model: torch.nn.Module) -> Any:
        walks.append(model)
        return layers.parameters(model)

    monkeypatch.setattr(extension_door, "parameters", parameters)
    monkeypatch.setattr(weight_memory, "parameters", parameters)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    replaces = False

    def load(_: object) -> None:
        if replaces:
            replace_parameter(model[0])

    door = Door(load, model, torch.nn.Module(), clones=clones, device=CPU)
    door.call = AdoptedCall("it", door.note)

    def call() -> None:
        door.note_homes()
        door.memory.note()
        door([])

    call()
    walks.clear()
    call()
    assert walks == []
    if clones:
        replaces = True
        call()
        (known,) = door.memory.of(model[0].weight.data)
        assert known.param is model[0].weight


@pytest.mark.parametrize("clones", [False, True])
@pytest.mark.parametrize("replace", [replace_data, replace_parameter])
def test_a_parameter_that_is_replaced_between_two_calls_is_put_back(
    replace: Callable[[torch.nn.Module], None], clones: bool
) -> None:
    """A thread of a method may go on when the method has returned."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    param, place = model[0].weight, model[0].weight.data_ptr()
    door = Door(lambda _: None, model, torch.nn.Module(), clones=clones, device=CPU)
    for _ in range(2):
        door.call = call = AdoptedCall("it", door.note)
        door([])
        call.end()
        door.bring_home()
        if door.failure is None:
            replace(model[0])
    assert isinstance(door.failure, Conflict)
    assert model[0].weight is param and param.data_ptr() == place


@pytest.mark.parametrize("clones", [False, True])
def test_calls_for_a_tensor_each_do_not_look_at_every_layer(
    monkeypatch: pytest.MonkeyPatch, clones: bool
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    door = Door(lambda _: None, model, torch.nn.Module(), clones=clones, device=CPU)
    looks: list[object] = []
    monkeypatch.setattr(
        extension_door, "contents", lambda of: looks.append(of) or layers.contents(of)
    )
    for _ in range(9):
        door.call = call = AdoptedCall("it", door.note)
        door([])
        call.end()
        door.bring_home()
    assert door.failure is None
    assert len(looks) == 1, "before the first load"
    torch.nn.Linear(2, 2)  # elsewhere; torch does not tell where
    door.bring_home()
    door.require_all_through(())
    assert len(looks) == 3


@pytest.mark.parametrize("kind", [list, tuple])
def test_tensors_that_are_all_there_are_loaded_in_batches(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension_door, "BATCH_BYTES", 8)
    batches: list[list[str]] = []

    def load(weights: Any) -> None:
        batches.extend([name for name, _ in batch] for batch in weights.batches())

    door = Door(load, torch.nn.Module(), torch.nn.Module(), clones=False, device=CPU)
    door.call = AdoptedCall("it", door.note)
    sizes = {"a": 1, "b": 1, "c": 4, "d": 1, "e": 1, "f": 1}
    loaded = door(kind((name, torch.zeros(size)) for name, size in sizes.items()))
    assert batches == [["a", "b"], ["c"], ["d", "e"], ["f"]]
    assert loaded == set(sizes)


def test_tensors_of_an_iterator_are_drawn_one_by_one() -> None:
    """The memory of one may be that of the next."""
    memory, found = torch.zeros(1), []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(3):
            yield str(number), memory.fill_(number)

    def load(weights: Any) -> None:
        assert not hasattr(weights, "batches")
        found.extend(float(tensor) for _, tensor in weights)

    door = Door(load, torch.nn.Module(), torch.nn.Module(), clones=False, device=CPU)
    door.call = AdoptedCall("it", door.note)
    assert door(tensors()) == {"0", "1", "2"}
    assert found == [0, 1, 2]
