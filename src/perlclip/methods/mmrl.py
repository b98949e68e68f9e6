"""MMRL: tokens of a shared representation space in the upper blocks of both towers (Guo and Gu, CVPR 2025).

    R_i^m  = R W_i^m + b_i^m                     K rows for block i of tower m, from one learned space R
    rows   behind CLS / SOS from block 6 on; before each later block they are replaced by the next R_i
    f_c    = pi(CLS),   f_r = unit(mean over the K rows of LN(row) P_r),   P_r learned             `MMRL._image`
    z      = alpha z_c + (1 - alpha) z_r for classes that were trained on, z_c for novel ones      `MMRL.logits`
    L      = alpha CE(z_c) + (1 - alpha) CE(z_r) + lambda [1 - cos(f_c, f0)] + lambda [1 - cos(t, t0)]

Which logits are right depends on whether the classes are novel; that is an argument here (`class_state(novel=True)`),
where the released code looks at the task's and the data set's name. f0 and t0 are the frozen CLIP's, of the same view
and the same template. lambda was chosen for each data set by the authors (`recipes.py`); the default is ImageNet's.
Their EuroSAT run has a space of 2,048 dimensions and 18.8 M parameters: so has our `original` recipe there, all else
has 512. P_r starts at random, the aligners of a tower as copies of one layer.

Not repeated: blocks 1-5 are frozen, so they run once for student and teacher, for the classes once per class list. In
the text tower the tokens stand before the words, so they are the same for all classes.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perlclip.backbone import Backbone, SharedText, cls_rows
from perlclip.backbone.tower import Tower
from perlclip.errors import PerlclipError
from perlclip.methods.base import ClassState, Config, Method, cosine_distance, register
from perlclip.methods.kgcoop import ReferenceState
from perlclip.text.classes import Classes


@dataclass(frozen=True, kw_only=True)
class MMRLConfig(Config):
    """MMRL's settings, with the authors' values."""

    tokens: int = 5  # K
    dim: int = 512  # width of the space R
    start: int = 5  # first block, from 0, that sees the tokens
    alpha: float = 0.7  # share of the class branch
    weight: float = 0.5  # lambda

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(tokens=(1, inf), dim=(1, inf), start=(0, inf), alpha=(0.0, 1.0), weight=(0.0, inf))


@register(
    "mmrl",
    summary="representation space, aligners, head",
    where="tokens in blocks 6–12 of both towers",
    venue="CVPR 2025",
)
class MMRL(Method):
    """A frozen CLIP with representation tokens in its upper blocks."""

    config_class = MMRLConfig
    config: MMRLConfig

    def __init__(self, backbone: Backbone, config: MMRLConfig) -> None:
        super().__init__(backbone, config)
        shallowest = min(backbone.vision.depth, backbone.text.depth)
        if config.start >= shallowest:
            raise PerlclipError(f"{self.name}: start must be below the tower's {shallowest} blocks, got {config.start}")
        self.space = nn.Parameter(torch.randn(config.tokens, config.dim) * 0.02)
        self.build()

    def build(self) -> None:
        """The aligners and the head of the representation branch."""
        vision, text = self.backbone.vision, self.backbone.text
        self.vision_aligners, self.text_aligners = (self._aligners(tower) for tower in (vision, text))
        self.rep_head = nn.Parameter(torch.randn(vision.width, self.backbone.embed_dim) * vision.width**-0.5)

    def _aligners(self, tower: Tower) -> nn.ModuleList:
        copied = nn.Linear(self.config.dim, tower.width)
        return nn.ModuleList(deepcopy(copied) for _ in range(self.config.start, tower.depth))

    def aligned(self, side: str) -> list[Tensor]:
        """R_i, (K, D) for each block from the first on."""
        return [align(self.space) for align in getattr(self, f"{side}_aligners")]

    def head(self) -> Tensor:
        """P_r, (D, E)."""
        return self.rep_head

    def prepare(self, classes: Classes) -> ReferenceState:
        """The prompts after the frozen blocks, and the frozen CLIP's class embeddings."""
        text, start = self.backbone.text, self.config.start
        rows = self.backbone.shared_text(classes.prompts()).run(0, start)
        return ReferenceState(classes=classes, text=rows, frozen=lambda: text.project(rows.pool(start)))

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

    def encode_image(self, pixels: Tensor) -> Tensor:
        """f_c, the class branch, (B, E)."""
        return self.branches(self.frozen_rows(pixels))[0]

    def logits(self, pixels: Tensor, state: ClassState) -> Tensor:
        """Both branches for classes that were trained on, the class branch alone for novel ones."""
        c_BE, r_BE = self.branches(self.frozen_rows(pixels))
        t_CE, alpha = self.class_embeddings(state), self.config.alpha
        z_BC = self.similarity(c_BE, t_CE)
        return z_BC if state.novel else alpha * z_BC + (1 - alpha) * self.similarity(r_BE, t_CE)

    def loss(self, pixels: Tensor, labels: Tensor, state: ClassState) -> Tensor:
        """Cross-entropy of each branch, and both towers' pulls towards the frozen CLIP."""
        assert isinstance(state, ReferenceState)
        vision, alpha = self.backbone.vision, self.config.alpha
        x_BND = self.frozen_rows(pixels)
        with torch.no_grad():
            v0_BE = vision.project(vision.pool(x_BND, cls_rows(x_BND), self.config.start))
        (c_BE, r_BE), t_CE = self.branches(x_BND), self.encode_text(state)
        classification = alpha * self.classify(c_BE, t_CE, labels) + (1 - alpha) * self.classify(r_BE, t_CE, labels)
        pulls = cosine_distance(c_BE, v0_BE) + cosine_distance(t_CE, state.t0_CE)
        return classification + self.config.weight * pulls

    def frozen_rows(self, pixels: Tensor) -> Tensor:
        """The image before the first block that sees tokens; student and teacher go on from here."""
        return self.image_rows(pixels, self.config.start)

    def branches(self, x_BND: Tensor) -> tuple[Tensor, Tensor]:
        """f_c and f_r, (B, E) each."""
        vision = self.backbone.vision
        h_BRD = self.read_image(x_BND, self.aligned("vision"))
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

    def carry(self, next_KD: Tensor, last_BKD: Tensor) -> Tensor:
        """The tokens of the next block: the last block's output is dropped."""
        return next_KD.expand_as(last_BKD)
