"""Gaussians round the classes' mean image embeddings in the frozen CLIP, added to its text classifier; no gradient.

Discriminant analysis in closed form, seconds of work, with something to say about classes that were not trained on: the
head that `fit` makes for any method (`perlclip.heads`) is all that is learned. `zero-shot` with a head is the same;
under this name it is a row of its own in tables, as `ridge` is.
"""

from perlclip.methods.parts import CENTER, CenteredConfig, HeadAlone
from perlclip.methods.recipe import Recipe, Rule
from perlclip.methods.registry import register


@register(
    "gaussian",
    summary="a head of Gaussians in closed form, also for new classes",
    where="image embeddings",
    venue="–",
    recipes={"fast": Recipe()},
    rules=[Rule(settings={"center": CENTER})],
)
class GaussianCLIP(HeadAlone):
    """The frozen CLIP, to be given a head of Gaussians."""

    config_class = CenteredConfig
    head_by = "discriminant"
