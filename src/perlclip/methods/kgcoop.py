"""KgCoOp: CoOp whose class embeddings are held near the hand-written prompt's (Yao et al., CVPR 2023).

    L = CE + lambda (1 - mean over all classes of cos(t_c, t_c of the frozen CLIP))                 `KgCoOp.loss`

lambda = 8 on the cosine distance, as the released code computes it. The paper writes the squared distance of the two
unit vectors, which is twice that: the same loss has weight 4 there. The frozen text is the data set's template.
"""

from dataclasses import dataclass, replace
from math import inf

from torch import Tensor

from perlclip.backbone import Images
from perlclip.methods.base import ClassState
from perlclip.methods.parts import LearnedWords, ReferenceState, WordsConfig
from perlclip.methods.recipe import DASSL_SGD, TRAINED_ON, Rule, with_fast
from perlclip.methods.registry import register
from perlclip.text.classes import Classes

RECIPES = with_fast(
    replace(DASSL_SGD, epochs=100, batch_size=128),  # vit_b16_ep100_ctxv1
    cross=replace(DASSL_SGD, epochs=25, batch_size=128),  # the author's command in issue 8 of the repository
    few_shot=replace(DASSL_SGD, epochs=100),  # issue 4 of the repository: batch 32
)
RULES = (Rule(recipes=TRAINED_ON, dataset="dtd", settings={"reference": "a photo of a {}, a type of texture."}),)


@dataclass(frozen=True, kw_only=True)
class KgCoOpConfig(WordsConfig):
    """CoOp's settings and the weight of the hand-written prompts."""

    weight: float = 8.0  # lambda
    reference: str = ""  # template of the frozen text; "" is the data set's

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(weight=(0.0, inf))


@register(
    "kgcoop",
    summary="M context vectors",
    where="words 1–4 of the text",
    venue="CVPR 2023",
    recipes=RECIPES,
    rules=RULES,
)
class KgCoOp(LearnedWords):
    """CoOp with knowledge-guided regularisation."""

    config_class = KgCoOpConfig
    config: KgCoOpConfig

    def prepare(self, classes: Classes) -> ReferenceState:
        """The names behind free positions, and the hand-written prompts' embeddings."""
        backbone, template = self.backbone, self.config.reference
        return ReferenceState(
            classes=classes,
            text=self.names_behind(classes),
            reference=lambda: backbone.encode_text(classes.prompts(template)),
        )

    def loss(self, images: Images, labels: Tensor, state: ClassState) -> Tensor:
        """Cross-entropy plus lambda times the distance to the hand-written prompts."""
        return self.guided_loss(images, labels, state, self.config.weight)
