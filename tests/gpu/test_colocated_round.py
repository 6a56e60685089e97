"""Unfinished requests outlive a trainer's turn on the GPU that they are decoded on."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.gpu.test_sleep import KV_BYTES, MIB, one_set
from tests.support.engines.probe import prompts
from tests.support.gpu.exact import exact_products  # noqa: F401 (a fixture)
from tests.support.gpu.memory import taken
from vllm.inflight.errors import PauseConflict

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.usefixtures("exact_products"),
]

SHAPE = {"hidden": 2048, "layers": 4, "vocab": 32000}
TOKENS = 200
BEGUN = 16
ROUNDS = 3


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "graphs"])
def engine(start: Callable[..., Any], old: Path, request: pytest.FixtureRequest) -> Any:
    from vllm.config.weight_transfer import WeightTransferConfig

    return start(
        old,
        dtype="float32",  # KV that is computed again is the same, but for rounding
        enforce_eager=request.param,
        enable_sleep_mode=True,
        kv_cache_memory_bytes=KV_BYTES,
        weight_transfer_config=WeightTransferConfig(backend="local"),
    )


@pytest.fixture
def llm(engine: Any, old: Path) -> Iterator[Any]:
    """The engine, awake, on the old weights, without requests and updates."""
    engine.update_weights_from_disk(str(old), "old")
    engine.reset_prefix_cache()
    yield engine
    engine.wake_up()
    engine.continue_generation()
    if engine.weight_update_status()["active"] is not None:
        engine.abort_weight_update()


class Requests:
    """Four requests, which this thread takes from step to step."""

    number = 0

    def __init__(self, llm: Any, begun: list[list[int]] | None = None) -> None:
        self._engine = llm.llm_engine
        self.outputs: dict[str, Any] = {}
        self.prompts = [each["prompt_token_ids"] for each in prompts(4)]
        begun = begun or [[]] * len(self.prompts)
        Requests.number += 1
        self.names = [f"{Requests.number}-{i}" for i in range(len(self.prompts))]
        for name, prompt, told in zip(self.names, self.prompts, begun, strict=True):
            params = SamplingParams(
                temperature=0, max_tokens=TOKENS - len(told), ignore_eos=True
            )
            whole = {"prompt_token_ids": prompt + told}
            self._engine.add_request(name, whole, params)

    def step(self, times: int = 1) -> "Requests":
        for _ in range(times):
            for output in self._engine.step():
                self.outputs[output.request_id] = output.outputs[0]
        return self

    def begin(self) -> "Requests":
        while not self.tokens or min(map(len, self.tokens)) < BEGUN:
            self.step()
        return self

    def settle(self) -> list[list[int]]:
        """Tokens of a paused engine, with those of the step that was in flight."""
        tokens = self.step(3).tokens
        assert self.step(3).tokens == tokens, "the engine decodes in a pause"
        return tokens

    def run(self) -> "Requests":
        while self._engine.has_unfinished_requests():
            self.step()
        return self

    @property
    def tokens(self) -> list[list[int]]:
        known = [self.outputs.get(name) for name in self.names]
        return [list(each.token_ids) if each else [] for each in known]

    def spans(self, number: int) -> list[tuple[str, int, int]]:
        told = self.outputs[self.names[number]].weight_versions
        return [(span.version, span.start, span.end) for span in told]


def train() -> None:
    """Have a trainer use most of the memory that is free, and leave it dirty."""
    torch.cuda.empty_cache()
    half = torch.cuda.mem_get_info()[0] // 2
    used = torch.full((half // 4,), 7.0, device="cuda")
    weights = torch.randn(2048, 2048, device="cuda", requires_grad=True)
    (weights @ weights).sum().backward()
    torch.cuda.synchronize()
    del used, weights
    torch.cuda.empty_cache()


def first_difference(tokens: list[int], others: list[int]) -> int:
    """Index of the first token that is another one."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(others)))


def check(llm: Any, requests: Requests, begun: list[list[int]], label: str) -> None:
    """Each went on as an engine does that begins with its prompt and tokens now."""
    llm.reset_prefix_cache()
    again = Requests(llm, begun).run()
    expected = [told + more for told, more in zip(begun, again.tokens, strict=True)]
    differ = [
        (number, first_difference(*pair), len(begun[number]), requests.spans(number))
        for number, pair in enumerate(zip(requests.tokens, expected, strict=True))
        if pair[0] != pair[1]
    ]
    assert differ == [], "(request, first other token, tokens before the round, spans)"
    for number, told in enumerate(begun):
        first, *_, last = requests.spans(number)
        assert first[1:] == (0, len(told)), "the first span ends where the round began"
        assert last == (label, len(told), TOKENS)


def by_release(llm: Any) -> None:
    told = llm.release_memory_occupation(mode="retract")
    assert (told["num_retracted"], told["num_aborted"]) == (4, 0)


def by_pause(llm: Any) -> None:
    llm.pause_generation(mode="retract")
    llm.release_memory_occupation(["kv_cache"])
    llm.release_memory_occupation(["weights"])


def by_level_1(llm: Any) -> None:
    llm.sleep(level=1, mode="keep")


def by_level_2(llm: Any) -> None:
    llm.sleep(level=2, mode="keep")


@pytest.mark.parametrize("give_back", [by_release, by_pause, by_level_1, by_level_2])
def test_requests_go_on_with_the_right_tokens_in_every_round(
    llm: Any,
    old: Path,
    new: Path,
    give_back: Callable[[Any], None],
    record_property: Callable[[str, object], None],
) -> None:
    label = "old"
    for number in range(ROUNDS):
        requests = Requests(llm).begin()
        awake = taken()
        give_back(llm)
        freed = awake - taken()
        record_property("given_back_gib", round(freed / (1 << 30), 2))
        assert freed > KV_BYTES + 2 * one_set_bytes(llm) - 512 * MIB
        begun = requests.settle()
        train()
        llm.wake_up(tags=["weights"])
        label = f"round-{number}"
        llm.update_weights_from_disk(str((new, old)[number % 2]), label)
        assert requests.step(3).tokens == begun
        llm.wake_up(tags=["kv_cache"])
        llm.continue_generation()
        requests.run()
        assert abs(taken() - awake) < 512 * MIB
        check(llm, requests, begun, label)


def one_set_bytes(llm: Any) -> int:
    """Bytes of one set of weights; known also while they are asleep."""
    return one_set(llm)


@pytest.mark.parametrize("is_weights_first", [True, False])
def test_weights_and_kv_cache_can_wake_up_in_either_order(
    llm: Any, is_weights_first: bool
) -> None:
    requests = Requests(llm).begin()
    llm.release_memory_occupation(mode="retract")
    begun = requests.settle()
    train()
    tags = ["weights", "kv_cache"] if is_weights_first else ["kv_cache", "weights"]
    assert [llm.wake_up(tags=[tag]) for tag in tags] == [False, True]
    requests.run()
    llm.reset_prefix_cache()
    again = Requests(llm, begun).run().tokens
    expected = [told + more for told, more in zip(begun, again, strict=True)]
    assert requests.tokens == expected


def test_the_weights_sleep_alone_and_requests_keep_their_kv(llm: Any) -> None:
    expected = Requests(llm).run().tokens
    llm.reset_prefix_cache()
    requests = Requests(llm).begin()
    awake, weights = taken(), one_set_bytes(llm)
    llm.release_memory_occupation(["weights"], mode="in_place")
    freed = awake - taken()
    assert 2 * weights - 64 * MIB < freed < 2 * weights + 512 * MIB
    requests.settle()
    train()
    assert llm.wake_up(tags=["weights"]) is True
    assert requests.run().tokens == expected


def test_the_kv_cache_sleeps_alone_and_a_rollback_target_stays(
    llm: Any, new: Path
) -> None:
    llm.update_weights_from_disk(str(new), "new")
    requests = Requests(llm).begin()
    awake = taken()
    llm.pause_generation(mode="retract")
    begun = requests.settle()
    llm.llm_engine.release_kv_cache_memory()
    assert KV_BYTES - 64 * MIB < awake - taken() < KV_BYTES + 512 * MIB
    train()
    llm.rollback_weights()
    llm.wake_up(tags=["kv_cache"])
    llm.continue_generation()
    check(llm, requests.run(), begun, "old")


def test_a_request_can_be_aborted_while_everything_is_asleep(llm: Any) -> None:
    requests = Requests(llm).begin()
    llm.release_memory_occupation(mode="retract")
    begun = requests.settle()
    llm.llm_engine.abort_request([requests.names[1]])
    requests.step(3)
    train()
    llm.wake_up()
    requests.run()
    assert requests.tokens[1] == begun[1]
    assert [len(tokens) for tokens in requests.tokens] == [
        TOKENS if number != 1 else len(begun[1]) for number in range(4)
    ]


def test_a_release_with_requests_in_place_is_rejected_before_memory_is_freed(
    llm: Any,
) -> None:
    expected = Requests(llm).run().tokens
    llm.reset_prefix_cache()
    requests = Requests(llm).begin()
    awake = taken()
    llm.pause_generation(mode="in_place")
    with pytest.raises(PauseConflict, match="use mode 'retract'"):
        llm.release_memory_occupation()
    assert abs(taken() - awake) < 64 * MIB
    llm.continue_generation()
    assert requests.run().tokens == expected
