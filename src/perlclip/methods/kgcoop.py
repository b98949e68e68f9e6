"""KgCoOp: CoOp whose class embeddings are held near the hand-written prompt's (Yao et al., CVPR 2023).

    L = CE + lambda (1 - mean over all classes of cos(t_c, t_c of the frozen CLIP))                 `KgCoOp.loss`

lambda = 8 on the cosine distance, as the released code computes it. The paper writes the squared distance of the two
unit vectors, which is twice that: the same loss has weight 4 there. The frozen text is the data set's template.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf

import torch
from torch import Tensor

from perlclip.methods.base import ClassState, cosine_distance, full_precision, register
from perlclip.methods.coop import CoOp, CoOpConfig, PromptState
from perlclip.text.classes import Classes


@dataclass(frozen=True, kw_only=True)
class KgCoOpConfig(CoOpConfig):
    """CoOp's settings and the weight of the hand-written prompts."""

    weight: float = 8.0  # lambda
    reference: str = ""  # template of the frozen text; "" is the data set's

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(weight=(0.0, inf))


@dataclass(kw_only=True)
class ReferenceState(PromptState):
    """What CoOp keeps, and the frozen CLIP's embedding of each class, made when it is first asked for."""

    frozen: Callable[[], Tensor]

    @cached_property
    def t0_CE(self) -> Tensor:
        """Unit vectors, (C, E)."""
        # As good as can be, whatever the moment it is first asked for: in full precision, and fit for a graph.
        with torch.inference_mode(False), torch.no_grad(), full_precision(self.text.eos_C.device):
            return self.frozen()


@register("kgcoop", summary="M context vectors", where="words 1–4 of the text", venue="CVPR 2023")
class KgCoOp(CoOp):
    """CoOp with knowledge-guided regularisation."""

    config_class = KgCoOpConfig
    config: KgCoOpConfig

    def prepare(self, classes: Classes) -> ReferenceState:
        """The names behind free positions, and the hand-written prompts' embeddings."""
        return ReferenceState(
            classes=classes,
            text=super().prepare(classes).text,
            frozen=lambda: self.backbone.encode_text(classes.prompts(self.config.reference)),
        )

    def loss(self, pixels: Tensor, labels: Tensor, state: ClassState) -> Tensor:
        """Cross-entropy plus the pull on every class of the list, whether in the batch or not."""
        assert isinstance(state, ReferenceState)
        t_CE = self.encode_text(state)
        return self.classify(self.encode_image(pixels), t_CE, labels) + self.config.weight * cosine_distance(
            t_CE, state.t0_CE
        )
