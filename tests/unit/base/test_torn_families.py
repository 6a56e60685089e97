"""First versions of each family: which lack what an engine has missed, and which not.

The names are those of transformers, in the tree of vLLM's model.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.support.models.families import FAMILIES
from tests.support.models.seeing import SEEING
from tests.support.models.tiny import common_fields, make_tokenizer
from vllm.inflight.tensor_names import is_torn


@cache
def made(name: str) -> Any:
    """A model without memory."""
    with torch.device("meta"):
        if name in FAMILIES:
            return FAMILIES[name].make(**common_fields(make_tokenizer()))
        tokenizer = make_tokenizer(SEEING[name].named)
        tokenizer.add_tokens([*SEEING[name].tokens.values()], special_tokens=True)
        return SEEING[name].make(tokenizer, **common_fields(tokenizer))


def params_of(name: str) -> dict[str, torch.Tensor]:
    # What embeds is a model of its own in transformers, and a part of one in vLLM.
    prefix = "model." if name == "bert" else ""
    return {prefix + n: param for n, param in made(name).named_parameters()}


@pytest.mark.parametrize("name", [*FAMILIES, *SEEING])
def test_a_version_without_the_embedding_alone_is_torn(name: str) -> None:
    embedding, params = made(name).get_input_embeddings().weight, params_of(name)
    (missed,) = [n for n, param in params.items() if param is embedding]
    assert is_torn(params.keys() - {missed}, {missed})


@pytest.mark.parametrize("name", FAMILIES)
def test_a_version_without_its_first_tensor_is_torn(name: str) -> None:
    first, *others = params_of(name)
    assert is_torn(others, [first])


@pytest.mark.parametrize("name", SEEING)
def test_a_version_of_the_text_alone_is_whole(name: str) -> None:
    """Of a trainer that leaves the tower alone, and what connects it."""
    model = made(name)
    of_text = {id(each) for each in model.get_decoder().parameters()}
    of_text.add(id(model.get_output_embeddings().weight))
    params = params_of(name)
    sent = {n for n, each in params.items() if id(each) in of_text}
    unsent = params.keys() - sent
    assert sent and unsent
    assert not is_torn(sent, unsent)
    assert is_torn(sorted(sent)[5:], unsent.union(sorted(sent)[:5]))
