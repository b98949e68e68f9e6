"""The family `clip`: images read at CLS, texts under a causal mask and read at EOS, a projection behind each norm."""

from pathlib import Path
from typing import Any

import torch

from perlclip.backbone.base import Backbone, Family
from perlclip.backbone.preprocess import Preprocess
from perlclip.backbone.tower import (
    ImageEmbedding,
    State,
    TextEmbedding,
    Tower,
    make_blocks,
    make_linear,
    make_norm,
)

TINY = Path(__file__).parent / "tiny"


def build_towers(state: State, config: Any) -> dict[str, Tower]:
    """Both towers from a CLIPModel's state dict and config; every size is read from them."""
    vision, text = config.vision_config, config.text_config
    first = make_norm(state, "vision_model.pre_layrnorm.", vision.layer_norm_eps)
    return {
        "vision": Tower(
            ImageEmbedding(state, first),
            make_blocks(state, "vision_model.", vision),
            make_norm(state, "vision_model.post_layernorm.", vision.layer_norm_eps),
            make_linear(state, "visual_projection."),
            causal=False,
        ),
        "text": Tower(
            TextEmbedding(state),
            make_blocks(state, "text_model.", text),
            make_norm(state, "text_model.final_layer_norm.", text.layer_norm_eps),
            make_linear(state, "text_projection."),
            causal=True,
        ),
    }


CLIP = Family(name="clip", model="CLIPModel", towers=build_towers)


def vit_b16_shape() -> Backbone:
    """ViT-B/16 without weights: enough to count a method's parameters, instantly and offline."""
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(vision_config={"patch_size": 16})
    with torch.device("meta"):
        towers = build_towers(CLIPModel(config).state_dict(), config)
    mean_std = (0.5, 0.5, 0.5)
    return Backbone(
        name="ViT-B/16",
        vision=towers["vision"],
        text=towers["text"],
        logit_scale=100.0,
        tokenizer=None,
        context_length=config.text_config.max_position_embeddings,
        preprocess=Preprocess(processor=None, size=224, mean=mean_std, std=mean_std),
        fingerprint="",
    )
