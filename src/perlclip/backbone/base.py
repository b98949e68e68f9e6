"""The frozen backbone: two towers, a tokenizer, a preprocessing, and what they do together; and what a family promises.

A family is one file with a `Family`, by whose name, the `model_type` of a config, it is found (`load.FAMILIES`). It
makes two towers of a state dict. A tower promises, whatever its family:

    embed(inputs)            pixels or token ids to rows, (B, N, D); `starts` of them, CLS or SOS, stand first
    block, run               blocks at every row; under a causal mask (`causal`) or not
    pool(x, rows, start)     blocks start..L and the readout: the pooled state h, (B, D)
    features, project        pi: h to the shared space, (B, E); of unit length

What the readout sees is the family's own: the row given (CLS, EOS, or the last one) or, under a pooling head, the
patches alone. Thoughts, and all other rows that a method adds, may stand before the sequence: no readout sees them.
A row's place in attention is nowhere but in the mask and in the position embedding, which added rows do not have.

Where the text tower is causal, texts are cut after the longest EOS, where they are read, and what they begin with alike
is computed once (`SharedText`). Where it is not, every text fills the whole context and is read at its last row.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perlclip.backbone.accel.cuda_graphs import Beside
from perlclip.backbone.accel.eight import FLOAT8, INT8, LARGEST
from perlclip.backbone.frozen import FrozenImages, Images
from perlclip.backbone.lens import Lens, make_lens
from perlclip.backbone.preprocess import Preprocess
from perlclip.backbone.shared_text import SharedText
from perlclip.backbone.text_graphs import TextGraphs
from perlclip.backbone.tokens import Tokens
from perlclip.backbone.tower import ImageEmbedding, State, Tower
from perlclip.errors import PerlclipError

SMALL = 256  # width of towers whose products are not worth a second thread
KEPT = 4  # kinds of text graphs
BICUBIC = {"mode": "bicubic", "align_corners": False}


DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float8": FLOAT8, "int8": INT8,
}  # fmt: skip


def place(vision: Tower, text: Tower, device: torch.device, dtype: torch.dtype) -> None:
    """Move both towers; with a dtype of 8 bits, what it leaves is in bfloat16."""
    form = dtype if dtype in LARGEST else None
    wide = torch.bfloat16 if form else dtype
    vision.place(device, wide, form)
    text.place(device, wide)


def require_format(dtype: torch.dtype, device: torch.device) -> None:
    """Formats of 8 bits are for some devices."""
    if dtype == FLOAT8 and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0)):
        raise PerlclipError("dtype 'float8' needs an NVIDIA card from Hopper on; 'bfloat16' runs on any device")
    if dtype == INT8 and device.type != "cpu":
        raise PerlclipError(f"dtype 'int8' is for the CPU, not {device.type}; 'float8' is for CUDA from Hopper on")


@dataclass(frozen=True, kw_only=True)
class Family:
    """How models of one `model_type` become a backbone."""

    name: str
    model: str  # the class of `transformers` that has their weights
    towers: Callable[[State, Any], dict[str, Tower]]  # of a state dict and its config
    positions: Mapping[str, Any] = field(default_factory=lambda: BICUBIC)  # how they are interpolated for other sizes
    lowers: bool = False  # texts were trained on in small letters
    size: Callable[[Any], int] = lambda config: int(config.vision_config.image_size)
    processor: Callable[[Any, Any], Any] = lambda processor, config: processor  # that makes square images


@dataclass(frozen=True, kw_only=True, eq=False)
class Backbone:
    """A frozen CLIP, or a model like it. Not an `nn.Module`: a method's own parameters are exactly the trained ones.

    `logit_bias` is what a model trained with a sigmoid loss adds to its scaled cosines; softmax does not see it.
    """

    name: str
    vision: Tower
    text: Tower
    logit_scale: float
    tokenizer: Any
    context_length: int
    preprocess: Preprocess
    fingerprint: str
    family: str = "clip"
    logit_bias: float | None = None
    lowers: bool = False  # texts are put in small letters
    image_size: int | None = None  # pixels a side, where it is not the one that the weights are for
    recorded: dict[Hashable, TextGraphs] = field(default_factory=dict, init=False, repr=False)
    lenses: dict[str, Lens | None] = field(default_factory=dict, init=False, repr=False)  # as they are asked for

    def __copy__(self) -> "Backbone":
        """Frozen, so that a copy of it is itself."""
        return self

    def __deepcopy__(self, memo: Any) -> "Backbone":
        """Frozen, so that a copy of a method can share it."""
        return self

    @property
    def device(self) -> torch.device:
        """Where the towers are."""
        return self.projection.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The towers' number format, or that of the image tower's large products where it is one of 8 bits."""
        return self.vision.form or self.projection.weight.dtype

    @property
    def dtype_name(self) -> str:
        """As `load_backbone` takes it."""
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)

    @property
    def embed_dim(self) -> int:
        """E, the width of the shared embedding space."""
        return self.projection.out_features

    @property
    def projection(self) -> nn.Linear:
        """The text tower's map to the shared space, which every family has."""
        head = self.text.head
        assert isinstance(head, nn.Linear)
        return head

    def to(self, device: str | torch.device) -> "Backbone":
        """The same backbone on another device; this one stays where it is, with those who share it."""
        device = torch.device(device)
        if device.type == self.device.type and device.index in (None, self.device.index):
            return self
        # Deep copies: `Module.to` moves in place.
        require_format(self.dtype, device)
        vision, text = deepcopy(self.vision), deepcopy(self.text)
        place(vision, text, device, self.dtype)
        return replace(self, vision=vision, text=text)

    def lens(self, name: str) -> Lens | None:
        """A lens for its pixels; None is `plain`."""
        if name not in self.lenses:
            embed = self.vision.embed
            assert isinstance(embed, ImageEmbedding)
            self.lenses[name] = make_lens(name, self.preprocess, embed.patch.shape[-1], self.device)
        return self.lenses[name]

    def frozen(self, images: Images, lens: str | None = None) -> FrozenImages:
        """What the frozen image tower makes of pixels, or of images that it has looked at before.

        Through a lens, if one is named: what was looked at through another is then looked at again.
        """
        if not isinstance(images, FrozenImages):
            return FrozenImages(self.vision, images, self.lens(lens) if lens else None)
        if lens in (None, images.lens_name):
            return images
        return FrozenImages(self.vision, images.pixels, self.lens(lens))

    @property
    def small(self) -> bool:
        """Whether its products are not worth a second thread on a CPU: two of them are."""
        return self.device.type == "cpu" and max(self.vision.width, self.text.width) <= SMALL

    def beside(self) -> Beside:
        """A context for work that nothing waits for until `join`: on CUDA it may run at the same time as the rest."""
        return Beside(self.device)

    def tokenize(self, prompts: Sequence[str], free: int = 0) -> Tokens:
        """Prompts to ids, and where each is read: its first EOS (CLIP's own padding is EOS, too), or the last row.

        `free` positions are left before the text, behind SOS where there is one, for rows that a method puts there.
        """
        # What is too long is said below: `verbose` would warn of it before.
        words = [prompt.lower() for prompt in prompts] if self.lowers else list(prompts)
        rows: list[list[int]] = self.tokenizer(words, padding=False, truncation=False, verbose=False)["input_ids"]
        first, pad = self.text.starts, [self.tokenizer.pad_token_id]
        rows = [row[:first] + (row[:first] or pad) * free + row[first:] for row in rows]
        for prompt, row in zip(prompts, rows, strict=True):
            if len(row) > self.context_length:
                raise PerlclipError(
                    f"prompt of {len(row)} tokens is longer than the context of {self.context_length}: {prompt!r}"
                )
        if not self.text.causal:
            return self._padded(rows, free)
        eos_id = self.tokenizer.eos_token_id
        eos = [row.index(eos_id) for row in rows]
        longest = max(eos) + 1
        ids = [(row + [eos_id] * longest)[:longest] for row in rows]
        return Tokens(torch.tensor(ids, device=self.device), torch.tensor(eos, device=self.device))

    def _padded(self, rows: Sequence[list[int]], free: int) -> Tokens:
        """The whole context, as the tokenizer pads it: without a causal mask, padding counts."""
        length, pad, left = self.context_length, self.tokenizer.pad_token_id, self.tokenizer.padding_side == "left"
        if left and free:
            raise PerlclipError(
                f"the tokenizer of {self.name!r} pads texts on the left, so that their words do not all begin in "
                "one place: methods that learn words cannot be used with it"
            )
        ids = [[pad] * (length - len(row)) * left + row + [pad] * (length - len(row)) * (not left) for row in rows]
        last_B = torch.full((len(ids),), length - 1, device=self.device)
        return Tokens(torch.tensor(ids, device=self.device), last_B)

    def shared_text(self, prompts: Sequence[str], free: int = 0) -> SharedText:
        """Prompts as rows before the first block of the text tower, what they have in common kept once."""
        tokens = self.tokenize(prompts, free)
        return SharedText.embed(self.text, tokens.ids_BN, tokens.eos_B)

    def text_graphs(self, key: Hashable, encode: Callable[..., Tensor]) -> TextGraphs:
        """`encode` as CUDA graphs, which all who give the same key have in common; those of the first keys go."""
        graphs = self.recorded.setdefault(key, TextGraphs(self.text, encode))
        for old in list(self.recorded)[:-KEPT]:
            self.recorded.pop(old, None)
        return graphs

    def word_rows(self, phrase: str, count: int) -> Tensor:
        """Token embeddings of the phrase's first `count` tokens, without positions: (count, D), float32."""
        if self.tokenizer is None:  # a shape without weights
            return torch.zeros(count, self.text.width)
        phrase = phrase.lower() if self.lowers else phrase
        ids: list[int] = self.tokenizer([phrase], add_special_tokens=False)["input_ids"][0]
        if len(ids) < count:
            raise PerlclipError(f"the phrase {phrase!r} has {len(ids)} tokens; {count} are needed")
        token = self.text.embed.token
        assert isinstance(token, Tensor)
        return token[torch.tensor(ids[:count], device=self.device)].float()

    def text_features(self, prompts: Sequence[str], chunk: int = 1000) -> Tensor:
        """The frozen CLIP's text features, not yet of unit length: (C, E)."""
        chunk = chunk if self.text.causal else max(1, chunk // 4)  # of so many more rows
        parts = [self.shared_text(prompts[i : i + chunk]).pool() for i in range(0, len(prompts), chunk)]
        return self.text.features(torch.cat(parts))

    def encode_text(self, prompts: Sequence[str]) -> Tensor:
        """The frozen CLIP's unit text embeddings, (C, E)."""
        return F.normalize(self.text_features(prompts), dim=-1)

    def encode_image(self, images: Images) -> Tensor:
        """The frozen CLIP's unit image embeddings, (B, E)."""
        return self.vision.project(self.frozen(images).pooled())

    def similarity(self, v_BE: Tensor, t_CE: Tensor, scale: float = 1.0) -> Tensor:
        """tau v tᵀ with CLIP's frozen logit scale, or a share of it, in float32: (B, C)."""
        with torch.autocast(v_BE.device.type, enabled=False):
            return scale * self.logit_scale * v_BE.float() @ t_CE.float().T
