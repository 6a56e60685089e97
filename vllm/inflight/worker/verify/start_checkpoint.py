"""The checkpoint that an engine started from: its tensors, and their shapes.

It is used for two checks. A loader cuts a tensor to the size of its shard, and does not
check that the tensor is whole. Of a tensor with twice as many rows, it would load the
first half. So a tensor with a name of that checkpoint has to have its shape, too.

A loader also skips tensors, and not all of these can be foretold:

- layers of a tower behind the last one in use (LLaVA);
- biases that a quantiser left;
- MTP layers that no field of the configuration counts.

A tensor that fills nothing is accepted if that checkpoint has it: an engine that is
started from the new checkpoint skips it as well.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Self

import torch
from huggingface_hub import snapshot_download

from vllm.inflight import upstream
from vllm.inflight.errors import Malformed
from vllm.inflight.tensor_names import Known
from vllm.inflight.transport.files.safetensors_files import TensorFiles
from vllm.inflight.update import DRAFT
from vllm.inflight.worker.model.kinds.drafter import has_mtp
from vllm.inflight.yielding import with_breaks

Shape = tuple[int, ...]

OF_RANKS = ("sharded_state", "runai_streamer_sharded")
"""Load formats whose files hold parameters of the engine instead of a checkpoint."""


class StartCheckpoint:
    """The tensors of that checkpoint; those of a drafter are under `draft.`.

    Only safetensors are read; tensors in another format are not listed.

    Args:
        shapes: name → shape; None where files of a folder do not agree.
        dtypes: name → dtype (like `bfloat16`), where the dtype is known.

    """

    def __init__(
        self,
        shapes: Mapping[str, Shape | None],
        dtypes: Mapping[str, str] | None = None,
    ) -> None:
        self._shapes = shapes
        self._dtypes = dtypes or {}

    @property
    def largest(self) -> int | None:
        """Elements of its largest tensor; None if not all shapes are known."""
        shapes = self._shapes.values()
        if not shapes or None in shapes:
            return None
        return max(prod(shape) for shape in shapes if shape is not None)

    @classmethod
    def of(cls, vllm_config: upstream.VllmConfig) -> Self:
        """The start checkpoint of an engine that was just loaded."""
        loading, drafting = vllm_config.load_config, vllm_config.speculative_config
        # Tensors of MTP layers come among those of the model, under their own names.
        is_apart = drafting is not None and not has_mtp(vllm_config)
        configs = {
            "": vllm_config.model_config,
            DRAFT: drafting.draft_model_config if is_apart else None,
        }
        # If nothing was loaded, the model may differ from the checkpoint in the folder.
        is_other = loading.load_format == "dummy" and configs[""].hf_overrides
        shapes: dict[str, Shape | None] = {}
        dtypes: dict[str, str] = {}
        if is_other or loading.load_format in OF_RANKS:
            return cls(shapes)
        for prefix, config in configs.items():
            for file in _files(config, loading.download_dir) if config else ():
                for name, shape, dtype in _tensors(file):
                    agrees = shapes.setdefault(prefix + name, shape) == shape
                    shapes[prefix + name] = shape if agrees else None
                    dtypes.setdefault(prefix + name, dtype)
        return cls(shapes, dtypes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> Shape | None:
        """The shape of a tensor; None if it is unknown or ambiguous."""
        return self._shapes.get(name)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes that tensors of it have."""
        found = (getattr(torch, name, None) for name in set(self._dtypes.values()))
        return {dtype for dtype in found if isinstance(dtype, torch.dtype)}

    @functools.cached_property
    def known(self) -> Known:
        """Every name, with the shape and dtype of its tensor."""
        shapes = with_breaks(self._shapes.items())
        return {name: (shape, self._dtypes.get(name)) for name, shape in shapes}


def _files(config: upstream.ModelConfig, cache: str | None) -> list[Path]:
    folder = Path(config.model)
    if not folder.is_dir():
        try:
            folder = Path(
                snapshot_download(
                    config.model,
                    revision=config.revision,
                    cache_dir=cache,
                    local_files_only=True,
                )
            )
        except (OSError, ValueError):  # it was streamed, or was deleted
            return []
    return sorted(folder.glob("*.safetensors"))


def _tensors(file: Path) -> Iterable[tuple[str, Shape, str]]:
    try:
        with TensorFiles([file]) as opened:
            told = opened.tensor_list
            dtypes = (str(dtype).removeprefix("torch.") for dtype in told.dtypes)
            return list(zip(told.names, told.shapes, dtypes, strict=True))
    except Malformed:
        return ()  # the file was replaced, or is being written
