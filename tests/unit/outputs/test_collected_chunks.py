"""Unread chunks of a stream are merged, and the last spans stay."""

from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector

from vllm.inflight.outputs.spans import VersionSpan
from vllm.inflight.patch import apply_all


def chunk(token: int, *choices: int, kv: list[VersionSpan] | None) -> RequestOutput:
    """One token for each of the choices, and whose KV it read."""
    outputs = []
    for index in choices:
        output: Any = CompletionOutput(index, str(token), [token], None, None)
        if kv is not None:
            output.kv_versions = kv
        outputs.append(output)
    return RequestOutput("r", None, [1, 2], None, outputs, finished=False)


def test_merged_chunks_carry_the_kv_versions_of_the_last_chunk():
    apply_all()
    first = [VersionSpan("old", 0, 2, 1)]
    last = [*first, VersionSpan("new", 2, 3, 2)]
    collector = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    collector.put(chunk(7, 0, 1, kv=first))
    collector.put(chunk(8, 0, kv=last))
    got: Any = collector.get_nowait()
    assert {output.index: output.kv_versions for output in got.outputs} == {
        0: last,
        1: first,
    }


def test_merged_chunks_carry_no_kv_versions_unless_requested():
    apply_all()
    collector = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    for token in (7, 8):
        collector.put(chunk(token, 0, kv=None))
    got: Any = collector.get_nowait()
    (output,) = got.outputs
    assert (output.token_ids, hasattr(output, "kv_versions")) == ([7, 8], False)
