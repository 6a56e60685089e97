"""Deltas into a real engine: tokens and digests equal those of whole versions."""

from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig

from tests.support.deltas import delta_between, stepped
from tests.support.engines.mixtures import mixed
from tests.support.engines.probe import outputs_during
from tests.support.engines.script import run_script
from vllm.inflight.engine.scheduling.prefix_cache import NamespacePolicy
from vllm.inflight.engine.scheduling.scheduler_state import SchedulerState
from vllm.inflight.errors import (
    BaseMismatch,
    ConfigError,
    InflightError,
    Malformed,
    WeightsMismatch,
)
from vllm.inflight.trainer import Publisher
from vllm.inflight.trainer.deltas.published import PublishedVersion
from vllm.inflight.worker.delta.whole_tensors import DeltaTensors

pytestmark = pytest.mark.engine

PROMPT = list(range(40, 72))
LENGTH = 900 if torch.cuda.is_available() else 200
"""Of requests during a commit. A GPU takes a millisecond or two for each token."""


def tokens(llm: Any) -> list[int]:
    """What the weights served now make of four prompts: 16 tokens in four steps."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    texts = [{"prompt_token_ids": [t + n for t in PROMPT]} for n in range(4)]
    outputs = llm.generate(texts, params, use_tqdm=False)
    return [token for output in outputs for token in output.outputs[0].token_ids]


def step(weights: dict[str, torch.Tensor], seed: int, share: float = 0.02) -> None:
    """Change a share of all elements in place."""
    for name, tensor in stepped(weights, seed, share).items():
        weights[name].copy_(tensor)


@pytest.fixture(scope="module")
def llm(start: Callable[..., Any], old: Path) -> Any:
    return start(old, weight_transfer_config=WeightTransferConfig(backend="local"))


@pytest.fixture
def weights(old: Path) -> dict[str, torch.Tensor]:
    return load_file(old / "model.safetensors")


def expected(
    llm: Any, weights: dict[str, torch.Tensor], folder: Path
) -> tuple[str, list[int]]:
    """Digest and tokens after a whole update from a file."""
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    llm.update_weights_from_disk(str(folder / "model.safetensors"), "whole")
    return llm.weight_info()["digest"], tokens(llm)


def test_a_chain_of_deltas_equals_whole_versions(llm, weights, tmp_path):
    chain = []
    with Publisher(llm, weights) as to:
        assert not to.publish("first").is_delta
        for seed in range(8):
            step(weights, seed)
            outcome = to.publish(f"delta-{seed}")
            assert outcome.is_delta
            assert outcome.num_bytes < sum(t.nbytes for t in weights.values()) / 4
            assert llm.get_weight_version() == f"delta-{seed}"
            chain.append((outcome.digest, tokens(llm)))
            if seed == 4:
                # A rollback and a commit of it are flips of the same two sets.
                to.rollback()
                assert (llm.weight_info()["digest"], tokens(llm)) == chain[-2]
                to.rollback()
    wholes = []
    weights = dict(load_file(Path(llm.model_config.model) / "model.safetensors"))
    for seed in range(8):
        step(weights, seed)
        wholes.append(expected(llm, weights, tmp_path))
    assert chain == wholes


def test_after_a_sleep_of_level_2_the_whole_version_is_sent_in_the_same_call(
    llm, weights, monkeypatch
):
    config = llm.llm_engine.vllm_config.model_config
    monkeypatch.setattr(config, "enable_sleep_mode", True)
    with Publisher(llm, weights) as to:
        to.publish()
        step(weights, 1)
        assert to.publish().is_delta
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        step(weights, 2)
        assert not to.publish("whole").is_delta
        llm.wake_up(tags=["kv_cache"])
        assert llm.get_weight_version() == "whole"
        step(weights, 3)
        assert to.publish().is_delta
        assert llm.verify_weights()["result"] == "equal"


def test_small_deltas_keep_the_namespace_of_kv_and_a_large_one_begins_another(
    llm, weights, new, tmp_path, monkeypatch
):
    core = llm.llm_engine.engine_core.engine_core
    policy = NamespacePolicy.parse("versioned:auto", drift=0.02)
    scheduling: Any = SchedulerState.of(core.scheduler)
    monkeypatch.setattr(scheduling, "policy", policy)
    seen = {}
    for delta in ("always", "off"):
        sent = {name: tensor.clone() for name, tensor in weights.items()}
        llm.update_weights_from_disk(str(new), "far from the first")
        with Publisher(llm, sent, delta=delta) as to:
            to.publish("first")
            drifts, begun = [], []
            for seed, share in enumerate((0.001, 0.001, 0.5, 0.001)):
                before = scheduling.cache_epoch
                step(sent, seed, share)
                assert to.publish(f"step-{seed}").is_delta == (delta == "always")
                drifts.append(core.vllm_inflight.live_version.drift)
                begun.append(scheduling.cache_epoch != before)
            assert begun == [False, False, True, False]
            # The version after a delta is compared with what the delta led to.
            step(sent, 9)
            expected(llm, sent, tmp_path)
            drifts.append(core.vllm_inflight.live_version.drift)
        seen[delta] = drifts
    assert seen["always"] == seen["off"]
    assert 0 < max(seen["off"][0], seen["off"][3]) < 0.02 < seen["off"][2]


def test_after_another_trainers_version_the_whole_one_is_sent(llm, weights, new):
    with Publisher(llm, weights) as to:
        to.publish()
        step(weights, 1)
        llm.update_weights_from_disk(str(new), "another")
        outcome = to.publish("mine")
        assert not outcome.is_delta
        assert outcome.digest == llm.weight_info()["digest"]
        step(weights, 2)
        assert to.publish().is_delta


def test_a_delta_that_does_not_fit_what_is_served_is_followed_by_the_whole(
    llm, weights, tmp_path
):
    with Publisher(llm, weights) as to:
        to.publish()
        # As if an element of what is served were another one than was published.
        to._base.tensor("model.norm.weight").view(torch.int16)[3] += 5
        step(weights, 1)
        outcome = to.publish("whole")
        assert not outcome.is_delta
        found = outcome.digest, tokens(llm)
        step(weights, 2)
        assert to.publish().is_delta
        step(weights, 3)
        assert to.publish().is_delta
    weights = load_file(Path(llm.model_config.model) / "model.safetensors")
    step(weights, 1)
    assert found == expected(llm, weights, tmp_path)


def test_a_trainer_that_starts_again_goes_on_with_deltas(llm, weights, new, tmp_path):
    file = tmp_path / "kept.safetensors"

    def trainer() -> Publisher:
        return Publisher(llm, weights, delta_file=file)

    with trainer() as to:
        assert not to.publish().is_delta
        step(weights, 1)
        assert to.publish().is_delta
    step(weights, 2)
    with trainer() as to:
        outcome = to.publish("after a restart of the trainer")
        assert outcome.is_delta
        in_use = pytest.raises(ConfigError, match="in use by another publisher")
        with trainer() as another, in_use:
            another.publish()
        found = outcome.digest, tokens(llm)
        step(weights, 3)
        assert to.publish().is_delta
    llm.update_weights_from_disk(str(new), "as after a restart of the engine")
    step(weights, 4)
    with trainer() as to:
        assert not to.publish().is_delta
        step(weights, 5)
        assert to.publish().is_delta
    # As after a trainer that was killed while it wrote.
    with open(file, "r+b") as kept:
        kept.seek(-1001, 2)
        kept.write(b"\x5a")
    step(weights, 6)
    with trainer() as to:
        assert not to.publish().is_delta
    assert list(tmp_path.iterdir()) == [file]
    weights = load_file(Path(llm.model_config.model) / "model.safetensors")
    step(weights, 1)
    step(weights, 2)
    assert found == expected(llm, weights, tmp_path / "whole")


def test_a_version_is_kept_and_searched_where_the_weights_are(
    llm, weights, new, tmp_path, monkeypatch
):
    def copied_to(self: PublishedVersion, device: torch.device) -> PublishedVersion:
        kept.append(real(self, device))
        return kept[-1]

    kept: list[PublishedVersion] = []
    real = PublishedVersion.copied_to
    monkeypatch.setattr(PublishedVersion, "copied_to", copied_to)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    held = {name: tensor.to(device, copy=True) for name, tensor in weights.items()}

    def stepped_to(seed: int) -> None:
        step(weights, seed)
        for name, tensor in weights.items():
            held[name].copy_(tensor)

    with Publisher(llm, held, delta_memory="device") as to:
        assert not to.publish().is_delta
        for seed in range(3):
            stepped_to(seed)
            assert to.publish().is_delta
            assert to._base is kept[0]
        assert {tensor.device for _, tensor in kept[0].pairs()} == {device}
        to.rollback()
        stepped_to(3)
        assert to.publish("over an older version").is_delta
        assert len(kept) == 1
        llm.update_weights_from_disk(str(new), "of another trainer")
        stepped_to(4)
        assert not to.publish().is_delta
        assert not list(kept[0].pairs())  # its memory is free
        stepped_to(5)
        outcome = to.publish("the last one")
        assert outcome.is_delta and len(kept) == 2
        assert all(torch.equal(t, held[name]) for name, t in kept[1].pairs())
        found = outcome.digest, tokens(llm)
    assert found == expected(llm, weights, tmp_path)


@pytest.mark.parametrize("memory", ["host", "device"])
def test_a_compressed_delta_has_fewer_bytes_and_leads_to_the_same(
    llm, weights, tmp_path, memory
):
    options = {"delta_memory": memory, "wire": "disk", "directory": tmp_path}
    with Publisher(llm, weights, delta_compression=3, **options) as to:
        whole = to.publish().num_bytes
        assert whole == sum(tensor.nbytes for tensor in weights.values())
        for seed in range(3):
            step(weights, seed)
            plain = to._chain.num_bytes  # of the deltas before, as they are kept
            outcome = to.publish()
            assert outcome.is_delta
            assert outcome.num_bytes < 0.9 * (to._chain.num_bytes - plain)
        to.rollback()
        step(weights, 3)
        assert to.publish("over an older version").is_delta
        found = llm.weight_info()["digest"], tokens(llm)
    assert found == expected(llm, weights, tmp_path / "whole")


@pytest.mark.parametrize("level", [0, 23, 2.5, True, "3"])
def test_what_is_no_level_of_compression_is_refused(llm, weights, level):
    with pytest.raises(ConfigError, match="delta_compression is a level of zstd"):
        Publisher(llm, weights, delta_compression=level)


@pytest.mark.parametrize(
    "options", [{"delta_file": "kept"}, {"delta_shards": True}], ids=str
)
def test_memory_of_a_device_holds_neither_a_file_nor_shards(llm, weights, options):
    with pytest.raises(ConfigError, match="delta_memory='device' excludes"):
        Publisher(llm, weights, delta_memory="device", **options)


def test_a_scrub_finds_a_kept_version_that_has_changed(llm, weights, caplog):
    name = "model.norm.weight"

    def advance(self: PublishedVersion, *how: Any) -> None:
        real(self, *how)
        self.tensor(name).view(torch.int16)[3] += 1  # as a bad bit of memory

    real = PublishedVersion.advance
    with Publisher(llm, weights, delta_scrub_every=3) as to:
        to.publish()
        for seed, is_sound in enumerate((True, True, True, True, True, False)):
            step(weights, seed)
            with pytest.MonkeyPatch.context() as patch:
                if not is_sound:
                    patch.setattr(PublishedVersion, "advance", advance)
                assert to.publish().is_delta
            assert ("sent whole" in caplog.text) != is_sound
        assert name in caplog.text
        # Without the scrub, the change of this element would be taken for none.
        weights[name].view(torch.int16)[3] += 1
        outcome = to.publish("whole")
        assert not outcome.is_delta
        step(weights, 9)
        assert to.publish().is_delta
    with pytest.raises(ConfigError, match="delta_scrub_every"):
        Publisher(llm, weights, delta_scrub_every=-1)


def test_a_fault_of_an_engine_is_followed_by_the_whole(llm, weights, monkeypatch):
    def broken(*_):
        raise MemoryError("no room for a delta")

    with Publisher(llm, weights) as to:
        to.publish()
        step(weights, 1)
        with monkeypatch.context() as patch:
            patch.setattr(DeltaTensors, "tensors", broken)
            outcome = to.publish()
        assert not outcome.is_delta
        step(weights, 2)
        assert to.publish().is_delta


def test_a_tensor_without_content_is_named_at_any_publish(llm, weights):
    source = dict(weights)
    with Publisher(llm, lambda: source) as to:
        to.publish()
        name = "model.norm.weight"
        source[name] = source[name].to("meta")
        with pytest.raises(Malformed, match="meta"):
            to.publish()
        source[name] = weights[name]
        to.publish()


def test_a_version_without_a_change_is_a_version(llm, weights):
    with Publisher(llm, weights) as to:
        whole = to.publish("a")
        same = to.publish("b")
    assert same.is_delta and same.digest == whole.digest
    assert llm.get_weight_version() == "b"


def test_when_most_has_changed_the_whole_version_is_sent(llm, weights):
    with Publisher(llm, weights) as to:
        to.publish()
        step(weights, 1, share=1.0)
        assert not to.publish().is_delta
    with Publisher(llm, weights, delta="always") as to:
        to.publish()
        step(weights, 2, share=1.0)
        assert to.publish().is_delta


@pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=str)
def test_a_trainer_in_float32_sends_what_changes_of_what_is_served(
    llm, weights, tmp_path, dtype
):
    """Every number of its weights changes at a step, and few of their roundings.

    The engine tells what it serves, so that nobody need say it.
    """
    assert llm.weight_info()["staging"]["dtype"] == "bfloat16"
    random = torch.Generator().manual_seed(0)

    def moved(tensor: torch.Tensor, by: float) -> torch.Tensor:
        return tensor * (1 + by * torch.randn(tensor.shape, generator=random))

    masters = {name: moved(tensor.float(), 1e-3) for name, tensor in weights.items()}

    def rounded() -> dict[str, torch.Tensor]:
        return {name: tensor.bfloat16() for name, tensor in masters.items()}

    with Publisher(llm, masters, dtype=dtype) as to:
        for _ in range(1 if dtype else 2):  # the first one tells the dtype
            assert not to.publish().is_delta
        for _ in range(3):
            before = rounded()
            for tensor in masters.values():
                tensor.copy_(moved(tensor, 1e-5))
            num = sum(int((t != before[n]).sum()) for n, t in rounded().items())
            assert 0 < num < sum(t.numel() for t in masters.values()) / 50
            outcome = to.publish()
            assert outcome.is_delta and outcome.num_bytes < 4 * num + 8000
        found = outcome.digest, tokens(llm)
    assert found == expected(llm, rounded(), tmp_path)


def test_one_tensor_of_a_fused_parameter_may_change_alone(llm, weights, tmp_path):
    with Publisher(llm, weights) as to:
        to.publish()
        flat = weights["model.layers.0.self_attn.q_proj.weight"].view(-1)
        flat[7] += 1
        outcome = to.publish()
        assert outcome.is_delta
        found = outcome.digest, tokens(llm)
    assert found == expected(llm, weights, tmp_path)


def test_a_scrub_after_deltas_names_the_tensor_with_a_changed_bit(llm, weights):
    name = "model.layers.1.input_layernorm.weight"
    worker = llm.llm_engine.model_executor.driver_worker.worker
    with Publisher(llm, weights) as to:
        to.publish()
        for seed in range(2):
            step(weights, seed)
            assert to.publish().is_delta
        for _ in range(3):  # the last delta, the version before it, and again
            assert llm.verify_weights()["result"] == "equal"
            bits = worker.model_runner.model.get_parameter(name).data.view(torch.int16)
            bits[5] ^= 1  # as memory that fails
            int(bits[5])  # on a GPU it is written then
            try:
                assert llm.verify_weights()["different"] == [name]
            finally:
                bits[5] ^= 1
                int(bits[5])
            to.rollback()


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_a_delta_is_committed_while_requests_run(llm, weights, tmp_path, mode):
    replies = []
    with Publisher(llm, weights) as to:
        to.publish("base")
        step(weights, 1)
        outputs = outputs_during(
            lambda: replies.append(to.publish("delta", mode=mode)),
            llm,
            4,
            repeat(SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)),
        )
    assert replies[0].is_delta
    spans = [span for o in outputs for span in o.outputs[0].weight_versions]
    assert {"base"} <= {span.version for span in spans} <= {"base", "delta"}
    reasons = {output.outputs[0].finish_reason for output in outputs}
    assert ("abort" in reasons) == (mode == "abort")
    found = llm.weight_info()["digest"], tokens(llm)
    assert found == expected(llm, weights, tmp_path)


class Sent:
    """A delta by hand, sent in a file through the engine's methods."""

    def __init__(self, llm: Any, weights: dict[str, torch.Tensor], folder: Path):
        self.llm, self.folder = llm, folder
        self.new = {name: tensor.clone() for name, tensor in weights.items()}
        step(self.new, 9, share=0.3)
        base = llm.weight_info()["digest"]
        options = {"max_part_bytes": 64 << 10, "values": "raw"}
        self.manifest, self._pairs = delta_between(weights, self.new, base, **options)
        assert self.num_parts > 2

    @property
    def num_parts(self) -> int:
        return len(self._pairs) // 2

    def pairs(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self._pairs.items()}

    def send(self, *chunks: dict[str, torch.Tensor]) -> None:
        file = self.folder / "delta.safetensors"
        update_id = self.llm.start_weight_update(manifest=self.manifest)["update_id"]
        try:
            for pairs in chunks:
                save_file(pairs, file)
                self.llm.update_weights({"path": str(file)}, update_id=update_id)
            self.llm.finish_weight_update(update_id=update_id)
        except BaseException:
            self.llm.abort_weight_update(update_id=update_id)
            raise


def served(llm: Any) -> tuple[str, str]:
    """Label and digest."""
    info = llm.weight_info()
    return info["weight_version"], info["digest"]


@pytest.fixture
def sent(llm, weights, tmp_path) -> Iterator[Sent]:
    """A delta by hand; whatever a test does to it, nothing changes and a good one
    works afterwards."""
    with Publisher(llm, weights) as to:
        to.publish("base")
    before = served(llm), tokens(llm)
    sent = Sent(llm, weights, tmp_path)
    yield sent
    assert (served(llm), tokens(llm)) == before
    good = Sent(llm, weights, tmp_path)
    pairs = list(good.pairs().items())
    # Each part in a chunk of its own; a tensor may go on in the next one.
    good.send(*(dict(pairs[n : n + 2]) for n in range(0, len(pairs), 2)))
    assert llm.weight_info()["digest"] != before[0][1]


def test_a_lost_part_changes_nothing(sent):
    pairs = sent.pairs()
    del pairs["delta.1.data"]
    with pytest.raises(Malformed, match=r"delta\.1\.data did not arrive"):
        sent.send(pairs)


def test_a_lost_end_changes_nothing(sent):
    pairs = sent.pairs()
    last = sent.num_parts - 1
    del pairs[f"delta.{last}.table"], pairs[f"delta.{last}.data"]
    with pytest.raises(WeightsMismatch):
        sent.send(pairs)


def test_a_flipped_bit_changes_nothing(sent):
    pairs = sent.pairs()
    data = pairs["delta.0.data"]
    data[len(data) // 2] ^= 1
    with pytest.raises(InflightError):
        sent.send(pairs)


def test_parts_that_come_together_lead_to_the_same_version(llm, weights, tmp_path):
    """On a GPU they are decoded and written in one set of launches."""
    with Publisher(llm, weights) as to:
        to.publish("base")
    sent = Sent(llm, weights, tmp_path)
    sent.send(sent.pairs())
    together = llm.weight_info()["digest"], tokens(llm)
    (whole := tmp_path / "whole").mkdir()
    save_file(sent.new, whole / "model.safetensors")
    llm.update_weights_from_disk(str(whole))
    assert (llm.weight_info()["digest"], tokens(llm)) == together


def test_a_delta_from_another_version_is_rejected_at_once(sent, llm):
    sent.manifest["base"] = "0" * 32
    with pytest.raises(BaseMismatch, match="0000") as rejected:
        sent.send(sent.pairs())
    assert rejected.value.served == llm.weight_info()["digest"]


@pytest.fixture
def biased(old, tmp_path):
    """A folder with a tensor that no rank serves, as some quantisers leave one."""
    folder = mixed(old, old, [], tmp_path / "biased")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.bias"] = torch.ones(
        64, dtype=torch.bfloat16
    )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("parallel", ["tensor", "pipeline"])
def test_two_ranks_serve_what_deltas_lead_to(biased, parallel):
    bind = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    seen = run_script("delta_ranks", biased, parallel, env=bind)
    wholes = seen["wholes"]
    assert seen["deltas"] == [[True, *whole] for whole in wholes[:-1]]
    assert seen["rolled back"] == wholes[-3]
    # Those of versions that followed each other both times.
    assert all(seen["drifts"][1:])
    assert seen["drifts"][1:] == seen["drifts of wholes"][1:-1]
    assert seen["after that"] == [True, *wholes[-1]]
    assert seen["scrubbed"] == "equal"
