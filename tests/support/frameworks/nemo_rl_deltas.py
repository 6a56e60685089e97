"""NeMo-RL's own files send a sparse delta to its own worker extension.

Usage: python -m tests.support.frameworks.nemo_rl_deltas OLD NEW

The delta makes of OLD what NEW is. Prints as JSON what is served before and after.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.engines.script import tell
from tests.support.engines.unpacked import unpack


def main(old: Path, new: Path) -> None:
    from tests.support.engines.bare_core import answers, call, publish
    from tests.support.frameworks.core import extended_core
    from tests.support.frameworks.repositories import refit_info

    unpack()  # as on a GPU: the call copies into the parameters themselves
    with extended_core(old, "benchmarks.frameworks.extensions.nemo_rl_deltas") as core:
        publish(core, new, "new")
        expected = answers(core, "expected")
        publish(core, old, "old")
        info = refit_info(load_file(old / "model.safetensors"))
        core.collective_rpc("prepare_sparse_delta_refit_info", args=(info,))
        prepared = call(core, "info")
        (reply,) = core.collective_rpc(
            "update_weights_from_decoded_sparse_payload", args=(delta(old, new),)
        )
        found = call(core, "info")
        tell(
            {
                "prepared": prepared["weight_version"],
                "reply": reply["ok"],
                "label": found["weight_version"],
                "epochs": found["epoch"] - prepared["epoch"],
                "epoch": found["epoch"],
                "digest": found["digest"],
                "is new": answers(core, "after") == expected,
            }
        )


def delta(old: Path, new: Path) -> bytes:
    """What NeMo-RL's trainer makes of two checkpoints."""
    from nemo_rl.utils import weight_transfer_sparse_codec as codec

    before, after = (load_file(each / "model.safetensors") for each in (old, new))

    def changed() -> Any:
        for name, tensor in after.items():
            bits = codec.integer_view(tensor).reshape(-1)
            was = codec.integer_view(before[name]).reshape(-1)
            places = bits.ne(was).nonzero().view(-1)
            if len(places):
                yield name, tensor, places, bits[places], "overwrite"

    written = io.BytesIO()
    torch.save(codec.encode_sparse_infos(changed()), written)
    return written.getvalue()


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(*map(Path, sys.argv[1:]))
