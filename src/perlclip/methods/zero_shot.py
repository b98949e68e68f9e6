"""Zero-shot CLIP: nothing is trained. The line every method starts from (Radford et al., ICML 2021)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perlclip.methods.base import ClassState, Method, register


@dataclass(kw_only=True)
class ZeroShotState(ClassState):
    """The class embeddings themselves."""

    t_CE: Tensor


@register("zero-shot", summary="frozen CLIP, one prompt a class", venue="ICML 2021")
class ZeroShot(Method):
    """Image and class embeddings of the frozen towers."""

    @torch.no_grad()
    def class_state(self, prompts: Sequence[str]) -> ZeroShotState:
        """Encode the prompts, once and for all."""
        text = self.backbone.text
        tokens = self.backbone.tokenize(prompts)
        h_CD = text.pool(text.embed(tokens.ids_BN), tokens.eos_B)
        return ZeroShotState(prompts=tuple(prompts), t_CE=text.project(h_CD))

    def encode_text(self, state: ClassState) -> Tensor:
        """The embeddings made by `class_state`."""
        assert isinstance(state, ZeroShotState)
        return state.t_CE

    def encode_image(self, pixels: Tensor) -> Tensor:
        """CLIP's image embedding."""
        vision = self.backbone.vision
        x_BND = vision.embed(pixels)
        return vision.project(vision.pool(x_BND, x_BND.new_zeros(len(x_BND), dtype=torch.long)))
