"""Small folders of every backbone family with random weights, as `transformers` or OpenCLIP would write them."""

import json
import re
import string
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import CLIPImageProcessorPil, Siglip2Tokenizer, SiglipImageProcessorPil, XLMRobertaTokenizer

from perlclip.backbone.load import FAMILIES
from tests.conftest import SIZES as CLIPS
from tests.conftest import tower_config

LETTERS = [*string.ascii_lowercase, *".,'-"]
TANH = "gelu_pytorch_tanh"
# As in conftest, sizes differ in everything that could be hard-coded. An image of 38 has pixels left over beside
# patches of 7, as SigLIP's of 384 beside patches of 14; texts of 64 and 40 positions are all padded.
SIZES = {
    "siglip": dict(type="siglip", vision=(48, 4, 12), text=(32, 2, 12), patch=8, image=32, context=64, act=TANH),
    "siglip-odd": dict(type="siglip", vision=(40, 5, 11), text=(56, 7, 10), patch=7, image=38, context=40, act="gelu"),
    "siglip2": dict(type="siglip2", vision=(48, 4, 12), text=(32, 2, 12), patch=8, image=32, context=64, act=TANH),
    "siglip2-odd": dict(type="siglip2", vision=(40, 5, 9), text=(56, 7, 10), patch=7, image=35, context=50, act=TANH),
    "metaclip_2": dict(type="metaclip_2", **CLIPS["small"]),
    "metaclip_2-odd": dict(type="metaclip_2", **CLIPS["odd"]),
}
MODELS = {name: family.model for name, family in FAMILIES.items()}


def build(folder: Path, name: str, seed: int = 0) -> Path:
    """A folder of one of `SIZES`."""
    return build_family(folder, **SIZES[name], seed=seed)


def model_of(folder: str | Path, **options):
    """The model of a folder as `transformers` has it."""
    kind = json.loads((Path(folder) / "config.json").read_text())["model_type"]
    return getattr(transformers, MODELS[kind]).from_pretrained(folder, **options).eval()


def build_family(folder: Path, *, type, vision, text, patch, image, context, act, embed=None, seed=0) -> Path:
    tokenizer = xlmr_tokenizer() if type == "metaclip_2" else gemma_tokenizer()
    ids = dict(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
    side = dict(num_patches=(image // patch) ** 2) if type == "siglip2" else dict(image_size=image)
    shared = dict(projection_size=vision[0]) if embed is None else dict(projection_dim=embed)
    words = dict(vocab_size=len(tokenizer), max_position_embeddings=context, **ids, **shared)
    prefix = MODELS[type].removesuffix("Model")
    config = getattr(transformers, f"{prefix}Config")(
        text_config=tower_config(*text, act) | words | dict(intermediate_size=3 * text[0] + 1),
        vision_config=tower_config(*vision, act) | dict(patch_size=patch, **side),
        **({} if embed is None else dict(projection_dim=embed)),
    )
    torch.manual_seed(seed)
    model = getattr(transformers, MODELS[type])(config)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.5 if p.ndim < 2 else p.shape[-1] ** -0.5))
        model.logit_scale.fill_(4.6)
        if hasattr(model, "logit_bias"):
            model.logit_bias.fill_(-12.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor_of(type, patch, image).save_pretrained(folder)
    return folder


def processor_of(kind: str, patch: int, image: int):
    square = {"height": image, "width": image}
    if kind == "siglip":
        return SiglipImageProcessorPil(size=square)
    if kind == "siglip2":
        return transformers.Siglip2ImageProcessorPil(patch_size=patch, max_num_patches=(image // patch) ** 2)
    return CLIPImageProcessorPil(size={"shortest_edge": image}, crop_size=square)


def gemma_tokenizer() -> Siglip2Tokenizer:
    """SigLIP 2's, a token for each letter."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *LETTERS, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Siglip2Tokenizer(vocab=vocabulary, merges=[], padding_side="right")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    return tokenizer


def xlmr_tokenizer() -> XLMRobertaTokenizer:
    """MetaCLIP 2's, a token for each letter."""
    special = [(piece, 0.0) for piece in ("<s>", "<pad>", "</s>", "<unk>")]
    return XLMRobertaTokenizer(vocab=[*special, ("▁", -1.0), *((letter, -2.0) for letter in LETTERS), ("<mask>", 0.0)])


def as_openclip(clip_folder: Path, folder: Path, *, act: str, preprocess: dict | None = None) -> Path:
    """The CLIP of a Hugging Face folder as OpenCLIP stores it, its tensors renamed the other way round."""
    config = json.loads((clip_folder / "config.json").read_text())
    vision, text = config["vision_config"], config["text_config"]
    folder.mkdir()
    (folder / "open_clip_config.json").write_text(
        json.dumps(
            {
                "model_cfg": {
                    "embed_dim": config["projection_dim"],
                    "quick_gelu": act == "quick_gelu",
                    "vision_cfg": {
                        "image_size": vision["image_size"], "layers": vision["num_hidden_layers"],
                        "width": vision["hidden_size"], "patch_size": vision["patch_size"],
                        "head_width": vision["hidden_size"] // vision["num_attention_heads"],
                    },
                    "text_cfg": {
                        "context_length": text["max_position_embeddings"], "vocab_size": text["vocab_size"],
                        "width": text["hidden_size"], "heads": text["num_attention_heads"],
                        "layers": text["num_hidden_layers"],
                    },
                },
                "preprocess_cfg": preprocess or {},
            }
        )
    )  # fmt: skip
    tensors = load_file(clip_folder / "model.safetensors")
    save_file(openclip_tensors(tensors), folder / "open_clip_model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((clip_folder / name).read_bytes())
    return folder


def openclip_tensors(tensors: dict) -> dict:
    """By OpenCLIP's names, as its `CLIP.state_dict()` has them."""
    single = {
        "vision_model.embeddings.class_embedding": "visual.class_embedding",
        "vision_model.embeddings.patch_embedding.weight": "visual.conv1.weight",
        "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
        "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
        "text_model.embeddings.position_embedding.weight": "positional_embedding",
        "logit_scale": "logit_scale",
    }
    found = {new: tensors[old] for old, new in single.items()}
    found["visual.proj"] = tensors["visual_projection.weight"].T.contiguous()
    found["text_projection"] = tensors["text_projection.weight"].T.contiguous()
    norms = {
        "vision_model.pre_layrnorm": "visual.ln_pre", "vision_model.post_layernorm": "visual.ln_post",
        "text_model.final_layer_norm": "ln_final",
    }  # fmt: skip
    for old, new in norms.items():
        found |= {f"{new}.{kind}": tensors[f"{old}.{kind}"] for kind in ("weight", "bias")}
    inner = {
        "layer_norm1": "ln_1", "layer_norm2": "ln_2", "self_attn.out_proj": "attn.out_proj", "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
    }  # fmt: skip
    layers = {re.match(r"(\w+_model)\.encoder\.layers\.(\d+)\.", key) for key in tensors} - {None}
    for side, number in {match.groups() for match in layers}:
        old = f"{side}.encoder.layers.{number}."
        new = f"{'visual.' if side == 'vision_model' else ''}transformer.resblocks.{number}."
        for kind in ("weight", "bias"):
            parts = [tensors[f"{old}self_attn.{letter}_proj.{kind}"] for letter in "qkv"]
            found[f"{new}attn.in_proj_{kind}"] = torch.cat(parts)
            found |= {f"{new}{b}.{kind}": tensors[f"{old}{a}.{kind}"] for a, b in inner.items()}
    return found
