"""Tokens of a shared representation space in the upper blocks of both towers: what MMRL and MMRL++ have in common.

    rows   R_i^m behind CLS / SOS from block `start` on; before each later block they are carried on
    f_c    = pi(CLS),   f_r = unit(mean over the K rows of LN(row) P_r)                  `RepresentationTokens.branches`
    z      = alpha z_c + (1 - alpha) z_r for classes that were trained on, z_c for novel ones
    L      = alpha CE(z_c) + (1 - alpha) CE(z_r) + lambda [1 - cos(f_c, f0)] + lambda [1 - cos(t, t0)]

Which logits are right depends on whether the classes are novel; that is an argument here (`class_state(novel=True)`),
where the released code looks at the task's and the data set's name. f0 and t0 are the frozen CLIP's, of the same view
and the same template.

Not repeated: the blocks below `start` are frozen, so they run once for student and teacher, for the classes once per
class list. In the text tower the tokens stand before the words, so they are the same for all classes.

Shapes: B images, C classes, K tokens, N rows, D tower width, E shared width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perlclip.backbone import Backbone, Images, SharedText
from perlclip.errors import PerlclipError
from perlclip.methods.base import ClassState, Method, cosine_distance
from perlclip.methods.parts import ReferenceState, require_start
from perlclip.methods.recipe import DASSL
from perlclip.methods.settings import Config
from perlclip.text.classes import Classes

ADAMW = replace(DASSL, lr=1e-3, epochs=10, crop_scale=(0.5, 1.0))  # the authors' for both methods


@dataclass(frozen=True, kw_only=True)
class TokensConfig(Config):
    """Settings of both methods, with the authors' values."""

    tokens: int = 5  # K
    dim: int = 512  # width of the space R
    start: int = 5  # first block, from 0, that sees the tokens
    alpha: float = 0.7  # share of the class branch
    weight: float = 0.5  # lambda

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(tokens=(1, inf), dim=(1, inf), start=(0, inf), alpha=(0.0, 1.0), weight=(0.0, inf))


class RepresentationTokens(Method):
    """A frozen CLIP with representation tokens in its upper blocks."""

    config: TokensConfig

    def __init__(self, backbone: Backbone, config: TokensConfig) -> None:
        super().__init__(backbone, config)
        require_start(self, "start", config.start, backbone.vision, backbone.text)
        if not backbone.vision.starts:
            raise PerlclipError(
                f"{self.name} reads its tokens beside the class token, by the norm and projection behind that; the "
                f"image tower of a {backbone.family!r} backbone has neither, but a pooling head"
            )
        self.space = nn.Parameter(torch.randn(config.tokens, config.dim) * 0.02)
        self.build()

    def build(self) -> None:
        """The aligners and the head of the representation branch."""
        raise NotImplementedError

    def aligned(self, side: str) -> list[Tensor]:
        """R_i, (K, D) for each block from the first on."""
        raise NotImplementedError

    def head(self) -> Tensor:
        """P_r, (D, E)."""
        raise NotImplementedError

    def carry(self, next_KD: Tensor, last_BKD: Tensor) -> Tensor:
        """The tokens of the next block, from its own and the last block's output at theirs."""
        raise NotImplementedError

    def prepare(self, classes: Classes) -> ReferenceState:
        """The prompts after the frozen blocks, and the frozen CLIP's class embeddings."""
        text, start = self.backbone.text, self.config.start
        rows = self.backbone.shared_text(classes.prompts()).run(0, start)
        return ReferenceState(classes=classes, text=rows, reference=lambda: text.project(rows.pool(start)))

    def encode_text(self, state: ClassState) -> Tensor:
        """Class embeddings with representation tokens, (C, E)."""
        assert isinstance(state, ReferenceState)
        start, tokens = self.config.start, self.aligned("text")

        def before(i: int, text: SharedText) -> SharedText:
            if i == start:
                return text.insert(tokens[0])
            last_1KD = text.prefix_1PD[:, 1 : 1 + self.config.tokens]
            return text.put(self.carry(tokens[i - start], last_1KD))

        return self.backbone.text.project(state.text.pool(start, before))

    def encode_image(self, images: Images) -> Tensor:
        """f_c, the class branch, (B, E)."""
        return self.branches(images)[0]

    def logits(self, images: Images, state: ClassState) -> Tensor:
        """Both branches for classes that were trained on, the class branch alone for novel ones."""
        c_BE, r_BE = self.branches(images)
        t_CE, alpha = self.class_embeddings(state), self.config.alpha
        z_BC = self.similarity(c_BE, t_CE)
        return z_BC if state.novel else alpha * z_BC + (1 - alpha) * self.similarity(r_BE, t_CE)

    def loss(self, images: Images, labels: Tensor, state: ClassState) -> Tensor:
        """Cross-entropy of each branch, and both towers' pulls towards the frozen CLIP."""
        assert isinstance(state, ReferenceState)
        images, alpha = self.frozen(images), self.config.alpha
        (c_BE, r_BE), t_CE = self.branches(images), self.class_embeddings(state)
        with torch.no_grad():
            v0_BE = self.backbone.encode_image(images)  # goes on from the rows that the branches started from
        classification = alpha * self.classify(c_BE, t_CE, labels) + (1 - alpha) * self.classify(r_BE, t_CE, labels)
        pulls = cosine_distance(c_BE, v0_BE) + cosine_distance(t_CE, state.t0_CE)
        return classification + self.config.weight * pulls

    def branches(self, images: Images) -> tuple[Tensor, Tensor]:
        """f_c and f_r, (B, E) each."""
        vision = self.backbone.vision
        h_BRD = self.read_image(self.frozen(images).rows(self.config.start), self.aligned("vision"))
        with torch.autocast(h_BRD.device.type, enabled=False):
            r_BD = vision.norm(h_BRD[:, 1:]).float().mean(1)
            return vision.project(h_BRD[:, 0]), F.normalize(r_BD @ self.head(), dim=-1)

    def read_image(self, x_BND: Tensor, tokens: Sequence[Tensor]) -> Tensor:
        """CLS and the K tokens after the last block, (B, 1 + K, D). The order of rows does not matter to attention."""
        vision, K = self.backbone.vision, self.config.tokens
        rows_BKD = tokens[0].expand(len(x_BND), -1, -1)
        for i, next_KD in enumerate(tokens[1:], start=self.config.start):
            out_BMD = vision.block(i, torch.cat([rows_BKD.to(x_BND.dtype), x_BND], 1))
            rows_BKD, x_BND = self.carry(next_KD, out_BMD[:, :K]), out_BMD[:, K:]
        order_R = torch.arange(K + 1, device=x_BND.device).roll(1)  # K, 0, …: CLS stands behind the tokens here
        joined_BMD = torch.cat([rows_BKD.to(x_BND.dtype), x_BND], 1)
        return vision.read(joined_BMD, order_R.expand(len(x_BND), -1))
