"""Ridge regression on the frozen CLIP's image embeddings, added to its text classifier: seconds, and no gradient.

What practitioners try first. There is nothing to train by steps: the head that `fit` makes (`perlclip.heads`) is all
that is learned, a row of weights and a bias for each class trained on. Any other class is answered as zero-shot CLIP
does. With a row of its own in tables.
"""

from perlclip.methods.parts import HeadAlone
from perlclip.methods.recipe import Recipe
from perlclip.methods.registry import register


@register(
    "ridge",
    summary="a linear head in closed form",
    where="image embeddings",
    venue="–",
    recipes={"fast": Recipe()},  # of which nothing is used; shots and seed are what a run of it has
)
class RidgeCLIP(HeadAlone):
    """The frozen CLIP, to be given a head of ridge regression."""

    head_by = "ridge"
