"""A flip exchanges all tensors of two module trees, or none."""

import pytest
import torch

from vllm.inflight.errors import ArenaTorn
from vllm.inflight.worker.model.kinds.cpu_packing import UNPACKED
from vllm.inflight.worker.shadow.flip import Exchange


class Unwilling:
    """A tensor that refuses the first so many of what it is given."""

    def __init__(
        self,
        tensor: torch.Tensor,
        refusals: int,
        error: type[BaseException] = RuntimeError,
    ) -> None:
        self._tensor, self.refusals, self.error = tensor, refusals, error

    @property
    def data(self) -> torch.Tensor:
        return self._tensor.data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if self.refusals:
            self.refusals -= 1
            raise self.error("no memory")
        self._tensor.data = value


@pytest.fixture
def trees() -> tuple[torch.nn.Module, torch.nn.Module]:
    live = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    second = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    return live, second


def values(tree: torch.nn.Module) -> list[list[float]]:
    return [p.detach().flatten().tolist() for p in tree.parameters()]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("index", range(6))
def test_an_exchange_that_breaks_off_has_exchanged_nothing(trees, index, error):
    live, second = trees
    before = values(live), values(second)
    flip = Exchange(live, second)
    mine, theirs = flip._params[index]
    flip._params[index] = mine, Unwilling(theirs, 1, error)
    with pytest.raises(error, match="no memory"):
        flip()
    assert (values(live), values(second)) == before
    flip()
    assert (values(second), values(live)) == before


class Interrupted(dict):
    """The attributes of a layer; Ctrl-C comes as they are exchanged."""

    is_over = False

    def __setitem__(self, name: str, value: object) -> None:
        if not self.is_over:
            self.is_over = True
            raise KeyboardInterrupt
        super().__setitem__(name, value)


def test_an_interrupted_flip_restores_the_parameters_and_the_attributes(
    trees, monkeypatch
):
    live, second = trees
    before = values(live), values(second)
    flip = Exchange(live, second)
    mine, theirs = {"packed": 1}, Interrupted(packed=2)
    flip._kept = [(mine, theirs, "packed")]
    monkeypatch.setattr(
        "vllm.inflight.worker.shadow.flip.vars", lambda it: it, raising=False
    )
    with pytest.raises(KeyboardInterrupt):
        flip()
    assert (values(live), values(second)) == before
    assert (mine, theirs) == ({"packed": 1}, {"packed": 2})
    flip()
    assert (mine, theirs) == ({"packed": 2}, {"packed": 1})


def test_an_exchange_that_cannot_be_undone_is_reported_as_torn(trees):
    flip = Exchange(*trees)
    mine, theirs = flip._params[3]
    flip._params[3] = mine, Unwilling(theirs, 2)
    with pytest.raises(ArenaTorn, match=r"no memory; and undoing it: no memory"):
        flip()


class Mixer(torch.nn.Module):
    """A convolution, looked at in another shape, as Mamba's; and a table."""

    def __init__(self, is_shown: bool = True) -> None:
        super().__init__()
        self.convolution = torch.nn.Linear(3, 4)
        weight = self.convolution.weight.data.view(2, 6)
        shown = weight if is_shown else weight.clone()
        self.register_buffer("shown", shown, persistent=False)
        self.register_buffer("table", torch.zeros(4), persistent=False)


def test_a_buffer_that_is_a_view_of_a_parameter_is_exchanged_with_it():
    live, second = Mixer(), Mixer()
    before, table = second.convolution.weight.flatten().tolist(), live.table.data_ptr()
    flip = Exchange(live, second)
    for shown in live, second, live:
        flip()
        assert shown.shown.flatten().tolist() == before
        assert live.shown.data_ptr() == live.convolution.weight.data_ptr()
        assert second.shown.data_ptr() == second.convolution.weight.data_ptr()
    assert live.table.data_ptr() == table


def test_module_trees_with_different_views_are_not_exchanged():
    with pytest.raises(RuntimeError, match=r"shown shows convolution\.weight"):
        Exchange(Mixer(), Mixer(is_shown=False))


class Mamba(torch.nn.Module):
    """A Mamba layer whose convolution the CPU build has packed, as it is loaded."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.conv1d = torch.nn.Module()
        self.conv1d.weight = torch.nn.Parameter(torch.full((8,), -value), False)
        shown = torch.full((2, 4), value)
        vars(self.conv1d)[UNPACKED] = shown.clone()
        self.register_buffer("conv_weights", shown, persistent=False)

    def versions(self) -> set[float]:
        """Of what is packed, what it was packed from, and what the layer looks at."""
        kept = vars(self.conv1d)[UNPACKED]
        return {
            *(-self.conv1d.weight.data).tolist(),
            *kept.flatten().tolist(),
            *self.conv_weights.flatten().tolist(),
        }


def test_a_packed_convolution_and_what_its_layer_looks_at_change_together():
    live, second = Mamba(1.0), Mamba(2.0)
    second.conv_weights.zero_()  # a second tree is not loaded by way of it
    flip = Exchange(live, second)
    for version in (2.0, 1.0, 2.0):
        flip()
        assert live.versions() == {version}
        assert second.versions() == {3.0 - version}
