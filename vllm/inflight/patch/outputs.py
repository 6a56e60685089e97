"""Changes in the outputs: spans with epochs, on every chunk.

Those in OpenAI's replies are in `replies.py`.
"""

from __future__ import annotations

from typing import Any

from vllm.inflight.patch.record import Patch


# ------------------------------------------------------------------ RequestOutput
def _with_epochs(original: Any) -> Any:
    def _weight_version_spans(self: Any) -> Any:
        from vllm.inflight.outputs.spans import decoded

        return decoded(original(self))

    return _weight_version_spans


def _on_every_chunk(original: Any) -> Any:
    def _new_completion_output(
        self: Any, token_ids: Any, finish_reason: Any, stop_reason: Any
    ) -> Any:
        output = original(self, token_ids, finish_reason, stop_reason)
        if output.weight_versions is None:
            output.weight_versions = self._weight_version_spans()
        return output

    return _new_completion_output


# ----------------------------------------------------------- /inference/v1/generate
def _schema_with_epoch(_: None) -> Any:
    def __get_pydantic_core_schema__(source: Any, handler: Any) -> Any:
        from vllm.outputs import WeightVersionSpan

        from vllm.inflight.outputs.spans import VersionSpan

        # Our class inherits this hook, and is where it has to end.
        if source is WeightVersionSpan:
            return handler.generate_schema(VersionSpan)
        return handler(source)

    return __get_pydantic_core_schema__


def _models_built_again(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.entrypoints.scale_out.token_in_token_out import protocol

        # They were built when they were imported, before any plugin. A choice
        # comes before the response that holds it.
        for base in (
            protocol.GenerateChoiceBase,
            protocol.GenerateStreamChoiceBase,
            protocol.GenerateResponseBase,
            protocol.GenerateStreamResponseBase,
        ):
            for model in base.__subclasses__():
                model.model_rebuild(force=True)
        original(self, *args, **kwargs)

    return __init__


_STATE = "vllm.v1.engine.output_processor:RequestState"
_TOKENS = "vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens"

_EPOCHS = "upstream's spans tell versions with equal labels apart"

PATCHES = [
    Patch(
        target=f"{_STATE}._weight_version_spans",
        expects=("self",),
        why="two updates with one label are two versions: spans carry the epoch",
        remove_when=_EPOCHS,
        around=_with_epochs,
    ),
    Patch(
        target=f"{_STATE}._new_completion_output",
        expects=("self", "token_ids", "finish_reason", "stop_reason"),
        why="a stream says at every chunk which weights sampled its tokens",
        remove_when="upstream reports spans before the last chunk",
        around=_on_every_chunk,
    ),
    Patch(
        target="vllm.outputs:WeightVersionSpan.__get_pydantic_core_schema__",
        expects=None,
        why="a reply of /inference/v1/generate is written by the declared type",
        remove_when=_EPOCHS,
        around=_schema_with_epoch,
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
        why="its models of replies were built before the spans had an epoch",
        remove_when=_EPOCHS,
        around=_models_built_again,
    ),
]
