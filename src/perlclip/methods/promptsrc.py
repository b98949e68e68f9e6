"""PromptSRC: independent deep prompts in both towers, regulated by the frozen CLIP (Khattak et al., ICCV 2023).

    L = CE(z, y) + 25 mean |T - T0| + 10 mean |v - v0| + KL(softmax z0 ‖ softmax z) / (B C)       `PromptSRC.loss`

v0 is the frozen image embedding of the same view, T0 the mean over sixty templates of the frozen text features (before
they are brought to unit length), z0 = tau v0 T0ᵀ. The means run over all entries, and the divergence is divided by the
number of classes, too: as the released code has it. The text prompts start as "a photo of a", all others as N(0, 0.02).

The third part of the method averages the prompts over the epochs with Gaussian weights; that is a setting of the
recipe (`Recipe.average`). The released code averages the frozen weights along with them, which changes nothing but
rounding; here only the prompts are averaged. The sixty templates are encoded when training begins, never to evaluate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perlclip.backbone import Backbone, Images
from perlclip.methods.base import ClassState, Method
from perlclip.methods.parts import (
    PHRASE,
    WORDS,
    ReferenceState,
    learned_words,
    prompted_image,
    prompted_text,
    require_depth,
    sentences_with_room,
)
from perlclip.methods.recipe import DASSL_SGD, Rule, with_fast
from perlclip.methods.registry import register
from perlclip.methods.settings import Config
from perlclip.text.classes import Classes
from perlclip.text.templates import DEFAULT_TEMPLATE, IMAGENET_60, check_template

_SGD = replace(DASSL_SGD, lr=0.0025, epochs=20, batch_size=4)
RECIPES = with_fast(
    replace(_SGD, average=(15, 1)),
    cross=replace(_SGD, average=(6, 10)),
    few_shot=replace(_SGD, epochs=50, average=(30, 30)),
)
RULES = (
    Rule(recipes=("original-cross",), settings={"depth": 3}),
    *(
        Rule(recipes=("original-few-shot",), dataset=dataset, changes={"average": (45, 5)})
        for dataset in ("stanford_cars", "oxford_flowers", "fgvc_aircraft", "dtd", "eurosat")
    ),
)


@dataclass(frozen=True, kw_only=True)
class PromptSRCConfig(Config):
    """PromptSRC's settings, with the authors' base-to-novel values."""

    tokens: int = 4  # prompts in each block of each tower
    depth: int = 9  # J, blocks that get prompts of their own
    text_weight: float = 25.0  # of |T - T0|
    image_weight: float = 10.0  # of |v - v0|
    template: str = DEFAULT_TEMPLATE  # the sentence; "" is the data set's
    templates: tuple[str, ...] = IMAGENET_60  # the teacher's

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(tokens=(1, inf), depth=(1, inf), text_weight=(0.0, inf), image_weight=(0.0, inf))
        for template in self.templates:
            check_template(template)


@register(
    "promptsrc",
    summary="deep prompts",
    where="blocks 1–9 of both towers",
    venue="ICCV 2023",
    recipes=RECIPES,
    rules=RULES,
)
class PromptSRC(Method):
    """A frozen CLIP with self-regulated deep prompts in both towers."""

    config_class = PromptSRCConfig
    config: PromptSRCConfig

    def __init__(self, backbone: Backbone, config: PromptSRCConfig) -> None:
        super().__init__(backbone, config)
        require_depth(self, config.depth)
        n, text, vision = config.tokens, backbone.text.width, backbone.vision.width
        self.text = nn.ParameterList(
            [
                learned_words(backbone, n, PHRASE if n <= WORDS else ""),
                *(torch.randn(n, text) * 0.02 for _ in range(config.depth - 1)),
            ]
        )
        self.vision = nn.ParameterList(torch.randn(n, vision) * 0.02 for _ in range(config.depth))

    def prepare(self, classes: Classes) -> ReferenceState:
        """The sentences as rows of the text tower, and the teacher's class embeddings."""
        text = sentences_with_room(self.backbone, classes, self.config.template, self.config.tokens)
        reference = partial(teacher, self.backbone, classes, self.config.templates)
        return ReferenceState(classes=classes, text=text, reference=reference)

    def encode_text(self, state: ClassState) -> Tensor:
        """Prompted class embeddings, (C, E)."""
        assert isinstance(state, ReferenceState)
        return self.backbone.text.project(prompted_text(state.text, list(self.text)))

    def encode_image(self, images: Images) -> Tensor:
        """Prompted image embeddings, (B, E)."""
        vision = self.backbone.vision
        return vision.project(prompted_image(vision, self.frozen(images).rows(), list(self.vision)))

    def loss(self, images: Images, labels: Tensor, state: ClassState) -> Tensor:
        """Cross-entropy and the three pulls towards the frozen CLIP."""
        assert isinstance(state, ReferenceState)
        config, images = self.config, self.frozen(images)
        with torch.no_grad():
            v0_BE = self.backbone.encode_image(images)
        v_BE, t_CE = self.encode_image(images), self.class_embeddings(state)
        z_BC, z0_BC = self.similarity(v_BE, t_CE), self.similarity(v0_BE, state.t0_CE)
        apart = F.kl_div(z_BC.log_softmax(-1), z0_BC.log_softmax(-1), reduction="none", log_target=True).mean()
        return (
            F.cross_entropy(z_BC, labels)
            + config.text_weight * F.l1_loss(t_CE, state.t0_CE)
            + config.image_weight * F.l1_loss(v_BE, v0_BE)
            + apart
        )


def teacher(backbone: Backbone, classes: Classes, templates: Sequence[str]) -> Tensor:
    """T0: text features averaged over the templates, then brought to unit length."""
    features = [backbone.text_features(classes.prompts(template)) for template in templates]
    return F.normalize(torch.stack(features).mean(0), dim=-1)
