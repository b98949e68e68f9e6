"""ProVP: visual prompts that carry over from block to block (Xu et al., Progressive Visual Prompt, IJCV 2024).

    Z_1 = P_1                                        m rows between CLS and the patches
    Z_l = alpha O_(l-1) + (1 - alpha) P_l            O: the last block's output at those rows    `ProVP._prompted`
    L   = CE + lambda L_ref,   L_ref = CE over the batch of S_ij = <v_i, v0_j>, target j = i     `ProVP.loss`

v is the prompted, v0 the frozen embedding of the same view; S has no temperature, and images of the same class count
as negatives. With alpha = 0 this is VPT-deep, with alpha = 1 VPT-shallow. alpha = 0.01 is the released code's value
(0.1 is often quoted from the paper); lambda = 1 is its value for every data set, `weight=0` is "ProVP" without "Ref".
The prompts get neither position embedding nor the first norm. They start uniform in ±sqrt(6 / (3 g² + D)), where g is
the number of patches on a side: the released code's bound, which has the grid's side where VPT has the patch's.

The text is frozen: the data set's template, or the sentence that the authors have for it; of a model trained on
ImageNet, that of the set it is tested on. The authors' code picks the epoch by test accuracy; here it is the last. Its
settings for ImageNet are a guess: those of a file `vit_b16_img`, which no script of the repository uses, with a rate of
5 where all others have 0.1.
"""

from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perlclip.backbone import Backbone, Images, cls_rows
from perlclip.methods.base import ClassState, Method
from perlclip.methods.parts import FrozenTextState, target_sentence
from perlclip.methods.recipe import DASSL_SGD, TRAINED_ON, Rule, with_fast
from perlclip.methods.registry import register
from perlclip.methods.settings import Config, later
from perlclip.text.classes import Classes

RECIPES = with_fast(
    replace(DASSL_SGD, lr=0.1, epochs=100, weight_decay=1e-3),  # vit_b16_b2n_ep100
    few_shot=replace(DASSL_SGD, lr=0.1, epochs=200),  # vit_b16_ref, of 8 and 16 shots
)
_TEMPLATES = {
    "oxford_pets": "a type of pet, a photo of a {}.",
    "oxford_flowers": "a type of flower, a photo of a {}.",
    "fgvc_aircraft": "a type of aircraft, a photo of a {}.",
    "food101": "a type of food, a photo of {}.",
    "dtd": "a texture of {}.",
}
RULES = (
    Rule(recipes=("original-few-shot",), settings={"tokens": 50}),
    # vit_b16_ep100 and vit_b16_ep50: without the feature re-formation, which the files `ref` beside them have.
    Rule(recipes=("original-few-shot",), shots=(2, 7), changes={"epochs": 100}, settings={"weight": 0.0}),
    Rule(recipes=("original-few-shot",), shots=(1, 1), changes={"epochs": 50}, settings={"weight": 0.0}),
    Rule(recipes=("original",), dataset="imagenet", changes={"lr": 5.0, "weight_decay": 5e-3}),
    Rule(dataset="imagenet", settings={"by_target": True}),
    *(Rule(recipes=TRAINED_ON, dataset=name, settings={"template": text}) for name, text in _TEMPLATES.items()),
)


@dataclass(frozen=True, kw_only=True)
class ProVPConfig(Config):
    """ProVP-Ref's settings, with the released code's base-to-novel values."""

    adjustable: ClassVar[frozenset[str]] = frozenset({"weight"})

    tokens: int = 16  # m, prompts in each block
    alpha: float = 0.01  # share of the last block's output
    weight: float = 1.0  # lambda, of the feature re-formation
    template: str = ""  # of the frozen text; "" is the data set's
    by_target: bool = later(False)  # of one of CoOp's fifteen, the authors' sentence for the set that is tested

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(tokens=(1, inf), alpha=(0.0, 1.0), weight=(0.0, inf))


@register(
    "provp",
    summary="m prompts a block",
    where="every block of the vision tower",
    venue="IJCV 2024",
    recipes=RECIPES,
    rules=RULES,
)
class ProVP(Method):
    """A frozen CLIP with progressive visual prompts."""

    config_class = ProVPConfig
    config: ProVPConfig

    def __init__(self, backbone: Backbone, config: ProVPConfig) -> None:
        super().__init__(backbone, config)
        vision = backbone.vision
        bound = (6 / (3 * vision.patches + vision.width)) ** 0.5
        self.prompts = nn.Parameter(torch.empty(vision.depth, config.tokens, vision.width).uniform_(-bound, bound))

    def prepare(self, classes: Classes) -> FrozenTextState:
        """The frozen text, encoded once."""
        template = target_sentence(classes, self.config.template, _TEMPLATES, self.config.by_target)
        return FrozenTextState(classes=classes, t_CE=self.backbone.encode_text(classes.prompts(template)))

    def encode_text(self, state: ClassState) -> Tensor:
        """The frozen CLIP's class embeddings."""
        assert isinstance(state, FrozenTextState)
        return state.t_CE

    def encode_image(self, images: Images) -> Tensor:
        """The prompted image embedding, (B, E)."""
        return self._prompted(self.frozen(images).rows())

    def loss(self, images: Images, labels: Tensor, state: ClassState) -> Tensor:
        """Cross-entropy plus contrastive feature re-formation."""
        images = self.frozen(images)
        v_BE = self._prompted(images.rows())
        classification = self.classify(v_BE, self.class_embeddings(state), labels)
        if not self.config.weight:
            return classification
        with torch.no_grad():
            v0_BE = self.backbone.encode_image(images)
        own_B = torch.arange(len(labels), device=labels.device)
        return classification + self.config.weight * F.cross_entropy(v_BE @ v0_BE.T, own_B)

    def _prompted(self, x_BND: Tensor) -> Tensor:
        vision, m, alpha = self.backbone.vision, self.config.tokens, self.config.alpha
        # Attention does not care for the order of rows: the prompts stand first, as `Z ‖ x`.
        z_BmD = self.prompts[0].expand(len(x_BND), -1, -1)
        for i in range(vision.depth):
            if i:
                z_BmD = alpha * x_BND[:, :m] + (1 - alpha) * self.prompts[i]
                x_BND = x_BND[:, m:]
            x_BND = torch.cat([z_BmD.to(x_BND.dtype), x_BND], 1)
            x_BND = vision.block(i, x_BND) if i < vision.depth - 1 else x_BND
        return vision.project(vision.read(x_BND, cls_rows(x_BND) + m))
