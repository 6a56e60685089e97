"""Processors of models that see, and the forms that their checkpoints are published in.

transformers saves some of them otherwise than vLLM reads them.
"""

from collections.abc import Callable
from typing import Any

import transformers
from torch import Tensor

Tensors = dict[str, Tensor]

SQUARE = {"height": 28, "width": 28}
QUERIES = 4
"""How many embeddings a picture becomes where that is up to the model."""


def blip2(tokenizer: Any) -> Any:
    pictures = transformers.BlipImageProcessorPil(size=SQUARE)
    return transformers.Blip2Processor(pictures, tokenizer, QUERIES)


def older(tensors: Tensors) -> Tensors:
    """Under the names of older transformers."""
    prefix = "vision_tower."
    return {
        n.replace(prefix, f"{prefix}vision_model.") if n.startswith(prefix) else n: t
        for n, t in tensors.items()
    }


def transposed(tensors: Tensors) -> Tensors:
    """With experts that are multiplied from the right."""
    return {
        n: t.transpose(-1, -2).contiguous() if ".experts." in n else t
        for n, t in tensors.items()
    }


def llava(tokenizer: Any) -> Any:
    pictures = transformers.CLIPImageProcessorPil(size=SQUARE, crop_size=SQUARE)
    return transformers.LlavaProcessor(
        pictures,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def gemma3(tokenizer: Any) -> Any:
    pictures = transformers.Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    return transformers.Gemma3Processor(pictures, tokenizer, image_seq_length=QUERIES)


def idefics3(tokenizer: Any) -> Any:
    edge = {"longest_edge": 56}
    pictures = transformers.Idefics3ImageProcessorPil(
        size=edge, max_image_size=edge, do_image_splitting=False
    )
    return transformers.Idefics3Processor(pictures, tokenizer, image_seq_len=QUERIES)


def pixtral(tokenizer: Any) -> Any:
    pictures = transformers.PixtralImageProcessor(
        size={"longest_edge": 112}, patch_size=28
    )
    return transformers.PixtralProcessor(
        pictures, tokenizer, patch_size=14, spatial_merge_size=2
    )


def internvl(tokenizer: Any) -> Any:
    size = {"height": 56, "width": 56}
    return transformers.InternVLProcessor(
        transformers.GotOcr2ImageProcessor(size=size, crop_to_patches=False),
        tokenizer,
        transformers.InternVLVideoProcessor(size=size),
        image_seq_length=QUERIES,
    )


def qwen(stem: str, patch: int) -> Callable[[Any], Any]:
    """The processor of one generation."""
    videos = f"{stem[:5]}VLVideoProcessor"

    def make(tokenizer: Any) -> Any:
        pixels = {"shortest_edge": 16 * patch**2, "longest_edge": 256 * patch**2}
        shape = {"size": pixels, "patch_size": patch, "merge_size": 2}
        return getattr(transformers, f"{stem}Processor")(
            image_processor=transformers.Qwen2VLImageProcessor(**shape),
            tokenizer=tokenizer,
            video_processor=getattr(transformers, videos)(**shape),
        )

    return make
