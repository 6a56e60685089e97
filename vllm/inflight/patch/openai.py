"""Changes in OpenAI's replies: completions and chat, whole and streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.patch.records.record import Original, Patch


def _completion(original: Original) -> Any:
    def request_output_to_completion_response(
        self: Any, final_res_batch: Any, *args: object, **kwargs: object
    ) -> Any:
        from vllm.inflight.outputs.openai import ledger_for

        request: Any = args[0] if args else kwargs["request"]
        ledger = ledger_for(self, request)
        if ledger is None:
            return original(self, final_res_batch, *args, **kwargs)
        outputs = (output for result in final_res_batch for output in result.outputs)
        for index, output in enumerate(outputs):
            ledger.note(index, output)
        return ledger.label(original(self, final_res_batch, *args, **kwargs))

    return request_output_to_completion_response


def _chat(original: Original) -> Any:
    async def chat_completion_full_generator(
        self: Any,
        request: Any,
        result_generator: AsyncGenerator[upstream.RequestOutput, None],
        *args: object,
        **kwargs: object,
    ) -> Any:
        from vllm.inflight.outputs.openai import ledger_for, watched

        if (ledger := ledger_for(self, request)) is None:
            return await original(self, request, result_generator, *args, **kwargs)
        async with aclosing(watched(result_generator, ledger.note_all)) as results:
            response = await original(self, request, results, *args, **kwargs)
        return ledger.label(response)

    return chat_completion_full_generator


def _chat_batch(original: Original) -> Any:
    async def chat_completion_full_generator_batch(
        self: Any, request: Any, generators: Any, *args: object, **kwargs: object
    ) -> Any:
        from vllm.inflight.outputs.openai import ledger_for, watched

        if (ledger := ledger_for(self, request)) is None:
            return await original(self, request, generators, *args, **kwargs)

        def noting(conversation: int) -> Any:
            # Each conversation has one choice, with the conversation's index.
            return lambda result: ledger.note_all(result, conversation)

        results = [watched(g, noting(index)) for index, g in enumerate(generators)]
        response = await original(self, request, results, *args, **kwargs)
        return ledger.label(response)

    return chat_completion_full_generator_batch


def _completion_stream(original: Original) -> Any:
    def completion_stream_generator(
        self: Any,
        request: Any,
        engine_inputs: Any,
        result_generator: AsyncGenerator[upstream.RequestOutput, None],
        *args: object,
        **kwargs: object,
    ) -> AsyncGenerator[str, None]:
        from vllm.inflight.outputs import openai

        def lines(results: AsyncGenerator[upstream.RequestOutput, None]) -> Any:
            return original(self, request, engine_inputs, results, *args, **kwargs)

        if (ledger := openai.ledger_for(self, request)) is None:
            return lines(result_generator)
        request = openai.taken_over(request)
        num_choices = 1 if request.n is None else request.n

        def note(item: Any) -> None:
            prompt, result = item
            ledger.note_all(result, prompt * num_choices)

        return openai.labelled(result_generator, note, lines, ledger)

    return completion_stream_generator


def _chat_stream(original: Original) -> Any:
    def chat_completion_stream_generator(
        self: Any,
        request: Any,
        result_generator: AsyncGenerator[upstream.RequestOutput, None],
        *args: object,
        **kwargs: object,
    ) -> AsyncGenerator[str, None]:
        from vllm.inflight.outputs import openai

        def lines(results: AsyncGenerator[upstream.RequestOutput, None]) -> Any:
            return original(self, request, results, *args, **kwargs)

        ledger = openai.ledger_for(self, request, role_first=True)
        if ledger is None:
            return lines(result_generator)
        request = openai.taken_over(request)
        return openai.labelled(result_generator, ledger.note_all, lines, ledger)

    return chat_completion_stream_generator


def _response(original: Original) -> Any:
    async def responses_full_generator(
        self: Any,
        request: Any,
        sampling_params: upstream.SamplingParams,
        result_generator: AsyncGenerator[upstream.RequestOutput, None],
        context: Any,
        *args: object,
        **kwargs: object,
    ) -> Any:
        from vllm.inflight.outputs.headers import record
        from vllm.inflight.outputs.openai import wants_spans
        from vllm.inflight.outputs.spans import as_dicts

        response = await original(
            self, request, sampling_params, result_generator, context, *args, **kwargs
        )
        if not hasattr(response, "output"):
            return response  # an error
        if _finish_reason(context) == "abort":
            # Upstream uses this status for Harmony models. The response object is
            # changed in place, since upstream may have stored it already.
            response.status, response.incomplete_details = "cancelled", None
        # A response has no choices. These are the version spans of its last turn.
        if (seen := record.get()) is not None and wants_spans(self, request):
            response.weight_versions = as_dicts(seen.last)
        return response

    return responses_full_generator


def _finish_reason(context: Any) -> str | None:
    """Why the last turn of a response ended; upstream has several kinds of context."""
    if hasattr(context, "finish_reason"):
        reason: str | None = context.finish_reason
        return reason
    result = context.last_output
    return result.outputs[0].finish_reason if result and result.outputs else None


def _seen(original: Original) -> Any:
    def generate(self: upstream.AsyncLLM, *args: object, **kwargs: object) -> Any:
        from vllm.inflight.outputs.headers import record
        from vllm.inflight.outputs.openai import watched

        results = original(self, *args, **kwargs)
        seen = record.get()
        return results if seen is None else watched(results, seen.note)

    return generate


def _seen_pooled(original: Original) -> Any:
    def encode(self: upstream.AsyncLLM, *args: object, **kwargs: object) -> Any:
        from vllm.inflight.outputs.headers import record
        from vllm.inflight.outputs.openai import watched

        results = original(self, *args, **kwargs)
        seen = record.get()
        return results if seen is None else watched(results, seen.note_pooled)

    return encode


_OPENAI = "vllm.entrypoints.openai"
_COMPLETION = f"{_OPENAI}.completion.serving:OpenAIServingCompletion"
_CHAT = f"{_OPENAI}.chat_completion.serving:OpenAIServingChat"
_BATCH = f"{_OPENAI}.chat_completion.batch_serving:OpenAIServingChatBatch"

_CHOICES = "upstream's choices have the version spans of their output"

PATCHES = [
    Patch(
        target=f"{_COMPLETION}.request_output_to_completion_response",
        expects=(
            "self",
            "final_res_batch",
            "request",
            "request_id",
            "created_time",
            "model_name",
            "tokenizer",
            "request_metadata",
        ),
        why="the choices of a completion report which weights sampled them",
        remove_when=_CHOICES,
        around=_completion,
    ),
    Patch(
        target=f"{_COMPLETION}.completion_stream_generator",
        expects=(
            "self",
            "request",
            "engine_inputs",
            "result_generator",
            "request_id",
            "created_time",
            "model_name",
            "num_prompts",
            "tokenizer",
            "request_metadata",
        ),
        why="the chunks of a streamed completion report which weights sampled them",
        remove_when=_CHOICES,
        around=_completion_stream,
    ),
    Patch(
        target=f"{_CHAT}.chat_completion_full_generator",
        expects=(
            "self",
            "request",
            "result_generator",
            "request_id",
            "model_name",
            "conversation",
            "tokenizer",
            "request_metadata",
            "parser",
            "mm_token_counts",
        ),
        why="the choices of a chat report which weights sampled them",
        remove_when=_CHOICES,
        around=_chat,
    ),
    Patch(
        target=f"{_CHAT}.chat_completion_stream_generator",
        expects=(
            "self",
            "request",
            "result_generator",
            "request_id",
            "model_name",
            "conversation",
            "tokenizer",
            "request_metadata",
            "chat_template_kwargs",
            "mm_token_counts",
        ),
        why="the chunks of a streamed chat report which weights sampled them",
        remove_when=_CHOICES,
        around=_chat_stream,
    ),
    Patch(
        target=f"{_BATCH}.chat_completion_full_generator_batch",
        expects=(
            "self",
            "request",
            "generators",
            "request_id",
            "model_name",
            "all_conversations",
            "tokenizer",
            "request_metadata",
            "parser_cls",
        ),
        why="the choices of a batch of chats report which weights sampled them",
        remove_when=_CHOICES,
        around=_chat_batch,
    ),
    Patch(
        target=f"{_OPENAI}.responses.serving:OpenAIServingResponses."
        "responses_full_generator",
        expects=(
            "self",
            "request",
            "sampling_params",
            "result_generator",
            "context",
            "model_name",
            "tokenizer",
            "request_metadata",
            "created_time",
        ),
        why="a response reports which weights sampled it, and whether it was aborted",
        remove_when=f"{_CHOICES}, and its responses have them and report an abort",
        around=_response,
    ),
    Patch(
        target="vllm.v1.engine.async_llm:AsyncLLM.generate",
        expects=(
            "self",
            "prompt",
            "sampling_params",
            "request_id",
            "prompt_text",
            "lora_request",
            "tokenization_kwargs",
            "trace_headers",
            "priority",
            "data_parallel_rank",
            "session_id",
            "kv_hints",
            "reasoning_ended",
            "reasoning_parser_kwargs",
        ),
        why="the headers of a reply of any route report which weights sampled it",
        remove_when="upstream has such headers",
        around=_seen,
    ),
    Patch(
        target="vllm.v1.engine.async_llm:AsyncLLM.encode",
        expects=(
            "self",
            "prompt",
            "pooling_params",
            "request_id",
            "lora_request",
            "trace_headers",
            "priority",
            "tokenization_kwargs",
            "reasoning_ended",
        ),
        why="the headers of an embedding, a score or a class report the weights, too",
        remove_when="upstream has such headers",
        around=_seen_pooled,
    ),
]
