"""What this package rests on in vLLM without a record in `patch/`, and what is settled.

The reference release is the measure: what is the same there and in another release
needs no entry here.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.inflight.releases.table import holds

_WEIGHT_TRANSFER = "vllm.distributed.weight_transfer"
_OPENAI = "vllm.entrypoints.openai"
_TOKENS = "vllm.entrypoints.scale_out.token_in_token_out.protocol"

MIXINS = {
    "vllm.inflight.engine.scheduling.scheduler:InflightSchedulerMixin": (
        "vllm.v1.core.sched.scheduler:Scheduler",
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
    ),
}
"""Class of ours that is put in front of classes of upstream → these classes."""

PROTOCOLS = {
    "vllm.inflight.api.server.routes:InflightEndpoints": (
        "vllm.plugins.endpoint_plugins.interface:EndpointPlugin"
    ),
    "vllm.inflight.trainer.sync_client:ServerClient": (
        f"{_WEIGHT_TRANSFER}.base:VLLMWeightSyncClient"
    ),
}
"""Class of ours → the class of upstream whose methods it has, without deriving it."""


@dataclass(frozen=True)
class RestsOn:
    """A function of upstream whose code our code relies on."""

    target: str
    """`module:name` or `module:Class.name`."""
    why: str
    """What we rely on, in one sentence."""


RESTS_ON = [
    RestsOn(
        "vllm.model_executor.utils:replace_parameter",
        "processing beside the live weights keeps their parameters and their memory",
    ),
    RestsOn(
        "vllm.v1.core.kv_cache_utils:hash_block_tokens",
        "a block's hash contains the hash of the block before it",
    ),
    RestsOn(
        "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys",
        "the first block's hash contains the cache salt",
    ),
    RestsOn(
        "vllm.v1.core.kv_cache_utils:get_request_block_hasher",
        "the hashes of a request are computed again after its salt has changed",
    ),
    *(
        RestsOn(
            f"vllm.v1.core.sched.{place}",
            "tokens of a step in flight are late, and stay apart, after a retraction",
        )
        for place in (
            "async_scheduler:AsyncScheduler._update_after_schedule",
            "async_scheduler:AsyncScheduler._update_request_with_output",
            "scheduler:Scheduler._update_request_with_output",
        )
    ),
    RestsOn(
        "vllm.v1.core.sched.scheduler:Scheduler._preempt_request",
        "a retracted request is in the state of a preempted one",
    ),
    RestsOn(
        "vllm.v1.engine.core:EngineCore.pause_scheduler",
        "our pauses set the state of the scheduler by it",
    ),
    RestsOn(
        "vllm.v1.engine.core:EngineCore.resume_scheduler",
        "the end of a pause sets the state of the scheduler by it",
    ),
    RestsOn(
        "vllm.entrypoints.serve.engine.protocol:OpenAIBaseModel",
        "models of OpenAI's replies take fields that they do not declare",
    ),
]

FAMILIES = {
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": (
        "vllm.distributed.kv_transfer",
        "engine/scheduling/kv_connectors.py says which connectors use block hashes",
    ),
    f"{_WEIGHT_TRANSFER}.base:WeightTransferEngine": (
        _WEIGHT_TRANSFER,
        "transport/base.py says which backends hand over whole tensors",
    ),
    "vllm.v1.executor.abstract:Executor": (
        "vllm.v1.executor",
        "engine/executors.py knows the executors",
    ),
    "vllm.v1.core.sched.interface:SchedulerInterface": (
        "vllm.v1.core.sched",
        "the scheduler mixin is put in front of each scheduler",
    ),
}
"""Class of upstream → the package of its subclasses, and what a new one concerns."""


@dataclass(frozen=True)
class Field:
    """A field of a model of HTTP that we add, unless upstream declares it."""

    model: str
    """`module:Class` of upstream."""
    name: str
    declared_since: str | None = None
    """The first release that declares it, and that our code knows to do so; or None."""
    since: str | None = None
    """The first release that has the model; None for the oldest."""
    before: str | None = None
    """The first release that has no such model any more; None for every later one."""


_REPLIES = (
    f"{_OPENAI}.completion.protocol:CompletionResponseChoice",
    f"{_OPENAI}.completion.protocol:CompletionResponseStreamChoice",
    f"{_OPENAI}.chat_completion.protocol:ChatCompletionResponseChoice",
    f"{_OPENAI}.chat_completion.protocol:ChatCompletionResponseStreamChoice",
)
_REQUESTS = (
    f"{_OPENAI}.completion.protocol:CompletionRequest",
    f"{_OPENAI}.chat_completion.protocol:ChatCompletionRequest",
)
_GENERATE_REPLIES = (
    f"{_TOKENS}:GenerateChoiceBase",
    f"{_TOKENS}:GenerateStreamChoiceBase",
)
_OLDER_GENERATE_REPLIES = (
    f"{_TOKENS}:GenerateResponseChoice",
    f"{_TOKENS}:GenerateResponseStreamChoice",
)

FIELDS = [
    *(Field(model, "weight_versions", "0.33.0") for model in _REPLIES),
    *(Field(model, "kv_versions") for model in _REPLIES),
    *(Field(model, "return_weight_versions", "0.33.0") for model in _REQUESTS),
    *(
        Field(model, name, declared, since="0.32.0")
        for model in _GENERATE_REPLIES
        for name, declared in (("weight_versions", "0.32.0"), ("kv_versions", None))
    ),
    *(
        Field(model, name, before="0.32.0")
        for model in _OLDER_GENERATE_REPLIES
        for name in ("weight_versions", "kv_versions")
    ),
    Field(f"{_OPENAI}.responses.protocol:ResponsesResponse", "weight_versions"),
    Field(f"{_OPENAI}.responses.protocol:ResponsesRequest", "return_weight_versions"),
    Field(f"{_TOKENS}:GenerateRequest", "return_weight_versions"),
]

REACHING = "pause|resume|sleep|wake|weight|reload|lora|abort|version"
"""A method or a route with such a name may do what our patches control."""


@dataclass(frozen=True)
class Settled:
    """A finding that does no harm, because we have dealt with it."""

    check: str
    subject: str
    how: str
    """How it is dealt with, in one sentence."""
    since: str | None = None
    before: str | None = None

    def fits(self, check: str, subject: str, release: str) -> bool:
        """Whether it is about a finding in a release."""
        is_same = (self.check, self.subject) == (check, subject)
        return is_same and holds(self.since, self.before, release)


_HASHES = "vllm.v1.core.kv_cache_utils"
_SCHED = "vllm.v1.core.sched"

SETTLED = [
    Settled(
        check="derived classes",
        subject="vllm.inflight.worker.sleep:SleepBackend.discard",
        how="nothing calls it in these releases",
        before="0.31.0",
    ),
    Settled(
        check="types",
        subject="vllm/inflight/worker/sleep.py: "
        '"discard" undefined in superclass  [misc]',
        how="nothing calls it in these releases",
        before="0.31.0",
    ),
    Settled(
        check="words",
        subject="sleep_preserve_parameter_names",
        how="it is read with a default, since a sleep keeps no weights there",
        before="0.31.0",
    ),
    Settled(
        check="words",
        subject="num_embeds_by_hash",
        how="it is read with a default; there, the cache of media counts no sizes",
        before="0.31.0",
    ),
    Settled(
        check="words",
        subject="is_unused_checkpoint_weight",
        how="it is read with a default; releases.md names the drafters that have it",
        before="0.32.0",
    ),
    Settled(
        check="words",
        subject="aux_output_config",
        how="it is read with a default; there, the flag is the model's",
        before="0.31.0",
    ),
    Settled(
        check="code",
        subject="vllm.model_executor.utils:replace_parameter",
        how="it copies where it replaced; the tests of quantised models and of derived "
        "halves pass",
        since="0.33.0",
    ),
    Settled(
        check="ways around",
        subject="vllm.v1.worker.gpu_worker:Worker._get_sleep_mode_backend",
        how="it returns the backend that we set",
        before="0.30.0",
    ),
    Settled(
        check="ways around",
        subject="vllm.platforms.interface:Platform.get_lora_vocab_padding_size",
        how="it returns a number",
        since="0.31.0",
        before="0.32.0",
    ),
    Settled(
        check="code",
        subject=f"{_HASHES}:generate_block_hash_extra_keys",
        how="the first block's hash contains the salt there, too, without a label",
        before="0.31.0",
    ),
    Settled(
        check="code",
        subject=f"{_HASHES}:get_request_block_hasher",
        how="only the search for the media of a block differs",
        before="0.31.0",
    ),
    Settled(
        check="code",
        subject=f"{_SCHED}.async_scheduler:AsyncScheduler._update_after_schedule",
        how="only the step at which a request may decode again differs",
        before="0.31.0",
    ),
    Settled(
        check="code",
        subject=f"{_SCHED}.scheduler:Scheduler._preempt_request",
        how="there is no connector of auxiliary outputs that would have to be told",
        before="0.31.0",
    ),
    Settled(
        check="code",
        subject="vllm.entrypoints.serve.engine.protocol:OpenAIBaseModel",
        how="only what is logged differs",
        before="0.30.0",
    ),
    Settled(
        check="mixins",
        subject=f"{_SCHED}.interface:SchedulerInterface.has_request",
        how="upstream's schedulers have it, and the mixin does not change it",
        since="0.33.0",
    ),
    Settled(
        check="mixins",
        subject="vllm.inflight.engine.scheduling.scheduler:"
        "InflightSchedulerMixin._get_local_prefix_cache_hit",
        how="upstream's scheduler gives it by position",
        since="0.33.0",
    ),
    Settled(
        check="words",
        subject="aux_output_connector",
        how="it is read with a default, and the cap of known experts is of 0.33",
        before="0.31.0",
    ),
    *(
        Settled(
            check="derived classes",
            subject=f"vllm.inflight.transport.{trainer}.rank",
            how="it is the trainer's rank in upstream, too, and ours is set last",
            since="0.33.0",
        )
        for trainer in (
            "collective.trainer_engine:BroadcastTrainer",
            "cuda_ipc.trainer_engine:IpcTrainer",
        )
    ),
    Settled(
        check="ways around",
        subject="vllm.v1.engine.core:EngineCoreProc._reject_add_while_paused",
        how="it reads a flag, which our pauses set and clear",
        since="0.33.0",
    ),
    Settled(
        check="ways around",
        subject="vllm.v1.engine.core_client:AsyncMPClient.pause_generation_async",
        how="it calls `pause_generation` of the engine core, which has a record",
        since="0.33.0",
    ),
    Settled(
        check="ways around",
        subject="vllm.v1.engine.core_client:EngineCoreClient.abort_external_elastic_ep",
        how="it ends a change of the number of engines, and no request",
        since="0.33.0",
    ),
    Settled(
        check="families",
        subject="vllm.distributed.kv_transfer.kv_connector.v1.umbp.connector:"
        "UMBPStoreConnector",
        how="it has keys of its own and `reset_cache`, which a commit calls",
        since="0.33.0",
    ),
    Settled(
        check="code",
        subject=f"{_HASHES}:get_request_block_hasher",
        how="a hash may contain tokens behind its block, and the salt as before",
        since="0.33.0",
    ),
    *(
        Settled(
            check="code",
            subject=f"{_SCHED}.{place}:{kind}._update_request_with_output",
            how="the code is now in Scheduler, and leaves late tokens apart as before",
            since="0.33.0",
        )
        for place, kind in (
            ("async_scheduler", "AsyncScheduler"),
            ("scheduler", "Scheduler"),
        )
    ),
    Settled(
        check="code",
        subject=f"{_SCHED}.scheduler:Scheduler._preempt_request",
        how="inputs of the encoder are listed again when a request is scheduled again",
        since="0.33.0",
    ),
]
