"""What each framework sends, what it is promised, and what of it ran.

The page on drop-in use and the pages of the frameworks are made of this, of the table
of known calls and of evidence.py. A test compares it with all three.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.frameworks.evidence import (
    AUGUST,
    BY_HAND,
    CPU,
    JUNE,
    Evidence,
    evidence_of,
)
from vllm.inflight.frameworks.known_call import KnownCall
from vllm.inflight.frameworks.table import BUILT_IN

REQUESTS = "recorded requests"
"""What the framework's own client has sent, word by word."""
ROLLOUTS = "own rollout functions"
SENDER = "own sender"
TRAINER = "own trainer"
ABORTS = "none: it aborts all requests around an update"
SAME_PROCESS = "none: its process waits for the update, so no request runs"


@dataclass(frozen=True, kw_only=True)
class Framework:
    """One framework.

    Attributes:
        name: as the table of known calls has it, if it has known calls.
        page: its page, without docs/frameworks/ and .md.
        release: that was looked at.
        besides: another release, of which a part was run.
        starts: on which supported releases of vLLM it starts; empty if on none.
        vllm: the release of vLLM that it requires.
        transport: what carries the tensors.
        promise: what it gets, where that is not in the table of known calls.
        ran: beside the evidence of its known calls.
        pause: the arm of benchmarks/results/framework-pauses.json with its pause.
        is_absorbed: whether that pause can be absorbed.
        without_pause: the arm of framework-unpaused.json there, if it does not pause.
        no_gap: why no gap of its own update was measured.

    """

    name: str
    page: str
    release: str
    besides: str = ""
    starts: str = ""
    vllm: str
    transport: str
    promise: str = ""
    ran: tuple[Evidence, ...] = ()
    pause: str = ""
    is_absorbed: bool = True
    without_pause: str = ""
    no_gap: str = ""

    @property
    def calls(self) -> list[KnownCall]:
        """Its known calls."""
        return [row for row in BUILT_IN if row.framework == self.name]

    @property
    def promised(self) -> str:
        """What its updates are here."""
        adopted = [row for row in self.calls if row.is_adopted]
        limits = {
            "not for quantised models": any(not r.takes_quantised for r in adopted),
            "`update_weights_from_ipc` on one rank only": any(
                r.is_alone for r in adopted
            ),
        }
        in_place = [_named(row) for row in self.calls if not row.is_adopted]
        parts = [
            *(["transaction, adopted"] if adopted else []),
            *(limit for limit, holds in limits.items() if holds),
            *(f"in place: {call}" for call in in_place),
            *([self.promise] if self.promise else []),
        ]
        return "; ".join(dict.fromkeys(parts))

    @property
    def evidence(self) -> list[Evidence]:
        """All that ran of it, without repetitions."""
        of_calls = [each for row in self.calls for each in evidence_of(row)]
        return list(dict.fromkeys([*of_calls, *self.ran]))


def _named(row: KnownCall) -> str:
    besides = f" of workers with `{'`, `'.join(row.besides)}`" if row.besides else ""
    return f"`{row.method}`{besides}"


def _cpu(of: str, test: str, version: str = "", case: str = "") -> Evidence:
    return Evidence(of, CPU, f"e2e/{test}.py", version, case)


EXTERNAL = "0.29 to 0.33, as an external engine"

FRAMEWORKS = (
    Framework(
        name="TRL",
        page="trl",
        release="1.16.0",
        starts="0.29 to 0.33, from 0.32 without its extra",
        vllm="`trl[vllm]`: 0.22 to 0.31",
        transport="vLLM's `nccl`, over HTTP",
        promise="transaction",
        ran=(_cpu(REQUESTS, "test_recorded_clients", "1.16.0", "_trl_"),),
        pause="TRL",
    ),
    Framework(
        name="TRL colocated, OnlineDPO",
        page="trl",
        release="1.16.0",
        starts="0.29 to 0.33, from 0.32 without its extra",
        vllm="`trl[vllm]`: 0.22 to 0.31",
        transport="`load_weights` in its process",
        promise="untracked; with `--inflight-adopt direct` a transaction",
        ran=(
            _cpu(TRAINER, "test_trl_colocated", "1.16.0", "online_dpo"),
            _cpu(SENDER, "test_trl_colocated", "1.16.0", "what_trl_loads"),
            _cpu(BY_HAND, "test_adopted_direct_loads"),
        ),
        no_gap=SAME_PROCESS,
    ),
    Framework(
        name="OpenRLHF",
        page="openrlhf",
        release="0.11.2",
        starts="0.29 to 0.33",
        vllm="`[vllm]`: 0.29.0; `[vllm-latest]`: 0.29 or later",
        transport="NCCL of its own, CUDA IPC",
        pause="OpenRLHF",
        is_absorbed=False,
    ),
    Framework(
        name="verl",
        page="verl",
        release="0.9.1",
        starts="0.29 to 0.33, without its extra",
        vllm="`verl[vllm]`: 0.24.0",
        transport="ZMQ with CUDA IPC or shared memory",
        ran=(_cpu(REQUESTS, "test_recorded_clients", "0.9.1", "_verl_"),),
    ),
    Framework(
        name="ms-swift",
        page="ms-swift",
        release="4.6.0",
        starts="0.29 to 0.33",
        vllm="none",
        transport="NCCL of its own; ZMQ with CUDA IPC or shared memory",
        without_pause="ms-swift",
    ),
    Framework(
        name="checkpoint-engine",
        page="checkpoint-engine",
        release="0.4.2",
        starts="0.29 to 0.33",
        vllm="none",
        transport="ZMQ with CUDA IPC",
        without_pause="checkpoint-engine",
    ),
    Framework(
        name="prime-rl",
        page="prime-rl",
        release=AUGUST,
        vllm="0.26 or later",
        transport="files, NCCL of its own, NIXL",
        pause="prime-rl",
    ),
    Framework(
        name="SkyRL",
        page="skyrl",
        release="0.3.0",
        besides=AUGUST,
        vllm="0.23.0",
        transport="vLLM's `nccl`, CUDA IPC",
        pause="SkyRL",
    ),
    Framework(
        name="AReaL",
        page="areal",
        release="1.0.4",
        vllm="0.19.1",
        transport="a group of torch (NCCL), files",
        no_gap=ABORTS,
    ),
    Framework(
        name="NeMo-RL",
        page="nemo-rl",
        release=AUGUST,
        vllm="0.25.1",
        transport="NCCL of its own, ZMQ with CUDA IPC",
        without_pause="NeMo-RL",
    ),
    Framework(
        name="ROLL",
        page="roll",
        release=AUGUST,
        vllm="branches for 0.8 to 0.16",
        transport="NCCL, CUDA IPC",
        no_gap=ABORTS,
    ),
    Framework(
        name="PipelineRL",
        page="pipelinerl",
        release=JUNE,
        vllm="0.18.1",
        transport="NCCL of its own",
        ran=(_cpu(BY_HAND, "test_pipelinerl"),),
        pause="PipelineRL",
    ),
    Framework(
        name="ART",
        page="art",
        release="0.5.18",
        vllm="a runtime of its own, 0.20",
        transport="vLLM's `nccl`, over HTTP",
        promise="rejected by name: `packed` of an older vLLM",
        no_gap="none: its update is rejected",
        ran=(_cpu(BY_HAND, "test_recorded_clients", case="from_art"),),
    ),
    Framework(
        name="slime",
        page="slime",
        release=AUGUST,
        starts=EXTERNAL,
        vllm="none: it starts SGLang 0.5 itself",
        transport="SGLang's routes: a group of torch, files, CUDA IPC",
        promise="transaction",
        ran=(
            _cpu(ROLLOUTS, "test_slime", AUGUST),
            _cpu(BY_HAND, "test_sglang"),
        ),
        no_gap=ABORTS,
    ),
    Framework(
        name="miles",
        page="slime",
        release=AUGUST,
        starts=EXTERNAL,
        vllm="none: it starts SGLang 0.5 itself",
        transport="SGLang's routes: a group of torch, files, CUDA IPC",
        promise="transaction",
        ran=(
            _cpu(ROLLOUTS, "test_miles", AUGUST),
            _cpu(BY_HAND, "test_sglang"),
        ),
        no_gap=ABORTS,
    ),
)
"""The frameworks of the page on drop-in use, in its order."""

ALL_EVIDENCE = tuple(dict.fromkeys(e for each in FRAMEWORKS for e in each.evidence))
"""Every test that the page names."""

TESTS = tuple(dict.fromkeys(each.test for each in ALL_EVIDENCE if each.where == CPU))
"""The files, below tests/, of those that need no GPU."""
