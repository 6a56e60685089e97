"""The names of upstream that the code uses, and the modules that have them.

A name is imported at its first use, so each process imports only what it needs. No
other file names modules of upstream, except those in `patch/`, which change upstream.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vllm.inflight.releases.table import PLACES, differing

if TYPE_CHECKING:
    # Types of upstream's objects, for annotations only: `upstream.Request`.
    from vllm.config import ModelConfig as ModelConfig
    from vllm.config import ParallelConfig as ParallelConfig
    from vllm.config import SpeculativeConfig as SpeculativeConfig
    from vllm.config import VllmConfig as VllmConfig
    from vllm.config.load import LoadConfig as LoadConfig
    from vllm.config.scheduler import SchedulerConfig as SchedulerConfig
    from vllm.distributed.weight_transfer.base import (
        VLLMWeightSyncClient as VLLMWeightSyncClient,
    )
    from vllm.engine.arg_utils import EngineArgs as EngineArgs
    from vllm.engine.protocol import EngineClient as EngineClient
    from vllm.entrypoints.llm import LLM as LLM
    from vllm.entrypoints.openai.models.serving import (
        OpenAIServingModels as OpenAIServingModels,
    )
    from vllm.lora.model_manager import LoRAModelManager as LoRAModelManager
    from vllm.lora.request import LoRARequest as LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager as WorkerLoRAManager
    from vllm.model_executor.model_loader.base_loader import (
        BaseModelLoader as BaseModelLoader,
    )
    from vllm.multimodal.inputs import MultiModalFeatureSpec as MultiModalFeatureSpec
    from vllm.outputs import CompletionOutput as CompletionOutput
    from vllm.outputs import PoolingRequestOutput as PoolingRequestOutput
    from vllm.outputs import RequestOutput as RequestOutput
    from vllm.sampling_params import SamplingParams as SamplingParams
    from vllm.v1.core.block_pool import BlockPool as BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager as KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock as KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput as SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler as Scheduler
    from vllm.v1.engine import EngineCoreOutput as EngineCoreOutput
    from vllm.v1.engine import EngineCoreOutputs as EngineCoreOutputs
    from vllm.v1.engine import EngineCoreRequest as EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM as AsyncLLM
    from vllm.v1.engine.core import EngineCore as EngineCore
    from vllm.v1.engine.core_client import EngineCoreClient as EngineCoreClient
    from vllm.v1.engine.llm_engine import LLMEngine as LLMEngine
    from vllm.v1.engine.output_processor import OutputProcessor as OutputProcessor
    from vllm.v1.engine.output_processor import RequestState as RequestState
    from vllm.v1.executor.abstract import Executor as Executor
    from vllm.v1.executor.multiproc_executor import WorkerProc as WorkerProc
    from vllm.v1.outputs import ModelRunnerOutput as ModelRunnerOutput
    from vllm.v1.request import Request as Request
    from vllm.v1.worker.cpu_worker import CPUWorker as CPUWorker
    from vllm.v1.worker.gpu_input_batch import CachedRequestState as CachedRequestState
    from vllm.v1.worker.gpu_input_batch import InputBatch as InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker as Worker
    from vllm.v1.worker.worker_base import WorkerBase as WorkerBase

NAMES = {
    # configuration
    "CompilationMode": "vllm.config:CompilationMode",
    "ParallelConfig": "vllm.config:ParallelConfig",
    "set_current_vllm_config": "vllm.config:set_current_vllm_config",
    "get_tokenizer": "vllm.tokenizers:get_tokenizer",
    "get_config": "vllm.transformers_utils.config:get_config",
    "freeze_gc_heap": "vllm.utils.gc_utils:freeze_gc_heap",
    "init_logger": "vllm.logger:init_logger",
    # model loading and layerwise reload
    "initialize_model": "vllm.model_executor.model_loader.utils:initialize_model",
    "process_weights_after_loading": (
        "vllm.model_executor.model_loader.utils:process_weights_after_loading"
    ),
    "get_offloader": "vllm.model_executor.offloader:get_offloader",
    "NoopOffloader": "vllm.model_executor.offloader:NoopOffloader",
    "UVAOffloader": "vllm.model_executor.offloader:UVAOffloader",
    "set_default_torch_dtype": "vllm.utils.torch_utils:set_default_torch_dtype",
    "initialize_layerwise_reload": (
        "vllm.model_executor.model_loader.reload:initialize_layerwise_reload"
    ),
    "finalize_layerwise_reload": (
        "vllm.model_executor.model_loader.reload:finalize_layerwise_reload"
    ),
    "get_layerwise_info": (
        "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info"
    ),
    "LAYERWISE_INFO": (
        "vllm.model_executor.model_loader.reload.layerwise:LAYERWISE_INFO"
    ),
    "materialize_layer": (
        "vllm.model_executor.model_loader.reload.meta:materialize_layer"
    ),
    "SKIP_LOAD_TENSORS": (
        "vllm.model_executor.model_loader.reload.meta:SKIP_LOAD_TENSORS"
    ),
    "capture_layer_to_meta": (
        "vllm.model_executor.model_loader.reload.meta:capture_layer_to_meta"
    ),
    "place_kernel_tensors": (
        "vllm.model_executor.model_loader.reload.layerwise:_place_kernel_tensors"
    ),
    "default_weight_loader": (
        "vllm.model_executor.model_loader.weight_utils:default_weight_loader"
    ),
    "disable_mtp_completeness_check": (
        "vllm.model_executor.model_loader.mtp_validation:disable_mtp_completeness_check"
    ),
    "QuantizeMethodBase": (
        "vllm.model_executor.layers.quantization.base_config:QuantizeMethodBase"
    ),
    "UnquantizedLinearMethod": (
        "vllm.model_executor.layers.linear:UnquantizedLinearMethod"
    ),
    "UnquantizedEmbeddingMethod": (
        "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod"
    ),
    "UnquantizedFusedMoEMethod": (
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:"
        "UnquantizedFusedMoEMethod"
    ),
    "BaseKVCacheMethod": (
        "vllm.model_executor.layers.quantization.kv_cache:BaseKVCacheMethod"
    ),
    "is_quantized_kv_cache": "vllm.v1.kv_cache_interface:is_quantized_kv_cache",
    "StageMissingLayer": "vllm.model_executor.models.utils:StageMissingLayer",
    "FusedMMInputNorm": (
        "vllm.model_executor.layers.fusion.mm_input_norm:FusedMMInputNorm"
    ),
    "MLAAttention": ("vllm.model_executor.layers.attention.mla_attention:MLAAttention"),
    "BaseLayerWithLoRA": "vllm.lora.layers:BaseLayerWithLoRA",
    "GROUPS": "vllm.distributed.parallel_state:_groups",
    # weight transfer
    "WeightTransferEngine": (
        "vllm.distributed.weight_transfer.base:WeightTransferEngine"
    ),
    "WeightTransferInitInfo": (
        "vllm.distributed.weight_transfer.base:WeightTransferInitInfo"
    ),
    "WeightTransferUpdateInfo": (
        "vllm.distributed.weight_transfer.base:WeightTransferUpdateInfo"
    ),
    "WeightTransferConfig": "vllm.config.weight_transfer:WeightTransferConfig",
    "WeightTransferEngineFactory": (
        "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory"
    ),
    "NCCLWeightTransferEngine": (
        "vllm.distributed.weight_transfer.nccl_engine:NCCLWeightTransferEngine"
    ),
    "IPCWeightTransferEngine": (
        "vllm.distributed.weight_transfer.ipc_engine:IPCWeightTransferEngine"
    ),
    "ParamMeta": "vllm.distributed.weight_transfer.base:ParamMeta",
    "WeightSource": "vllm.distributed.weight_transfer.base:WeightSource",
    "TrainerInitInfo": "vllm.distributed.weight_transfer.base:TrainerInitInfo",
    "TrainerWeightTransferEngine": (
        "vllm.distributed.weight_transfer.base:TrainerWeightTransferEngine"
    ),
    "WeightTransferTrainerFactory": (
        "vllm.distributed.weight_transfer.factory:WeightTransferTrainerFactory"
    ),
    "device_allocator": "vllm:device_allocator",
    "CuMemBackend": "vllm.device_allocator.sleep_mode_backend:CuMemBackend",
    "unpinned_nccl_env": "vllm.utils.nccl:unpinned_nccl_env",
    # engine
    "EngineCoreOutputs": "vllm.v1.engine:EngineCoreOutputs",
    "EngineCoreOutput": "vllm.v1.engine:EngineCoreOutput",
    "EngineDeadError": "vllm.v1.engine.exceptions:EngineDeadError",
    "GenerationError": "vllm.exceptions:GenerationError",
    "GracefulHTTPError": "vllm.exceptions:GracefulHTTPError",
    "EngineCoreRequestType": "vllm.v1.engine:EngineCoreRequestType",
    "FinishReason": "vllm.v1.engine:FinishReason",
    "PauseState": "vllm.v1.core.sched.interface:PauseState",
    "RequestStatus": "vllm.v1.request:RequestStatus",
    "create_request_queue": "vllm.v1.core.sched.request_queue:create_request_queue",
    "is_full_attention_spec": "vllm.v1.kv_cache_interface:is_full_attention_spec",
    "KVConnectorBase_V1": (
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
    ),
    "UniProcExecutor": "vllm.v1.executor.uniproc_executor:UniProcExecutor",
    "ExecutorWithExternalLauncher": (
        "vllm.v1.executor.uniproc_executor:ExecutorWithExternalLauncher"
    ),
    "MultiprocExecutor": "vllm.v1.executor.multiproc_executor:MultiprocExecutor",
    "RayDistributedExecutor": "vllm.v1.executor.ray_executor:RayDistributedExecutor",
    "resolve_obj_by_qualname": "vllm.utils.import_utils:resolve_obj_by_qualname",
    "WeightVersionSpan": "vllm.outputs:WeightVersionSpan",
    "RequestError": "vllm.outputs:RequestError",
    "EMPTY_CPU_TENSOR": "vllm.v1.engine.output_processor:EMPTY_CPU_TENSOR",
    "get_watch_dog": "vllm.inflight.releases.stand_ins:get_watch_dog",
    "envs": "vllm:envs",
    # requests for tokens
    "SamplingParams": "vllm.sampling_params:SamplingParams",
    "StructuredOutputsParams": "vllm.sampling_params:StructuredOutputsParams",
    "RequestOutputKind": "vllm.sampling_params:RequestOutputKind",
    "VLLMError": "vllm.exceptions:VLLMError",
    "VLLMClientError": "vllm.exceptions:VLLMClientError",
    "merge_async_iterators": "vllm.utils.async_utils:merge_async_iterators",
    "with_cancellation": "vllm.entrypoints.serve.utils.api_utils:with_cancellation",
    "load_aware_call": "vllm.entrypoints.serve.utils.api_utils:load_aware_call",
    # front end
    "get_prometheus_registry": "vllm.v1.metrics.prometheus:get_prometheus_registry",
    "NoSignalServer": "vllm.entrypoints.launchers.launcher:NoSignalServer",
    "health": "vllm.entrypoints.serve.instrumentator.health:health",
    "attach_offline_docs": (
        "vllm.entrypoints.serve.instrumentator.offline_docs:attach_router"
    ),
    "CompletionResponseChoice": (
        "vllm.entrypoints.openai.completion.protocol:CompletionResponseChoice"
    ),
    "show_version": "vllm.entrypoints.serve.instrumentator.basic:show_version",
}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"vllm.inflight.upstream has no name {name!r}")
    module, _, attribute = differing(PLACES.get(name), NAMES[name]).partition(":")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value
