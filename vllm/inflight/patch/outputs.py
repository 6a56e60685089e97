"""Changes in outputs: version spans with epochs, on every chunk.

`openai.py` has the changes for OpenAI's replies.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from http import HTTPStatus
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.outputs.reply_state import PooledVersion, ReplyState
from vllm.inflight.patch.records.record import Patch


# ------------------------------------------------------------------ RequestOutput
def _with_epochs(original: Callable[..., Any]) -> Callable[..., Any]:
    # Here, and not in the function, which runs for every token of every stream.
    from vllm.inflight.outputs.spans import decoded

    def _weight_version_spans(self: upstream.RequestState) -> Any:
        return decoded(original(self), self.lora_request)

    return _weight_version_spans


def _of_reports(_: None) -> Callable[..., Any]:
    from vllm.inflight.outputs.spans import decoded

    def _weight_version_spans(self: upstream.RequestState) -> Any:
        spans = ReplyState.of(self).spans(num_tokens(self))
        return decoded(spans, self.lora_request)

    return _weight_version_spans


def num_tokens(state: upstream.RequestState) -> int:
    """How many tokens of a request have arrived."""
    assert state.detokenizer is not None
    return int(state.detokenizer.num_output_tokens())


def _on_every_chunk(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.inflight.outputs.spans import followed

    def _new_completion_output(
        self: Any,
        token_ids: list[int],
        finish_reason: upstream.FinishReason | None,
        stop_reason: int | str | None,
    ) -> Any:
        output = original(self, token_ids, finish_reason, stop_reason)
        if output.weight_versions is None:
            output.weight_versions = self._weight_version_spans()
        state = ReplyState.find(self)
        if state is not None and state.trail is not None:
            # The last sampled token has no KV yet.
            read = self.prompt_len + self.detokenizer.num_output_tokens() - 1
            output.kv_versions = followed(state.trail, read)
        return output

    return _new_completion_output


def _newest_trail(original: Callable[..., Any]) -> Callable[..., Any]:
    def add(self: upstream.RequestOutput, next_output: Any, aggregate: bool) -> None:
        original(self, next_output, aggregate)
        # Upstream replaces older version spans by newer ones, but not this field.
        for newer in next_output.outputs:
            if (versions := getattr(newer, "kv_versions", None)) is None:
                continue
            for output in self.outputs:
                if output.index == newer.index:
                    output.kv_versions = versions

    return add


def _newest_spans(original: Callable[..., Any]) -> Callable[..., Any]:
    merged = _newest_trail(original)

    def add(self: upstream.RequestOutput, next_output: Any, aggregate: bool) -> None:
        merged(self, next_output, aggregate)
        newest = {newer.index: newer.weight_versions for newer in next_output.outputs}
        for output in self.outputs:
            if (spans := newest.get(output.index)) is not None:
                output.weight_versions = spans

    return add


def _take_trails(original: Callable[..., Any]) -> Callable[..., Any]:
    def process_outputs(
        self: upstream.OutputProcessor,
        engine_core_outputs: list[upstream.EngineCoreOutput],
        engine_core_timestamp: object = None,
        iteration_stats: object = None,
        weight_version: str | None = None,
    ) -> Any:
        from vllm.inflight.engine.scheduling.version_stamp import KV_FIELD

        ended = upstream.FinishReason.ABORT, upstream.FinishReason.ERROR
        for output in engine_core_outputs:
            reason, params = output.finish_reason, output.kv_transfer_params
            is_pooled = output.pooling_output is not None
            if reason is None and params is None and not is_pooled:
                continue  # a token, as nearly all outputs are
            state = self.request_states.get(output.request_id)
            if state is not None:
                if reason in ended:
                    _end(state, output)
                elif is_pooled and weight_version is not None:
                    ReplyState.of(state).pooled_stamp = weight_version
            if params is None or KV_FIELD not in params:
                continue
            trail = params.pop(KV_FIELD)
            output.kv_transfer_params = params or None
            if state is not None:
                ReplyState.of(state).trail = trail
        return original(
            self,
            engine_core_outputs,
            engine_core_timestamp,
            iteration_stats,
            weight_version,
        )

    return process_outputs


def _take_stamps(original: Callable[..., Any]) -> Callable[..., Any]:
    def unversioned(
        self: upstream.OutputProcessor,
        engine_core_outputs: list[upstream.EngineCoreOutput],
        engine_core_timestamp: object,
        iteration_stats: object,
        _: None,
    ) -> Any:
        return original(
            self, engine_core_outputs, engine_core_timestamp, iteration_stats
        )

    take_trails = _take_trails(unversioned)

    def process_outputs(
        self: upstream.OutputProcessor,
        engine_core_outputs: list[upstream.EngineCoreOutput],
        engine_core_timestamp: object = None,
        iteration_stats: object = None,
    ) -> Any:
        from vllm.inflight.engine.scheduling.version_stamp import STAMP_FIELD

        for output in engine_core_outputs:
            params = output.kv_transfer_params
            if params is None or STAMP_FIELD not in params:
                continue
            stamp = params.pop(STAMP_FIELD)
            output.kv_transfer_params = params or None
            state = self.request_states.get(output.request_id)
            if state is not None and output.pooling_output is not None:
                ReplyState.of(state).pooled_stamp = stamp
            elif state is not None:
                ReplyState.of(state).begin_span(stamp, num_tokens(state))
        return take_trails(
            self, engine_core_outputs, engine_core_timestamp, iteration_stats
        )

    return process_outputs


def _end(state: upstream.RequestState, output: upstream.EngineCoreOutput) -> None:
    """End a pooling request or a session, which upstream's abort does not end."""

    if state.detokenizer is None:  # it embeds
        output.pooling_output = upstream.EMPTY_CPU_TENSOR
    # From 0.33 on, upstream itself aborts a session that was rejected on arrival.
    if state.streaming_input and not getattr(output, "error", None):
        # A session has lost its context, so later chunks must not begin a request.
        state.streaming_input, state.input_chunk_queue = False, None
        if state.queue is not None:
            state.queue.close()


def _ended_is_an_error(original: Callable[..., Any]) -> Callable[..., Any]:
    def make_request_output(
        self: Any,
        new_token_ids: list[int],
        pooling_output: object,
        finish_reason: upstream.FinishReason | None,
        stop_reason: int | str | None,
        *args: object,
        **kwargs: object,
    ) -> Any:
        if pooling_output is not None:
            error = kwargs.get("error") or _error_of(finish_reason, stop_reason)
            kwargs["error"] = error
        made = original(
            self,
            new_token_ids,
            pooling_output,
            finish_reason,
            stop_reason,
            *args,
            **kwargs,
        )
        if pooling_output is not None:
            _label_pooled(self, made)
        return made

    return make_request_output


def _ended_raises(original: Callable[..., Any]) -> Callable[..., Any]:
    def make_request_output(
        self: Any,
        new_token_ids: list[int],
        pooling_output: object,
        finish_reason: upstream.FinishReason | None,
        stop_reason: int | str | None,
        *args: object,
        **kwargs: object,
    ) -> Any:
        error = None
        if pooling_output is not None:
            error = _error_of(finish_reason, stop_reason)
        if error is not None and self.queue is not None:
            self.queue.put(_raised(error))
            return None
        made = original(
            self,
            new_token_ids,
            pooling_output,
            finish_reason,
            stop_reason,
            *args,
            **kwargs,
        )
        if error is not None and made is not None:
            made.error = error  # an `LLM` reads no queue
        if pooling_output is not None:
            _label_pooled(self, made)
        return made

    return make_request_output


def _raised(error: upstream.RequestError) -> Exception:
    """What the caller of a pooling request gets. A client can retry a 503."""
    if not error.retryable:
        return upstream.GenerationError(error.message)
    status = HTTPStatus.SERVICE_UNAVAILABLE
    return upstream.GracefulHTTPError(error.message, status)


def _error_of(
    finish_reason: upstream.FinishReason | None, stop_reason: int | str | None
) -> upstream.RequestError | None:
    """Why a pooling request has ended without a result; None if it has one."""
    if finish_reason == upstream.FinishReason.ABORT:
        why = f": {stop_reason}" if stop_reason else ""
        return upstream.RequestError(
            "aborted", f"the request was aborted; send it again{why}", retryable=True
        )
    if finish_reason == upstream.FinishReason.ERROR:
        return upstream.RequestError("failed", f"{stop_reason or 'the request failed'}")
    return None


def _label_pooled(request: upstream.RequestState, made: Any) -> None:
    """Attach the version of a pooled output, for the headers of its reply."""
    state = ReplyState.find(request)
    if state is not None and state.pooled_stamp is not None and made is not None:
        PooledVersion(state.pooled_stamp).attach(made)


# ----------------------------------------------------------- /inference/v1/generate
def _schema_with_epoch(_: None) -> Any:
    def __get_pydantic_core_schema__(source: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import plain_serializer_function_ser_schema
        from vllm.outputs import WeightVersionSpan

        from vllm.inflight.outputs.spans import VersionSpan, as_object

        # Our class inherits this hook, which must not call itself.
        if source is not WeightVersionSpan:
            return handler(source)
        # The spans of a request with an adapter have more fields than the type has.
        written = plain_serializer_function_ser_schema(as_object)
        return {**handler.generate_schema(VersionSpan), "serialization": written}

    return __get_pydantic_core_schema__


def _with_field(declared: list[Any], field: str) -> list[Any]:
    """The models among the names of a module that have a field of that name."""
    return [each for each in declared if field in getattr(each, "model_fields", ())]


def _models_built_again(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: object, **kwargs: object) -> None:
        from vllm.entrypoints.openai.chat_completion import protocol as chat
        from vllm.entrypoints.openai.completion import protocol as completion
        from vllm.entrypoints.scale_out.token_in_token_out import protocol

        from vllm.inflight.outputs.openai import FIELD

        # The models were built at import, before any plugin. A choice is rebuilt before
        # the response that contains it.
        declared = [*vars(completion).values(), *vars(chat).values()]
        choices = _with_field(declared, FIELD)
        for model in (*choices, *(_with_field(declared, "choices") if choices else ())):
            model.model_rebuild(force=True)
        for base in (
            protocol.GenerateChoiceBase,
            protocol.GenerateStreamChoiceBase,
            protocol.GenerateResponseBase,
            protocol.GenerateStreamResponseBase,
        ):
            for model in base.__subclasses__():
                # A choice may report its KV provenance.
                model.model_config["extra"] = "allow"
                model.model_rebuild(force=True)
        original(self, *args, **kwargs)

    return __init__


def _older_models_built_again(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: object, **kwargs: object) -> None:
        from vllm.entrypoints.scale_out.token_in_token_out import protocol

        for model in (
            protocol.GenerateResponseChoice,
            protocol.GenerateResponseStreamChoice,
            protocol.GenerateResponse,
            protocol.GenerateStreamResponse,
        ):
            # A choice has fields that this release does not know.
            model.model_config["extra"] = "allow"
            model.model_rebuild(force=True)
        original(self, *args, **kwargs)

    return __init__


def _whose_kv(
    original: Callable[..., Any], *, kv_only: bool = True
) -> Callable[..., Any]:
    async def serve_tokens_full_generator(
        self: Any,
        request: Any,
        result_generator: AsyncGenerator[upstream.RequestOutput, None],
        *args: object,
        **kwargs: object,
    ) -> Any:
        from vllm.inflight.outputs import openai

        if kv_only and not openai.wants_kv(self, request):
            return await original(self, request, result_generator, *args, **kwargs)
        ledger = openai.ReplySpans(kv_only=kv_only)
        watched = openai.watched(result_generator, ledger.note_all)
        async with aclosing(watched) as results:
            response = await original(self, request, results, *args, **kwargs)
        return ledger.label(response)

    return serve_tokens_full_generator


def _whose_kv_by_chunk(
    original: Callable[..., Any], *, kv_only: bool = True
) -> Callable[..., Any]:
    def serve_tokens_stream_generator(
        self: Any,
        request: Any,
        result_generator: AsyncGenerator[upstream.RequestOutput, None],
        *args: object,
        **kwargs: object,
    ) -> AsyncGenerator[str, None]:
        from vllm.inflight.outputs import openai

        def lines(results: AsyncGenerator[upstream.RequestOutput, None]) -> Any:
            return original(self, request, results, *args, **kwargs)

        if kv_only and not openai.wants_kv(self, request):
            return lines(result_generator)
        ledger = openai.ReplySpans(kv_only=kv_only)
        return openai.labelled(result_generator, ledger.note_all, lines, ledger)

    return serve_tokens_stream_generator


_STATE = "vllm.v1.engine.output_processor:RequestState"
_TOKENS = "vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens"

_REPLY = (
    "self",
    "request",
    "result_generator",
    "request_id",
    "model_name",
    "request_metadata",
)

_EPOCHS = "upstream's version spans distinguish versions with equal labels"
_WHOSE_KV = "upstream tracks which version computed a request's KV"

PATCHES = [
    Patch(
        target=f"{_STATE}._weight_version_spans",
        expects=("self",),
        why="version spans have the epoch, since two versions may have one label",
        remove_when=_EPOCHS,
        around=_with_epochs,
        since="0.32.0",
    ),
    Patch(
        target=f"{_STATE}._weight_version_spans",
        expects=None,
        why="upstream has no version spans before 0.32",
        remove_when="0.32 is the oldest supported release",
        around=_of_reports,
        before="0.32.0",
    ),
    Patch(
        target="vllm.outputs:CompletionOutput.weight_versions",
        expects=None,
        why="upstream's outputs have no field for version spans before 0.32",
        remove_when="0.32 is the oldest supported release",
        around=lambda _: None,
        before="0.32.0",
    ),
    Patch(
        target=f"{_STATE}._new_completion_output",
        expects=("self", "token_ids", "finish_reason", "stop_reason"),
        why="every chunk of a stream reports which weights sampled its tokens",
        remove_when="upstream reports version spans before the last chunk",
        around=_on_every_chunk,
    ),
    Patch(
        target="vllm.outputs:RequestOutput.add",
        expects=("self", "next_output", "aggregate"),
        why="merged chunks have the KV provenance of the last chunk",
        remove_when=_WHOSE_KV,
        around=_newest_trail,
        since="0.32.0",
    ),
    Patch(
        target="vllm.outputs:RequestOutput.add",
        expects=("self", "next_output", "aggregate"),
        why="merged chunks have the version spans and provenance of the last chunk",
        remove_when="0.32 is the oldest supported release",
        around=_newest_spans,
        before="0.32.0",
    ),
    Patch(
        target="vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
        expects=(
            "self",
            "engine_core_outputs",
            "engine_core_timestamp",
            "iteration_stats",
            "weight_version",
        ),
        why="KV provenance travels beside a connector's parameters, pooled outputs "
        "keep their version, and an engine's abort ends pooling requests and sessions",
        remove_when="engine outputs have fields for this, and upstream's pause aborts "
        "requests of every kind",
        around=_take_trails,
        since="0.32.0",
    ),
    Patch(
        target="vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
        expects=(
            "self",
            "engine_core_outputs",
            "engine_core_timestamp",
            "iteration_stats",
        ),
        why="the stamp of a step comes with its requests, too, before 0.32",
        remove_when="0.32 is the oldest supported release",
        around=_take_stamps,
        before="0.32.0",
    ),
    Patch(
        target=f"{_STATE}.make_request_output",
        expects=(
            "self",
            "new_token_ids",
            "pooling_output",
            "finish_reason",
            "stop_reason",
            "kv_transfer_params",
            "ec_transfer_params",
            "error",
        ),
        why="a pooling request that is aborted or fails gets an error, and no empty "
        "output",
        remove_when="upstream's pooling outputs report an abort",
        around=_ended_is_an_error,
        since="0.32.0",
    ),
    Patch(
        target=f"{_STATE}.make_request_output",
        expects=(
            "self",
            "new_token_ids",
            "pooling_output",
            "finish_reason",
            "stop_reason",
            "kv_transfer_params",
            "ec_transfer_params",
        ),
        why="a pooling request that is aborted or fails raises an error; its outputs "
        "have no field for one before 0.32",
        remove_when="0.32 is the oldest supported release",
        around=_ended_raises,
        before="0.32.0",
    ),
    Patch(
        target="vllm.outputs:WeightVersionSpan.__get_pydantic_core_schema__",
        expects=None,
        why="a reply of /inference/v1/generate has the fields of the declared type",
        remove_when=_EPOCHS,
        around=_schema_with_epoch,
        since="0.32.0",
    ),
    Patch(
        target=f"{_TOKENS}.__init__",
        expects=(
            "self",
            "engine_client",
            "models",
            "online_renderer",
            "request_logger",
            "force_no_detokenize",
            "return_tokens_as_token_ids",
            "enable_prompt_tokens_details",
            "enable_log_outputs",
        ),
        why="upstream built the reply models before version spans had an epoch",
        remove_when=_EPOCHS,
        around=_models_built_again,
        since="0.32.0",
    ),
    Patch(
        target=f"{_TOKENS}.__init__",
        expects=(
            "self",
            "engine_client",
            "models",
            "online_renderer",
            "request_logger",
            "force_no_detokenize",
            "return_tokens_as_token_ids",
            "enable_prompt_tokens_details",
            "enable_log_outputs",
        ),
        why="upstream's reply models have no version spans before 0.32",
        remove_when="0.32 is the oldest supported release",
        around=_older_models_built_again,
        before="0.32.0",
    ),
    Patch(
        target=f"{_TOKENS}.serve_tokens_full_generator",
        expects=_REPLY,
        why="a choice reports its KV provenance, if the request asks for it",
        remove_when=_WHOSE_KV,
        around=_whose_kv,
        since="0.32.0",
    ),
    Patch(
        target=f"{_TOKENS}.serve_tokens_full_generator",
        expects=_REPLY,
        why="a choice reports its version spans, and its KV provenance if asked",
        remove_when="0.32 is the oldest supported release",
        around=partial(_whose_kv, kv_only=False),
        before="0.32.0",
    ),
    Patch(
        target=f"{_TOKENS}.serve_tokens_stream_generator",
        expects=_REPLY,
        why="the choices of a stream report their KV provenance, too",
        remove_when=_WHOSE_KV,
        around=_whose_kv_by_chunk,
        since="0.32.0",
    ),
    Patch(
        target=f"{_TOKENS}.serve_tokens_stream_generator",
        expects=_REPLY,
        why="the choices of a stream report their version spans, too",
        remove_when="0.32 is the oldest supported release",
        around=partial(_whose_kv_by_chunk, kv_only=False),
        before="0.32.0",
    ),
]
