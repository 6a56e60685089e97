"""What a token of a stream costs the process that makes outputs.

That process makes an output for each token of each stream, and runs one thread of
Python. So functions of ours are counted there.
"""

import sys
from typing import Any

from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from tests.support.engines.bare_core import request
from vllm.inflight.engine.scheduling.version_stamp import STAMP_FIELD, Stamp
from vllm.inflight.outputs.spans import VersionSpan
from vllm.inflight.patch import apply_all

FEW, MANY = 4, 20
HAS_SPANS = "weight_version" in OutputProcessor.process_outputs.__code__.co_varnames
"""Whether upstream's own outputs have version spans."""
MOST_CALLS = 5 if HAS_SPANS else 12
"""Functions of ours that may be called for one token."""


class Front:
    """The front end of so many streams, which get one token each at a step."""

    def __init__(self, num: int) -> None:
        self.processor = OutputProcessor(None, log_stats=False)
        self.queues: dict[str, RequestOutputCollector] = {}
        self.num_calls = 0
        for number in range(num):
            name = str(number)
            made: Any = request(name, [1, 2, 3], detokenize=False)
            made.external_req_id = f"user-{name}"
            queue = RequestOutputCollector(RequestOutputKind.DELTA, name)
            self.processor.add_request(made, None, None, 0, queue)
            self.queues[name] = queue

    def step(self, stamp: str) -> list[CompletionOutput]:
        """One token for each stream, and what came of it."""
        outputs = [EngineCoreOutput(name, [7]) for name in self.queues]
        options: Any = {"weight_version": stamp}
        if not HAS_SPANS:
            options = {}
            for output in outputs:
                output.kv_transfer_params = {STAMP_FIELD: stamp}
        sys.setprofile(self._called)
        try:
            self.processor.process_outputs(outputs, **options)
        finally:
            sys.setprofile(None)
        made: list[Any] = [queue.get_nowait() for queue in self.queues.values()]
        return [each.outputs[0] for each in made]

    def _called(self, frame: Any, event: str, argument: Any) -> None:
        is_ours = "/vllm/inflight/" in frame.f_code.co_filename
        self.num_calls += event == "call" and is_ours


def test_a_token_takes_few_functions_of_ours():
    apply_all()
    counts = []
    for num in (FEW, MANY):
        front = Front(num)
        front.step(Stamp("one", 1).encode())
        front.num_calls = 0
        for output in front.step(Stamp("one", 1).encode()):
            assert output.weight_versions == [VersionSpan("one", 0, 2, 1)]
        counts.append(front.num_calls)
    few, many = counts
    assert many - few <= MOST_CALLS * (MANY - FEW)
    for output in front.step(Stamp("two", 2).encode()):
        first, second = VersionSpan("one", 0, 2, 1), VersionSpan("two", 2, 3, 2)
        assert output.weight_versions == [first, second]
