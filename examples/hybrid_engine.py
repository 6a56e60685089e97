"""A trainer and an engine take turns on one GPU: the engine sleeps while it trains.

    python -m examples.hybrid_engine

A sleeping engine has given back the memory of live weights, shadow weights and KV
cache. The weights wake up first, an update replaces them, and the KV cache wakes up
last.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from examples.tiny_model import MAX_LENGTH, PROMPT, Trainer, make_checkpoint

GIB = 1 << 30


def free_gib() -> float:
    """Free memory of the GPU in GiB."""
    return torch.cuda.mem_get_info()[0] / GIB


def say(llm: Any) -> None:
    """Print what the live weights generate."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    (choice,) = output.outputs
    print(f"  [{choice.weight_versions[0].version}] {PROMPT + choice.text!r}")


def main() -> None:
    """Train, update and generate, four times."""
    if not torch.cuda.is_available():
        print(
            "vLLM has sleep mode on GPUs only, and there is none here: nothing to see"
        )
        return
    from vllm import LLM

    from vllm.inflight.trainer import Publisher

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(make_checkpoint(folder).cuda())
        llm = LLM(
            folder,
            dtype="float32",
            enforce_eager=True,
            max_model_len=MAX_LENGTH,
            gpu_memory_utilization=0.3,
            enable_sleep_mode=True,
            weight_transfer_config={"backend": "local"},
        )
        say(llm)
        with Publisher(llm, trainer.model) as publisher:
            for _ in range(4):
                awake = free_gib()
                llm.sleep(level=2)  # these weights are not wanted any more
                loss = trainer.train(num_steps=15)
                print(
                    f"step {trainer.step}, loss {loss:.2f}: the engine slept, and "
                    f"{free_gib() - awake:.1f} GiB more were free"
                )
                llm.wake_up(tags=["weights"])
                publisher.publish(f"step-{trainer.step}", step=trainer.step)
                llm.wake_up(tags=["kv_cache"])
                say(llm)


if __name__ == "__main__":
    main()
