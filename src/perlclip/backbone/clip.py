"""Load a frozen CLIP: towers, tokenizer, preprocessing, fingerprint.

`transformers` brings weights, tokenizer, image settings and hub access; `tower.py` the forward pass.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from perlclip.backbone.shared_text import SharedText
from perlclip.backbone.tower import Tower, build_towers
from perlclip.data.images import Preprocess
from perlclip.errors import PerlclipError, first_line, unknown_name

TINY = Path(__file__).parent / "tiny"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Tokens:
    """A batch of prompts, cut after the longest one's EOS: under the causal mask nothing behind it can matter."""

    ids_BN: Tensor
    eos_B: Tensor

    def by_length(self) -> "list[tuple[Tokens, Tensor]]":
        """The same prompts in a few groups of about one length, each cut after its longest, with their places."""
        lengths = (self.eos_B + 1).tolist()
        groups = []
        for members in length_groups(lengths, ROWS_A_GROUP[self.eos_B.is_cuda]):
            members_b = torch.tensor(members, device=self.eos_B.device)
            longest = max(lengths[i] for i in members)
            groups.append((Tokens(self.ids_BN[members_b, :longest], self.eos_B[members_b]), members_b))
        return groups


# A group of texts more costs kernels of its own, about as much as so many rows; on CUDA, where they are small, more.
ROWS_A_GROUP = {False: 128, True: 2048}


def length_groups(lengths: Sequence[int], price: int) -> list[list[int]]:
    """Indices in groups by length, such that rows after padding, plus a price for each group, are fewest."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    # ends[j]: one behind the last index, in that order, of the j-th distinct length.
    ends = [n for n in range(1, len(order) + 1) if n == len(order) or lengths[order[n]] != lengths[order[n - 1]]]
    best: dict[int, tuple[int, int]] = {0: (0, 0)}  # end -> (price so far, start of the last group)
    for end in ends:
        longest = lengths[order[end - 1]]
        best[end] = min((best[start][0] + (end - start) * longest + price, start) for start in best)
    groups, end = [], len(order)
    while end:
        start = best[end][1]
        groups.append(sorted(order[start:end]))
        end = start
    return groups[::-1]


@dataclass(frozen=True, kw_only=True, eq=False)
class Backbone:
    """A frozen CLIP. Not an `nn.Module`, so that a method's own parameters are exactly the trained ones."""

    name: str
    vision: Tower
    text: Tower
    logit_scale: float
    tokenizer: Any
    context_length: int
    preprocess: Preprocess
    fingerprint: str

    def __deepcopy__(self, memo: Any) -> "Backbone":
        """Frozen, so that a copy of a method can share it."""
        return self

    @property
    def device(self) -> torch.device:
        """Where the towers are."""
        return self.text.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The towers' number format."""
        return self.text.head.weight.dtype

    @property
    def embed_dim(self) -> int:
        """E, the width of the shared embedding space."""
        return self.text.head.out_features

    def tokenize(self, prompts: Sequence[str], free: int = 0) -> Tokens:
        """Prompts to ids; the EOS position is the first EOS id (CLIP's own padding is EOS, too).

        `free` positions are left between SOS and the text, for rows that a method puts there.
        """
        rows: list[list[int]] = self.tokenizer(list(prompts), padding=False, truncation=False)["input_ids"]
        rows = [row[:1] * (free + 1) + row[1:] for row in rows]
        for prompt, row in zip(prompts, rows, strict=True):
            if len(row) > self.context_length:
                raise PerlclipError(
                    f"prompt of {len(row)} tokens is longer than the context of {self.context_length}: {prompt!r}"
                )
        eos_id = self.tokenizer.eos_token_id
        eos = [row.index(eos_id) for row in rows]
        longest = max(eos) + 1
        ids = [(row + [eos_id] * longest)[:longest] for row in rows]
        return Tokens(torch.tensor(ids, device=self.device), torch.tensor(eos, device=self.device))

    def shared_text(self, prompts: Sequence[str], free: int = 0) -> SharedText:
        """Prompts as rows before the first block of the text tower, what they have in common kept once."""
        tokens = self.tokenize(prompts, free)
        return SharedText.embed(self.text, tokens.ids_BN, tokens.eos_B)

    def word_rows(self, phrase: str, count: int) -> Tensor:
        """Token embeddings of the phrase's first `count` tokens, without positions: (count, D), float32."""
        if self.tokenizer is None:  # a shape without weights
            return torch.zeros(count, self.text.width)
        ids: list[int] = self.tokenizer([phrase], add_special_tokens=False)["input_ids"][0]
        if len(ids) < count:
            raise PerlclipError(f"the phrase {phrase!r} has {len(ids)} tokens; {count} are needed")
        token = self.text.embed.token
        assert isinstance(token, Tensor)
        return token[torch.tensor(ids[:count], device=self.device)].float()

    def text_features(self, prompts: Sequence[str], chunk: int = 1000) -> Tensor:
        """The frozen CLIP's text features, not yet of unit length: (C, E)."""
        parts = [self.shared_text(prompts[i : i + chunk]).pool() for i in range(0, len(prompts), chunk)]
        return self.text.features(torch.cat(parts))

    def encode_text(self, prompts: Sequence[str]) -> Tensor:
        """The frozen CLIP's unit text embeddings, (C, E)."""
        return F.normalize(self.text_features(prompts), dim=-1)

    def encode_image(self, pixels: Tensor) -> Tensor:
        """The frozen CLIP's unit image embeddings, (B, E)."""
        x_BND = self.vision.embed(pixels)
        return self.vision.project(self.vision.pool(x_BND, cls_rows(x_BND)))


def cls_rows(x_BND: Tensor) -> Tensor:
    """Row 0 of each sequence: where images are read out."""
    return torch.zeros(len(x_BND), dtype=torch.long, device=x_BND.device)


def load_backbone(name: str, device: str | torch.device = "cpu", dtype: str | torch.dtype = "float32") -> Backbone:
    """A frozen CLIP by hub name, from a Hugging Face folder, or the embedded `"tiny"`.

    `device` is anything torch knows, or "auto": CUDA, else Apple's MPS, else the CPU.
    """
    device, dtype = _device(device), _dtype(dtype)
    model, tokenizer, processor = _load_parts(str(TINY) if name == "tiny" else name, shown=name)
    from transformers.activations import ACT2FN

    state = {key: value.detach() for key, value in model.state_dict().items()}
    towers = build_towers(state, model.config, lambda act: ACT2FN[act])
    for tower in towers.values():
        tower.place(device, dtype)
    return Backbone(
        name=name,
        vision=towers["vision"],
        text=towers["text"],
        logit_scale=state["logit_scale"].double().exp().item(),
        tokenizer=tokenizer,
        context_length=model.config.text_config.max_position_embeddings,
        preprocess=_preprocess(processor, model.config.vision_config.image_size),
        fingerprint=_fingerprint(state, model.config),
    )


def vit_b16_shape() -> Backbone:
    """ViT-B/16 without weights: enough to count a method's parameters, instantly and offline."""
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(vision_config={"patch_size": 16})
    with torch.device("meta"):
        towers = build_towers(CLIPModel(config).state_dict(), config, lambda act: torch.sigmoid)
    mean_std = (0.5, 0.5, 0.5)
    return Backbone(
        name="ViT-B/16",
        vision=towers["vision"],
        text=towers["text"],
        logit_scale=100.0,
        tokenizer=None,
        context_length=config.text_config.max_position_embeddings,
        preprocess=Preprocess(size=224, resize=224, mean=mean_std, std=mean_std),
        fingerprint="",
    )


def _load_parts(source: str, shown: str) -> tuple[Any, Any, Any]:
    _check_source(source, shown)
    with _quiet_transformers():
        from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, CLIPModel

        try:
            config = AutoConfig.from_pretrained(source)
            if config.model_type != "clip":
                raise PerlclipError(f"backbone {shown!r} is a {config.model_type!r} model; perlclip needs a 'clip' one")
            # float32 whatever the file holds, so that the fingerprint does not depend on the dtype asked for.
            model, info = CLIPModel.from_pretrained(
                source, config=config, dtype=torch.float32, output_loading_info=True
            )
            parts = model, AutoTokenizer.from_pretrained(source), AutoImageProcessor.from_pretrained(source)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise PerlclipError(f"cannot load backbone {shown!r}: {first_line(error).rstrip('.')}") from error
        except Exception as error:  # safetensors raises its own class on a damaged file
            if type(error).__name__ != "SafetensorError":
                raise
            raise PerlclipError(f"cannot load backbone {shown!r}: damaged weights file ({error})") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise PerlclipError(f"backbone {shown!r} lacks {len(missing)} weights, the first being {missing[0]!r}")
    return parts


def _check_source(source: str, shown: str) -> None:
    folder = Path(source)
    looks_local = folder.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise PerlclipError(f"backbone folder {shown} has no config.json; expected a Hugging Face CLIP folder")
    elif looks_local:
        raise PerlclipError(
            f"no backbone {shown!r}: give a hub name such as 'openai/clip-vit-base-patch16', "
            "a Hugging Face folder, or 'tiny'"
        )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No loading bars and no advice on stderr; what matters is checked and raised by us."""
    from transformers.utils import logging as hf_logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.CRITICAL)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def _device(device: str | torch.device) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        if torch.empty(0, device=device).is_meta:
            raise RuntimeError("it computes nothing")
    except (RuntimeError, AssertionError) as error:
        raise PerlclipError(f"device {str(device)!r} is not available here: {str(error).splitlines()[0]}") from error
    return torch.device(device)


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    return DTYPES[dtype]


def _preprocess(processor: Any, image_size: int) -> Preprocess:
    size = processor.size
    shortest = size.get("shortest_edge") or size.get("height") or image_size
    crop = processor.crop_size["height"] if processor.do_center_crop else shortest
    if crop != image_size:
        raise PerlclipError(f"preprocessor crops to {crop} pixels but the image tower takes {image_size}")
    return Preprocess(
        size=crop,
        resize=shortest,
        mean=tuple(processor.image_mean),
        std=tuple(processor.image_std),
    )


_SHAPING = ("hidden_act", "layer_norm_eps", "num_attention_heads")


def _fingerprint(state: Mapping[str, Tensor], config: Any) -> str:
    """SHA-256 over the float32 weights and the settings that change what they compute."""
    digest = hashlib.sha256()
    settings = {
        side: [getattr(getattr(config, f"{side}_config"), key) for key in _SHAPING] for side in ("text", "vision")
    }
    digest.update(json.dumps(settings, sort_keys=True).encode())
    for key in sorted(state):
        if not key.endswith("position_ids"):
            digest.update(f"{key}{tuple(state[key].shape)}".encode())
            digest.update(state[key].float().contiguous().numpy().data)
    return digest.hexdigest()
