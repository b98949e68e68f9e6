"""Ridge regression on the frozen CLIP's image embeddings, added to its text classifier: seconds, and no gradient.

What practitioners try first. There is nothing to train by steps: the head that `fit` makes (`perlclip.heads`) is all
that is learned, a row of weights and a bias for each class trained on. Any other class is answered as zero-shot CLIP
does. `zero-shot` with a head is the same; under this name it is a row of its own in tables.
"""

from torch import Tensor

from perlclip.methods.base import ClassState, Method
from perlclip.methods.parts import FrozenTextState
from perlclip.methods.recipe import Recipe
from perlclip.methods.registry import register
from perlclip.text.classes import Classes


@register(
    "ridge",
    summary="a linear head in closed form",
    where="image embeddings",
    venue="–",
    recipes={"fast": Recipe()},  # of which nothing is used; shots and seed are what a run of it has
)
class RidgeCLIP(Method):
    """The frozen CLIP, to be given a head."""

    head_alone = True
    head_by = "ridge"

    def prepare(self, classes: Classes) -> FrozenTextState:
        """Encode the prompts, once and for all."""
        return FrozenTextState(classes=classes, t_CE=self.backbone.encode_text(classes.prompts()))

    def encode_text(self, state: ClassState) -> Tensor:
        """The embeddings made by `prepare`."""
        assert isinstance(state, FrozenTextState)
        return state.t_CE
