"""The frozen backbone: two towers, a tokenizer, a preprocessing, and what they do together."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from perlclip.backbone.accel.cuda_graphs import Beside
from perlclip.backbone.frozen import FrozenImages, Images
from perlclip.backbone.preprocess import Preprocess
from perlclip.backbone.shared_text import SharedText
from perlclip.backbone.tokens import Tokens
from perlclip.backbone.tower import Tower
from perlclip.errors import PerlclipError


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

    def __copy__(self) -> "Backbone":
        """Frozen, so that a copy of it is itself."""
        return self

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

    def to(self, device: str | torch.device) -> "Backbone":
        """The same backbone on another device; this one stays where it is, with those who share it."""
        device = torch.device(device)
        if device.type == self.device.type and device.index in (None, self.device.index):
            return self
        # Deep copies: `Module.to` moves in place.
        vision, text = (deepcopy(tower).place(device, self.dtype) for tower in (self.vision, self.text))
        return replace(self, vision=vision, text=text)

    def frozen(self, images: Images) -> FrozenImages:
        """What the frozen image tower makes of pixels, or of images that it has looked at before."""
        return images if isinstance(images, FrozenImages) else FrozenImages(self.vision, images)

    def beside(self) -> Beside:
        """A context for work that nothing waits for until `join`: on CUDA it may run at the same time as the rest."""
        return Beside(self.device)

    def tokenize(self, prompts: Sequence[str], free: int = 0) -> Tokens:
        """Prompts to ids; the EOS position is the first EOS id (CLIP's own padding is EOS, too).

        `free` positions are left between SOS and the text, for rows that a method puts there.
        """
        # What is too long is said below: `verbose` would warn of it before.
        encoded = self.tokenizer(list(prompts), padding=False, truncation=False, verbose=False)
        rows: list[list[int]] = encoded["input_ids"]
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

    def encode_image(self, images: Images) -> Tensor:
        """The frozen CLIP's unit image embeddings, (B, E)."""
        return self.vision.project(self.frozen(images).pooled())
