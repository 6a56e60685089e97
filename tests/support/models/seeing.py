"""Models that see: what it takes to make one tiny, and what is particular of it.

Most want torchvision, which the CPU set-up leaves out: they are run by `make
test-vision`, and BLIP-2 and Idefics 3 by `make test-slow` as well.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest
import transformers

from tests.support.models.family import EXPERTS, HEAD_DIM, KEPT, WINDOW
from tests.support.models.processors import (
    QUERIES,
    Tensors,
    blip2,
    gemma3,
    idefics3,
    internvl,
    llava,
    older,
    pixtral,
    qwen,
    transposed,
)
from tests.support.models.state_spaces import GATED, LINEAR, SHARED


@dataclass(frozen=True, slots=True)
class Seeing:
    """One architecture.

    Attributes:
        architecture: its class, of transformers and of vLLM.
        particular: what there is in it that is not in others.
        tokens: special ones, by the fields of the configuration that want their ids.
        processor: makes its processor around a tokenizer.
        vision: fields of the configuration of its tower.
        text: those of the rest, beside or instead of the common ones; None leaves one
            out.
        fields: those of the model itself.
        named: special tokens that the tokenizer has to have attributes for.
        prompt: what is asked about a picture.
        side: of the pictures, in pixels.
        publish: its checkpoint as those are that are published, which vLLM reads,
            of what transformers has saved.
        tower: patterns of the tensors that pictures alone go through.
        wants_torchvision: whether its processor does, or vLLM's code of it.

    """

    architecture: str
    particular: str
    tokens: Mapping[str, str]
    processor: Callable[[Any], Any]
    vision: Mapping[str, Any]
    text: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)
    prompt: str = "<image>what?"
    side: int = 28
    publish: Callable[[Tensors], Tensors] = dict
    tower: tuple[str, ...] = ("vision_tower.*", "multi_modal_projector.*")
    wants_torchvision: bool = False

    def make(self, tokenizer: Any, **common: Any) -> Any:
        """A random model of it, in float32."""
        stem = self.architecture.partition("For")[0]
        text = {**common, **self.text}
        config = getattr(transformers, f"{stem}Config")(
            text_config={n: v for n, v in text.items() if v is not None or n in KEPT},
            vision_config=dict(self.vision),
            tie_word_embeddings=False,
            **{n: tokenizer.convert_tokens_to_ids(t) for n, t in self.tokens.items()},
            **self.fields,
        )
        return getattr(transformers, self.architecture)(config)


LAYERS = {"hidden_size": 128, "intermediate_size": 256}
TOWER = {
    **LAYERS,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def a_qwen(stem: str, particular: str, *, patch: int, **more: Any) -> Seeing:
    """One generation; `more` are fields of its tower, and `text`."""
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [HEAD_DIM // 32 * n for n in (4, 6, 6)],
    }
    text = {"rope_parameters": rope, **more.pop("text", {})}
    return Seeing(
        f"{stem}ForConditionalGeneration",
        particular,
        tokens={
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        },
        processor=qwen(stem.removesuffix("Moe").replace("3_5", "3VL"), patch),
        vision={**LAYERS, "depth": 2, "num_heads": 2, "patch_size": patch, **more},
        text=text,
        prompt="<|vision_start|><|image_pad|><|vision_end|>what?",
        side=8 * patch,
        publish=transposed if stem == "Qwen3VLMoe" else dict,
        tower=("visual.*" if stem.startswith("Qwen2") else "model.visual.*",),
        wants_torchvision=True,
    )


QWEN3 = {"out_hidden_size": 128, "num_position_embeddings": 16}
LINEAR_TEXT = {
    **LINEAR,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 3, 3],
    },
}
DEEP = "features of several layers of the tower, kept for a step"

SEEING = {
    "blip2": Seeing(
        "Blip2ForConditionalGeneration",
        "a vision tower, also on its own",
        tokens={"image_token_index": "<image>"},
        processor=blip2,
        vision=TOWER,
        text={
            "model_type": "opt",
            "word_embed_proj_dim": 128,
            "ffn_dim": 256,
            "num_attention_heads": 2,
            "init_std": 0.3,
        },
        fields={
            "num_query_tokens": QUERIES,
            "qformer_config": {
                **LAYERS,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "encoder_hidden_size": 128,
                "cross_attention_frequency": 1,
            },
        },
        prompt="what?",
        tower=("vision_model.*", "qformer.*", "query_tokens"),
    ),
    "qwen2_vl": a_qwen(
        "Qwen2VL",
        "positions of three axes",
        patch=14,
        embed_dim=128,
        mlp_ratio=2,
        text={"head_dim": None},
    ),
    "qwen2_5_vl": a_qwen(
        "Qwen2_5_VL",
        "windows in its tower",
        patch=14,
        out_hidden_size=128,
        window_size=56,
        fullatt_block_indexes=[1],
        text={"head_dim": None},
    ),
    "qwen3_vl": a_qwen(
        "Qwen3VL", DEEP, patch=16, deepstack_visual_indexes=[0, 1], **QWEN3
    ),
    "qwen3_vl_moe": a_qwen(
        "Qwen3VLMoe",
        f"{DEEP}; experts",
        patch=16,
        deepstack_visual_indexes=[0, 1],
        # No tensor of its experts is square: who transposes them is to be seen.
        text={
            "num_experts": 4,
            "norm_topk_prob": True,
            **EXPERTS,
            "moe_intermediate_size": 96,
        },
        **QWEN3,
    ),
    "qwen3_5_vl": a_qwen(
        "Qwen3_5",
        f"{GATED}; positions of three axes",
        patch=16,
        text=LINEAR_TEXT,
        **QWEN3,
    ),
    "qwen3_5_vl_moe": a_qwen(
        "Qwen3_5Moe",
        f"{GATED}; positions of three axes; shared experts",
        patch=16,
        text=LINEAR_TEXT | SHARED,
        **QWEN3,
    ),
    "llava": Seeing(
        "LlavaForConditionalGeneration",
        "a tower that ends before its checkpoint does",
        tokens={"image_token_index": "<image>"},
        processor=llava,
        vision={"model_type": "clip_vision_model", **TOWER},
        publish=older,
        wants_torchvision=True,
    ),
    "gemma3_mm": Seeing(
        "Gemma3ForConditionalGeneration",
        "pictures in full attention among sliding layers",
        tokens={
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        processor=gemma3,
        vision={**TOWER, "image_size": 56, "vision_use_head": False},
        text={"sliding_window": WINDOW, "query_pre_attn_scalar": 32},
        fields={"mm_tokens_per_image": QUERIES},
        named={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            # vLLM puts them together where two of them meet.
            **{f"newlines_{n}": n * "\n" for n in (1, 2, 3, 4)},
        },
        prompt="<start_of_image>what?",
        publish=older,
        wants_torchvision=True,
    ),
    "idefics3": Seeing(
        "Idefics3ForConditionalGeneration",
        "",
        tokens={"image_token_id": "<image>"},
        processor=idefics3,
        vision={**TOWER, "image_size": 56},
        fields={"pad_token_id": None},
        tower=("model.vision_model.*", "model.connector.*"),
    ),
    "mistral3": Seeing(
        "Mistral3ForConditionalGeneration",
        "",
        tokens={"image_token_index": "[IMG]"},
        processor=pixtral,
        vision={**TOWER, "image_size": 112, "head_dim": 64},
        named={
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        },
        prompt="[IMG]what?",
        side=112,
        wants_torchvision=True,
    ),
    "internvl": Seeing(
        "InternVLForConditionalGeneration",
        "scales in its tower",
        tokens={"image_token_id": "<IMG_CONTEXT>"},
        processor=internvl,
        vision={**TOWER, "image_size": [56, 56], "patch_size": [14, 14]},
        text={"head_dim": None},
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        fields={"image_seq_length": QUERIES},
        prompt="<IMG_CONTEXT>what?",
        wants_torchvision=True,
    ),
}


def require_torchvision(name: str) -> None:
    """Skip the test if a model wants torchvision, which is not installed."""
    if SEEING[name].wants_torchvision and find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
