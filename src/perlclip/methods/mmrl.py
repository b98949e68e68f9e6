"""MMRL: tokens of a shared representation space in the upper blocks of both towers (Guo and Gu, CVPR 2025).

    R_i^m  = R W_i^m + b_i^m                     K rows for block i of tower m, from one learned space R
    rows   behind CLS / SOS from block 6 on; before each later block they are replaced by the next R_i     `MMRL.carry`
    P_r    learned                               the head of the representation branch                      `MMRL.head`

Branches, logits and loss are those of `representation.py`. lambda was chosen for each data set by the authors; the
default is ImageNet's. Their EuroSAT run has a space of 2,048 dimensions and 18.8 M parameters: so has our `original`
recipe there, all else has 512. P_r starts at random, the aligners of a tower as copies of one layer.
"""

from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from perlclip.backbone import Tower
from perlclip.methods.recipe import TRAINED_ON, Rule, with_fast
from perlclip.methods.registry import register
from perlclip.methods.representation import ADAMW, RepresentationTokens, TokensConfig

RECIPES = with_fast(
    ADAMW,
    cross=replace(ADAMW, epochs=1, batch_size=32, warmup_epochs=0),
    few_shot=replace(ADAMW, epochs=50, batch_size=32),
)
_WEIGHTS = {
    "imagenet": 0.5, "caltech101": 0.5, "oxford_pets": 0.2, "stanford_cars": 7.0, "oxford_flowers": 4.0,
    "food101": 5.0, "fgvc_aircraft": 6.0, "sun397": 6.0, "dtd": 6.0, "eurosat": 0.01, "ucf101": 3.0,
}  # fmt: skip
RULES = (
    Rule(recipes=("original-cross",), settings={"weight": 0.2}),
    *(Rule(recipes=TRAINED_ON, dataset=name, settings={"weight": weight}) for name, weight in _WEIGHTS.items()),
    Rule(recipes=("original", "original-few-shot"), dataset="eurosat", settings={"dim": 2048}),
    Rule(recipes=("original",), dataset="imagenet", changes={"epochs": 5, "batch_size": 32}),
    Rule(recipes=("original-few-shot",), dataset="imagenet", changes={"lr": 1e-3, "epochs": 5}),
)


@register(
    "mmrl",
    summary="representation space, aligners, head",
    where="tokens in blocks 6–12 of both towers",
    venue="CVPR 2025",
    recipes=RECIPES,
    rules=RULES,
)
class MMRL(RepresentationTokens):
    """A frozen CLIP with representation tokens in its upper blocks, a linear map for each of them."""

    config_class = TokensConfig

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

    def carry(self, next_KD: Tensor, last_BKD: Tensor) -> Tensor:
        """The tokens of the next block: the last block's output is dropped."""
        return next_KD.expand_as(last_BKD)
