"""One delta in the place of several that an engine has missed."""

import pytest
import torch

from tests.support.deltas import applied, integers, random_bits, stepped, with_changes
from tests.unit.trainer.test_delta import published, same, weights
from vllm.inflight.errors import ConfigError
from vllm.inflight.trainer.deltas.chain import DeltaChain
from vllm.inflight.trainer.deltas.delta import Delta, DeltaSearch
from vllm.inflight.trainer.deltas.published import PublishedVersion

Weights = dict[str, torch.Tensor]
SIZE = 200_000


def versions(number: int, share: float = 0.01) -> list[Weights]:
    """Versions of two tensors, of which some steps change only one."""
    made = [{name: torch.randn(SIZE).bfloat16() for name in ("a", "b")}]
    for seed in range(number - 1):
        after = stepped(made[-1], seed, share)
        if seed % 3 == 1:
            after["b"] = made[-1]["b"]
        made.append(after)
    return made


def found(base: PublishedVersion, new: Weights, policy: str = "always") -> Delta:
    delta = DeltaSearch(base, policy).run(new.items(), None)
    assert isinstance(delta, Delta)
    return delta


def noted(chain: DeltaChain, base: PublishedVersion, news: list[Weights]) -> None:
    """Commit a delta to each of some versions."""
    for new in news:
        delta = found(base, new)
        delta.commit()
        chain.note(delta)


def leads(delta: Delta, old: Weights, new: Weights) -> bool:
    """Whether the delta leads from one version to another one."""
    names = list(delta.body.changed)
    olds = [old[name].view(-1) for name in names]
    made = applied(delta.body.parts, olds)
    whole = old | {
        name: tensor.view(old[name].shape)
        for name, tensor in zip(names, made, strict=True)
    }
    return same(whole, new)


def test_one_delta_leads_from_each_older_version_to_the_newest():
    made = versions(5)
    digests = [published(one).digest for one in made]
    base, chain = published(made[0]), DeltaChain()
    noted(chain, base, made[1:-1])
    last = found(base, made[-1])
    single = last.body.num_bytes
    for first, digest in enumerate(digests[:-2]):
        longer = chain.since({digest}, last, "auto")
        assert longer is not None and longer.base_digest == digest
        # It is right for every version in between, too.
        assert all(leads(longer, old, made[-1]) for old in made[first:])
        assert longer.manifest(7).base == digest
        # Raw values take more than differences do, by less than two to one.
        assert single < longer.body.num_bytes < 2 * single * (len(made) - 1 - first)
        assert {name: spec.digest for name, spec in longer.body.changed.items()} == {
            name: published(made[-1]).specs[name].digest for name in ("a", "b")
        }
    both = chain.since({digests[2], digests[1]}, last, "auto")
    assert both is not None and both.base_digest == digests[1]
    assert last.commit().digest == digests[-1]


def test_it_is_bitwise_for_every_dtype():
    made = [weights()]
    base, chain = published(made[0]), DeltaChain()
    for step in range(3):
        after = {name: tensor.clone() for name, tensor in made[-1].items()}
        for name, tensor in after.items():
            if tensor.numel() > step:
                after[name] = with_changes(
                    tensor.reshape(-1), [step, tensor.numel() - 1]
                ).view(tensor.shape)
        made.append(after)
    noted(chain, base, made[1:3])
    longer = chain.since({published(made[0]).digest}, found(base, made[3]), "always")
    assert longer is not None and leads(longer, made[0], made[3])


def test_an_element_that_has_changed_back_is_in_it():
    old = {"a": random_bits(torch.bfloat16, SIZE)}
    new = {"a": with_changes(old["a"], [5])}
    base, chain = published(old), DeltaChain()
    start = base.digest
    noted(chain, base, [new])
    longer = chain.since({start}, found(base, old), "auto")
    assert longer is not None
    for one in (old, new):
        assert leads(longer, one, old)


@pytest.mark.parametrize("reason", ["unknown", "a whole version", "too old", "none"])
def test_there_is_none_from_a_version_that_the_chain_does_not_reach(reason):
    made = versions(5)
    length = {"too old": 2, "none": 0}.get(reason, 4)
    base, chain = published(made[0]), DeltaChain(length)
    start = base.digest
    noted(chain, base, made[1:3])
    if reason == "a whole version":
        base = published(made[3])
    else:
        noted(chain, base, made[3:4])
    last = found(base, made[4])
    served = "0" * 32 if reason == "unknown" else start
    assert chain.since({served}, last, "always") is None
    assert chain.since({served, base.digest}, last, "always") is None


def test_after_a_gap_the_chain_begins_anew():
    made = versions(5)
    base, chain = published(made[0]), DeltaChain()
    start = base.digest
    noted(chain, base, made[1:2])
    base = published(made[2])
    noted(chain, base, made[3:4])
    last = found(base, made[4])
    assert chain.since({start}, last, "always") is None
    longer = chain.since({published(made[2]).digest}, last, "always")
    assert longer is not None and leads(longer, made[2], made[4])


def test_it_keeps_less_than_a_quarter_of_a_version():
    made = versions(9, share=0.05)
    base, chain = published(made[0]), DeltaChain(100)
    kept = 0
    for new in made[1:]:
        noted(chain, base, [new])
        assert kept < chain.num_bytes or chain.num_bytes > base.num_bytes / 8
        kept = chain.num_bytes
        assert 0 < kept < base.num_bytes / 4


def test_the_whole_version_is_cheaper_than_many_changes():
    made = versions(4, share=0.09)
    base, chain = published(made[0]), DeltaChain()
    start = base.digest
    noted(chain, base, made[1:3])
    last = found(base, made[3], "auto")
    assert chain.since({start}, last, "auto") is None
    longer = chain.since({start}, last, "always")
    assert longer is not None and leads(longer, made[0], made[3])


def test_bits_of_the_base_that_were_lost_are_not_announced():
    """What a delta announces is of the tensors that were digested, not worked out."""
    made = versions(3)
    base, chain = published(made[0]), DeltaChain()
    start = base.digest
    noted(chain, base, made[1:2])
    kept = base.tensor("a")
    assert kept is not None
    integers(kept)[7] ^= 1
    longer = chain.since({start}, found(base, made[2]), "always")
    assert longer is not None
    assert longer.body.changed["a"].digest == published(made[2]).specs["a"].digest


@pytest.mark.parametrize("length", [-1, 1.5, True, "4"])
def test_a_length_that_is_none_is_refused_by_name(length):
    with pytest.raises(ConfigError, match="delta_chain"):
        DeltaChain(length)
