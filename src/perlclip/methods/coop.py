"""CoOp: the words around the class name are learned vectors (Zhou et al., Learning to Prompt, IJCV 2022).

    t_c = text tower([SOS] V1 … VM [name of c] . [EOS])     the same V for all classes     `LearnedWords.encode_text`
    L   = CE(tau v Tᵀ, y)

V starts as the token embeddings of "a photo of a" (M = 4, the authors' base-to-novel setting) or, with `init=""`, as
normal numbers of deviation 0.02 (their few-shot setting, M = 16). The name stands at the end; class-specific contexts
and the other positions of the name are left out, because they cannot be used on classes that were not trained on or
were not used in the comparisons.

The data set's template is not used: CoOp's sentence is its own. The image tower is frozen.
"""

from dataclasses import replace

from perlclip.methods.parts import LearnedWords, WordsConfig
from perlclip.methods.recipe import DASSL_SGD, Rule, with_fast
from perlclip.methods.registry import register

RECIPES = with_fast(
    replace(DASSL_SGD, epochs=200),  # vit_b16_ctxv1
    cross=replace(DASSL_SGD, epochs=50),  # vit_b16_ep50_ctxv1
    few_shot=replace(DASSL_SGD, epochs=200),  # vit_b16, of 8 and 16 shots
)
RULES = (
    Rule(recipes=("original-few-shot",), settings={"tokens": 16, "init": ""}),
    Rule(recipes=("original-few-shot",), shots=(2, 7), changes={"epochs": 100}),  # vit_b16_ep100, of 2 and 4 shots
    Rule(recipes=("original-few-shot",), shots=(1, 1), changes={"epochs": 50}),  # vit_b16_ep50
    Rule(recipes=("original", "original-few-shot"), dataset="imagenet", changes={"epochs": 50}),
)


@register(
    "coop",
    summary="M context vectors",
    where="words 1–4 of the text",
    venue="IJCV 2022",
    recipes=RECIPES,
    rules=RULES,
)
class CoOp(LearnedWords):
    """A frozen CLIP with learned words before the class name."""

    config_class = WordsConfig
