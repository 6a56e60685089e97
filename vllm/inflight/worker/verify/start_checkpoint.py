"""The checkpoint that an engine started from: its tensors, and how they are shaped.

Loaders cut what they get to the size of their shard, and do not ask whether it was the
whole that they expect: a tensor of twice as many rows would fill a parameter with its
first half. So what has a name of that checkpoint has to have its shape there.

And a loader passes over more than can be foretold: layers of a tower behind the last
one that is looked at (LLaVA), biases that a quantiser left, MTP layers that no field of
the configuration counts. It did so when the engine started. So a tensor that fills
nothing may come again if that checkpoint has it, too: an engine that is started from
the new one passes it over as well.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from huggingface_hub import snapshot_download

from vllm.inflight.errors import Malformed
from vllm.inflight.tensor_names import Known
from vllm.inflight.transport.files.safetensors_files import TensorFiles
from vllm.inflight.update import DRAFT
from vllm.inflight.yielding import with_breaks

Shape = tuple[int, ...]

OF_RANKS = ("sharded_state", "runai_streamer_sharded")
"""Load formats whose files hold parameters of the engine, and not a checkpoint."""


class StartCheckpoint:
    """The tensors of that checkpoint, a drafter's under `draft.`.

    Of safetensors alone: what came in another form has no names here.

    Args:
        shapes: name → shape; None, where files of a folder do not agree.
        dtypes: name → dtype (like `bfloat16`), of those whose dtype is known.

    """

    def __init__(
        self,
        shapes: Mapping[str, Shape | None],
        dtypes: Mapping[str, str] | None = None,
    ) -> None:
        self._shapes = shapes
        self._dtypes = dtypes or {}

    @classmethod
    def of(cls, vllm_config: Any) -> Self:
        """That of an engine that has just been loaded, as it is now."""
        loading, drafting = vllm_config.load_config, vllm_config.speculative_config
        configs = {
            "": vllm_config.model_config,
            DRAFT: getattr(drafting, "draft_model_config", None),
        }
        # If nothing was loaded, the model need not be what is in the folder.
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
        """The shape that a tensor had; None if it had none, or more than one."""
        return self._shapes.get(name)

    @functools.cached_property
    def known(self) -> Known:
        """Every name, with the shape and dtype that its tensor had."""
        shapes = with_breaks(self._shapes.items())
        return {name: (shape, self._dtypes.get(name)) for name, shape in shapes}


def _files(config: Any, cache: str | None) -> list[Path]:
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
        except (OSError, ValueError):  # it was streamed, or is gone
            return []
    return sorted(folder.glob("*.safetensors"))


def _tensors(file: Path) -> Iterable[tuple[str, Shape, str]]:
    try:
        with TensorFiles([file]) as opened:
            told = opened.tensor_list
            dtypes = (str(dtype).removeprefix("torch.") for dtype in told.dtypes)
            return list(zip(told.names, told.shapes, dtypes, strict=True))
    except Malformed:
        return ()  # it has been replaced, or is being written
