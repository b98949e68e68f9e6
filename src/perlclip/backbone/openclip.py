"""OpenCLIP's checkpoints as they lie on the hub: `open_clip_config.json` and `open_clip_model.safetensors`.

ViT towers only, and neither `open_clip` nor `timm` is needed: the weights get the names that `CLIPModel` has for them
(its Q, K and V are one matrix here), the config becomes a `CLIPConfig`, and from there on it is the family `clip`, with
the same fingerprint as the same weights in Hugging Face's form. A setting that would make another model is refused.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from perlclip.errors import PerlclipError
from perlclip.files import MIB, parse_json, read_file

CONFIG, WEIGHTS, PICKLED = "open_clip_config.json", "open_clip_model.safetensors", "open_clip_pytorch_model.bin"
TOKENIZER = "openai/clip-vit-base-patch16"  # whose vocabulary OpenCLIP has, where a repository has none beside it
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
RESAMPLE = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}

# What is read of each part of the config, with what it is if it is not said.
READ: dict[str, dict[str, Any]] = {
    "": {"embed_dim": None, "quick_gelu": False, "vision_cfg": None, "text_cfg": None},
    "vision": {"image_size": 224, "layers": 12, "width": 768, "head_width": 64, "mlp_ratio": 4.0, "patch_size": 16},
    "text": {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12, "mlp_ratio": 4.0},
}
# What may be said beside that: nothing in a frozen ViT depends on it.
IDLE = {
    "": {"custom_text", "init_logit_bias", "init_logit_scale", "nonscalar_logit_scale", "output_dict", "cast_dtype"},
    "vision": {"patch_dropout", "output_tokens"},
    "text": {"hf_tokenizer_name", "tokenizer_kwargs", "output_tokens", "pad_id"},
}
# And what may be said if it says what is so here.
USUAL: dict[str, dict[str, Any]] = {
    "": {},
    "vision": {"pool_type": "tok", "final_ln_after_pool": False, "pos_embed_type": "learnable", "no_ln_pre": False},
    "text": {
        "pool_type": "argmax", "no_causal_mask": False, "final_ln_after_pool": False, "embed_cls": False,
        "proj_bias": False, "proj_type": "linear",
    },
}  # fmt: skip

TENSORS = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.proj": "visual_projection.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "text_projection": "text_projection.weight",
    "logit_scale": "logit_scale",
    "logit_bias": "logit_bias",
}
NORMS = {
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "ln_final": "text_model.final_layer_norm",
}
BLOCKS = re.compile(r"(visual\.|)transformer\.resblocks\.(\d+)\.(.+)")
IN_BLOCKS = {
    "ln_1": "layer_norm1", "ln_2": "layer_norm2", "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2",
}  # fmt: skip
TRANSPOSED = ("visual.proj", "text_projection")


@dataclass(frozen=True)
class Converted:
    """A checkpoint's parts, as `transformers` would have them."""

    state: dict[str, Tensor]
    config: Any
    processor: Any
    tokenizer: str  # where it is found, if it is not beside the weights


def convert(config: Path, weights: Path) -> Converted:
    """The two files; a PerlclipError says what cannot be read."""
    from safetensors.torch import load_file

    try:
        said = parse_json(read_file(config, MIB))
    except (OSError, ValueError) as error:
        raise PerlclipError(f"cannot read {CONFIG}: {error}") from error
    if not isinstance(said, dict) or not isinstance(said.get("model_cfg"), dict):
        raise PerlclipError(f"{CONFIG} has no model_cfg")
    model, views = said["model_cfg"], said.get("preprocess_cfg")
    found = _config(model)
    processor = _processor(views if isinstance(views, dict) else {}, found)
    state = dict(_renamed(load_file(weights)))
    return Converted(state, found, processor, model["text_cfg"].get("hf_tokenizer_name") or TOKENIZER)


def _config(model: Mapping[str, Any]) -> Any:
    """A CLIPConfig that says the same."""
    from transformers import CLIPConfig

    whole = _read(model, "")
    vision, text = _read(whole["vision_cfg"], "vision"), _read(whole["text_cfg"], "text")
    sizes = {f"vision_cfg.{key}": value for key, value in vision.items()}
    sizes |= {f"text_cfg.{key}": value for key, value in text.items()} | {"embed_dim": whole["embed_dim"]}
    for key, value in sizes.items():
        kinds = (int, float) if "mlp_ratio" in key or key.endswith("eps") else (int,)
        if type(value) not in kinds or not 0 < value < 2**20:
            raise PerlclipError(f"{CONFIG} has {key} = {value!r}, which is no size of a ViT")
    if vision["width"] % vision["head_width"] or text["width"] % text["heads"]:
        raise PerlclipError(f"{CONFIG} has a width that its heads do not divide")
    act = "quick_gelu" if whole["quick_gelu"] else "gelu"
    return CLIPConfig(
        projection_dim=whole["embed_dim"],
        vision_config=dict(
            hidden_size=vision["width"], num_attention_heads=vision["width"] // vision["head_width"],
            num_hidden_layers=vision["layers"], intermediate_size=int(vision["width"] * vision["mlp_ratio"]),
            image_size=vision["image_size"], patch_size=vision["patch_size"], layer_norm_eps=vision["eps"],
            hidden_act=act, projection_dim=whole["embed_dim"],
        ),
        text_config=dict(
            hidden_size=text["width"], num_attention_heads=text["heads"], num_hidden_layers=text["layers"],
            intermediate_size=int(text["width"] * text["mlp_ratio"]), vocab_size=text["vocab_size"],
            max_position_embeddings=text["context_length"], layer_norm_eps=text["eps"], hidden_act=act,
            projection_dim=whole["embed_dim"],
        ),
    )  # fmt: skip


def _read(said: Any, part: str) -> dict[str, Any]:
    """The settings of one part, the others checked: what makes another model than a CLIP of ViTs is refused."""
    if not isinstance(said, Mapping):
        raise PerlclipError(f"{CONFIG} lacks a part of a model: {part or 'model'}_cfg")
    where = f"{part}_cfg." if part else ""
    values, eps = dict(READ[part]), {"eps": 1e-5} if part else {}
    for key, value in said.items():
        if key in values:
            square = isinstance(value, list) and len(value) == 2 and value[0] == value[1]
            values[key] = value[0] if square else value
        elif key == "norm_kwargs" and isinstance(value, Mapping) and value.keys() <= eps.keys():
            eps |= value
        elif key not in IDLE[part] and value and value != USUAL[part].get(key):
            raise PerlclipError(f"{CONFIG} has {where}{key} = {value!r}: it is no CLIP of two ViTs, and not supported")
    return values | eps


def _renamed(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor under the name that `CLIPModel` has for it."""
    for key, tensor in tensors.items():
        name = key.removeprefix("text.")  # where the text tower is a module of its own
        if found := BLOCKS.fullmatch(name):
            side, number, rest = found.groups()
            yield from _of_block(f"{'vision' if side else 'text'}_model.encoder.layers.{number}.", rest, tensor)
            continue
        module, _, kind = name.rpartition(".")
        if name in TENSORS:
            tensor = tensor.reshape(()) if name.startswith("logit") and tensor.numel() == 1 else tensor
            yield TENSORS[name], tensor.T.contiguous() if name in TRANSPOSED else tensor
        elif module in NORMS:
            yield f"{NORMS[module]}.{kind}", tensor
        elif name != "attn_mask":  # a constant
            raise PerlclipError(f"{WEIGHTS} has a tensor {key!r}, which no CLIP of two ViTs has")


def _of_block(layer: str, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Q, K and V are one tensor here, and three there."""
    if name in ("attn.in_proj_weight", "attn.in_proj_bias"):
        kind = name.rpartition("_")[2]
        for letter, part in zip("qkv", tensor.chunk(3), strict=True):
            yield f"{layer}self_attn.{letter}_proj.{kind}", part.contiguous()
        return
    module, _, kind = name.rpartition(".")
    if module not in IN_BLOCKS:
        raise PerlclipError(f"{WEIGHTS} has blocks with {name!r}, which those of a CLIP have not")
    yield f"{layer}{IN_BLOCKS[module]}.{kind}", tensor


def _processor(views: Mapping[str, Any], config: Any) -> Any:
    """CLIP's image processor with the settings of OpenCLIP's test view."""
    from transformers import CLIPImageProcessorPil

    size, mode, name = config.vision_config.image_size, views.get("resize_mode"), views.get("interpolation")
    if mode not in (None, "shortest", "squash") or name not in (None, *RESAMPLE):
        raise PerlclipError(f"{CONFIG} wants images of mode {mode!r} by {name!r}, which is not supported")
    square = {"height": size, "width": size}
    return CLIPImageProcessorPil(
        size=square if mode == "squash" else {"shortest_edge": size},
        crop_size=square,
        do_center_crop=mode != "squash",
        resample=RESAMPLE[name or "bicubic"],
        image_mean=_three(views.get("mean") or MEAN),
        image_std=_three(views.get("std") or STD),
    )


def _three(numbers: Any) -> list[float]:
    if not isinstance(numbers, list | tuple) or [type(n) in (int, float) for n in numbers] != [True] * 3:
        raise PerlclipError(f"{CONFIG} has {numbers!r} where three numbers are needed, for red, green and blue")
    return list(numbers)
