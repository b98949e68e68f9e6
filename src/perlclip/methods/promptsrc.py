"""PromptSRC: independent deep prompts in both towers, regulated by the frozen CLIP (Khattak et al., ICCV 2023).

    L = CE(z, y) + 25 mean |T - T0| + 10 mean |v - v0| + KL(softmax z0 ‖ softmax z) / (B C)       `PromptSRC.loss`

v0 is the frozen image embedding of the same view, T0 the mean over sixty templates of the frozen text features (before
they are brought to unit length), z0 = tau v0 T0ᵀ. The means run over all entries, and the divergence is divided by the
number of classes, too: as the released code has it. The text prompts start as "a photo of a", all others as N(0, 0.02).

The third part of the method averages the prompts over the epochs with Gaussian weights; that is a setting of the
recipe (`Recipe.average`). The released code averages the frozen weights along with them, which changes nothing but
rounding; here only the prompts are averaged. The sixty templates are encoded when training begins, never to evaluate.
"""

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perlclip.backbone import Backbone, cls_rows
from perlclip.methods.base import ClassState, Config, Method, full_precision, register
from perlclip.methods.coop import PHRASE, PromptState, learned_words
from perlclip.methods.maple import prompt_state, prompted_image, prompted_text, require_depth
from perlclip.text.classes import Classes
from perlclip.text.templates import DEFAULT_TEMPLATE, IMAGENET_60, check_template


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


@dataclass(kw_only=True)
class TaughtState(PromptState):
    """The sentences, and the teacher's class embeddings once training has asked for them."""

    t0_CE: Tensor | None = None


@register("promptsrc", summary="deep prompts", where="blocks 1–9 of both towers", venue="ICCV 2023")
class PromptSRC(Method):
    """A frozen CLIP with self-regulated deep prompts in both towers."""

    config_class = PromptSRCConfig
    config: PromptSRCConfig

    def __init__(self, backbone: Backbone, config: PromptSRCConfig) -> None:
        super().__init__(backbone, config)
        require_depth(self.name, backbone, config.depth)
        n, text, vision = config.tokens, backbone.text.width, backbone.vision.width
        self.text = nn.ParameterList(
            [
                learned_words(backbone, n, PHRASE if n <= 4 else ""),
                *(torch.randn(n, text) * 0.02 for _ in range(config.depth - 1)),
            ]
        )
        self.vision = nn.ParameterList(torch.randn(n, vision) * 0.02 for _ in range(config.depth))

    def prepare(self, classes: Classes) -> TaughtState:
        """The sentences as rows of the text tower."""
        state = prompt_state(self.backbone, classes, self.config.template, self.config.tokens)
        return TaughtState(classes=classes, text=state.text)

    def encode_text(self, state: ClassState) -> Tensor:
        """Prompted class embeddings, (C, E)."""
        assert isinstance(state, TaughtState)
        return self.backbone.text.project(prompted_text(state, list(self.text)))

    def encode_image(self, pixels: Tensor) -> Tensor:
        """Prompted image embeddings, (B, E)."""
        return self._prompted(self.image_rows(pixels))

    def loss(self, pixels: Tensor, labels: Tensor, state: ClassState) -> Tensor:
        """Cross-entropy and the three pulls towards the frozen CLIP."""
        assert isinstance(state, TaughtState)
        vision, config = self.backbone.vision, self.config
        x_BND = self.image_rows(pixels)
        with torch.no_grad():
            v0_BE = vision.project(vision.pool(x_BND, cls_rows(x_BND)))
            if state.t0_CE is None:
                state.t0_CE = self.teacher(state.classes)
        v_BE, t_CE = self._prompted(x_BND), self.encode_text(state)
        z_BC, z0_BC = self.similarity(v_BE, t_CE), self.similarity(v0_BE, state.t0_CE)
        apart = F.kl_div(z_BC.log_softmax(-1), z0_BC.log_softmax(-1), reduction="none", log_target=True).mean()
        return (
            F.cross_entropy(z_BC, labels)
            + config.text_weight * F.l1_loss(t_CE, state.t0_CE)
            + config.image_weight * F.l1_loss(v_BE, v0_BE)
            + apart
        )

    def teacher(self, classes: Classes) -> Tensor:
        """T0: text features averaged over the templates, then brought to unit length."""
        with torch.inference_mode(False), torch.no_grad(), full_precision(self.backbone.device):
            features = [self.backbone.text_features(classes.prompts(template)) for template in self.config.templates]
            return F.normalize(torch.stack(features).mean(0), dim=-1)

    def _prompted(self, x_BND: Tensor) -> Tensor:
        vision = self.backbone.vision
        return vision.project(prompted_image(vision, x_BND, list(self.vision)))
