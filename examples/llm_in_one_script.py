"""A trainer and an engine in one script: train, publish, generate, and again.

    python -m examples.llm_in_one_script

The engine generates what the model has learned so far, and is never restarted.
"""

from __future__ import annotations

import tempfile
from typing import Any

from vllm import LLM, SamplingParams

from examples.tiny_model import MAX_LENGTH, PROMPT, Trainer, make_checkpoint
from vllm.inflight.trainer import Publisher


def say(llm: LLM) -> None:
    """Print what the live weights generate."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    (choice,) = output.outputs
    spans: Any = choice.weight_versions  # a field that vllm-inflight fills
    print(f"  [{spans[0].version}] {PROMPT + choice.text!r}")


def main() -> None:
    """Train, publish and generate, four times."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(make_checkpoint(folder))
        llm = LLM(
            folder,
            dtype="float32",
            enforce_eager=True,
            max_model_len=MAX_LENGTH,
            gpu_memory_utilization=0.3,
            weight_transfer_config={"backend": "local"},
        )
        say(llm)
        with Publisher(llm, trainer.model) as publisher:
            for _ in range(4):
                loss = trainer.train(num_steps=15)
                outcome = publisher.publish(f"step-{trainer.step}", step=trainer.step)
                print(
                    f"step {outcome.step}, loss {loss:.2f}: published "
                    f"{outcome.num_bytes >> 10} KiB as epoch {outcome.epoch} in "
                    f"{outcome.seconds['total']:.2f} s; decoding stood still for "
                    f"{outcome.gap_ms:.2f} ms"
                )
                say(llm)
        print("weight_info:", llm.weight_info())  # a method of vllm-inflight


if __name__ == "__main__":
    main()
