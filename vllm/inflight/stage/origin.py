"""The checkpoint that an engine started from, and what it has that is of no use.

A loader passes over more than can be foretold: layers of a tower behind the last one
that is looked at (LLaVA), biases that a quantiser left, MTP layers that no field of the
configuration counts. It did so when the engine started. So a tensor that fills nothing
may come again if that checkpoint has it, too: an engine that is started from the new
one passes it over as well.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from vllm.inflight.stage import experts
from vllm.inflight.update import DRAFT


class Origin:
    """The names of its tensors, a drafter's under `draft.`; read when first asked for.

    Of safetensors alone: what came in another form has no names here.

    Args:
        vllm_config: of the engine.

    """

    def __init__(self, vllm_config: Any) -> None:
        self._cache = vllm_config.load_config.download_dir
        drafting = vllm_config.speculative_config
        self._configs = {
            "": vllm_config.model_config,
            DRAFT: getattr(drafting, "draft_model_config", None),
        }

    def __contains__(self, name: object) -> bool:
        return name in self._names

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(
            prefix + name
            for prefix, config in self._configs.items()
            if config is not None
            for file in self._files(config)
            for name in _names_in(file)
        )

    def _files(self, config: Any) -> list[Path]:
        folder = Path(config.model)
        if not folder.is_dir():
            try:
                folder = Path(
                    snapshot_download(
                        config.model,
                        revision=config.revision,
                        cache_dir=self._cache,
                        local_files_only=True,
                    )
                )
            except (OSError, ValueError):  # it was streamed, or is gone
                return []
        return sorted(folder.glob("*.safetensors"))


def origin_of(live: torch.nn.Module, vllm_config: Any) -> Container[str]:
    """That of an engine; empty where what fills nothing here may fill another rank."""
    is_stage = vllm_config.parallel_config.pipeline_parallel_size > 1
    if is_stage or experts.are_shared_out(live):
        return ()
    return Origin(vllm_config)


def _names_in(file: Path) -> Iterator[str]:
    try:
        with safe_open(file, "pt") as opened:
            yield from opened.keys()
    except (OSError, SafetensorError):
        return  # it has been replaced, or is being written
