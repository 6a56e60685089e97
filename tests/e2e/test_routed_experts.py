"""The experts of each token beside its version (`--enable-return-routed-experts`).

The row of a position has the experts that its token was sent to when it was first read,
in the step that sampled the next token. So it belongs to the version of that token.
"""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines.routing import Routing
from tests.support.serving import Server
from vllm.inflight.releases.table import holds

pytestmark = pytest.mark.engine

SHAPE = {"family": "qwen3_moe"}
PROMPT = list(range(30, 70))
BEFORE, TOKENS = 12, 40
FLAG = {"enable_return_routed_experts": True, "dtype": "float32"}

RETURNED = pytest.mark.skipif(
    not (torch.cuda.is_available() or holds("0.30.0", "0.31.0")),
    reason="of vLLM's CPU builds, only that of 0.30 returns experts",
)


@pytest.fixture(scope="module")
def routing(old: Path, new: Path) -> Routing:
    return Routing({"old": old, "new": new})


@pytest.fixture(scope="module")
def routed(start: Callable[..., Any], old: Path) -> Any:
    return start(old, **FLAG)


def rows_of(output: Any) -> torch.Tensor:
    return torch.from_numpy(output.routed_experts.astype("int64")).sort(-1).values


def through_an_update(llm: Any, old: Path, new: Path, mode: str) -> Any:
    """A choice whose weights change after `BEFORE` steps."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    llm.update_weights_from_disk(str(old), "old")
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    engine.add_request(mode, {"prompt_token_ids": PROMPT}, params)
    for _ in range(BEFORE):
        engine.step()
    llm.update_weights_from_disk(str(new), "new", mode=mode)
    last: list[Any] = []
    while engine.has_unfinished_requests():
        last = engine.step() or last
    (result,) = last
    return result.outputs[0]


@pytest.mark.skipif(
    torch.cuda.is_available() or holds("0.30.0", "0.31.0"),
    reason="experts are returned",
)
def test_vllms_cpu_build_does_not_start_with_the_flag(
    start: Callable[..., Any], old: Path
) -> None:
    """On a CPU the other tests here run on vLLM 0.30."""
    why = "Model Runner V2" if holds("0.31.0", None) else "not supported"
    with pytest.raises(Exception, match=why):
        start(old, **FLAG)


@RETURNED
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_the_experts_of_each_token_are_those_of_the_version_that_read_it_first(
    routed: Any, routing: Routing, old: Path, new: Path, mode: str
) -> None:
    output = through_an_update(routed, old, new, mode)
    first, last = output.weight_versions
    assert (first.version, last.version) == ("old", "new")
    assert 0 < first.end < last.end == TOKENS
    ids = PROMPT + list(output.token_ids)
    rows = rows_of(output)
    # The last token is never read.
    assert rows.shape == (len(ids) - 1, routing.layers, routing.top)
    # The first position that the new weights read: its next token is theirs.
    border = len(PROMPT) + first.end - 1
    count = len(rows)
    labels = ["old"] * border + ["new"] * (count - border)
    assert torch.equal(rows[:border], routing.rows(ids[:border], labels[:border]))
    if mode == "retract":
        # They have computed the KV before it anew; those rows are not returned.
        labels = ["new"] * count
    expected = routing.rows(ids[:count], labels)
    assert torch.equal(rows[border:], expected[border:])
    other = routing.rows(ids[:count], ["old"] * count)
    assert not torch.equal(rows[border:], other[border:])


@RETURNED
def test_a_cached_prefix_has_the_experts_of_its_own_version(
    routed: Any, routing: Routing, old: Path, new: Path
) -> None:
    """The namespace of the prefix cache keeps the experts of versions apart, too."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    prompt = {"prompt_token_ids": PROMPT[::-1]}
    for label, folder, cached in (
        ("old", old, (0, 32)),
        ("new", new, (0, 32)),
        ("old", old, (0, 32)),
    ):
        routed.update_weights_from_disk(str(folder), label)
        for found in cached:
            (result,) = routed.generate([prompt], params, use_tqdm=False)
            assert result.num_cached_tokens == found
            (output,) = result.outputs
            ids = prompt["prompt_token_ids"] + list(output.token_ids)
            expected = routing.rows(ids[:-1], [label] * (len(ids) - 1))
            assert torch.equal(rows_of(output), expected)


@RETURNED
def test_the_rollout_route_returns_them_as_sglang_does(
    routing: Routing, old: Path
) -> None:
    with Server(old, "--enable-return-routed-experts", "--dtype", "float32") as server:
        body = {"input_ids": PROMPT, "return_routed_experts": True}
        body |= {"sampling_params": {"max_new_tokens": 6, "ignore_eos": True}}
        reply = server.post("/generate", body)
        late = server.post("/generate", body | {"routed_experts_start_len": 30})
        assert server.client.get("/server_info").json()["enable_return_routed_experts"]
    ids = PROMPT + reply["output_ids"]
    packed = base64.b64decode(reply["meta_info"]["routed_experts"])
    rows = torch.frombuffer(bytearray(packed), dtype=torch.int32).long()
    rows = rows.reshape(len(ids) - 1, routing.layers, routing.top).sort(-1).values
    assert torch.equal(rows, routing.rows(ids[:-1], ["old"] * (len(ids) - 1)))
    packed = base64.b64decode(late["meta_info"]["routed_experts"])
    row = 4 * routing.layers * routing.top
    assert len(packed) == (len(PROMPT) + len(late["output_ids"]) - 1 - 30) * row
