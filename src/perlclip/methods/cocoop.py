"""CoCoOp: CoOp whose words are shifted by what the image shows (Zhou et al., CVPR 2022).

    pi(x)  = W2 ReLU(W1 v + b1) + b2           v the frozen unit image embedding                `CoCoOp.meta`
    V_m(x) = V_m + pi(x)                       one shift for all M words
    logit_c(x) = tau cos(v, text tower([SOS] V(x) [name of c] . [EOS]))                         `CoCoOp.logits`

Every image has class embeddings of its own, so the text tower runs for every pair of an image and a class. The pairs
are taken `PAIRS` at a time, with activations recomputed in the backward pass when there are more: memory is bounded
whatever the number of classes. What an image's sentences share, SOS and V(x), is computed once an image.

`encode_text` has no image to look at and gives the class embeddings without a shift.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from perlclip.backbone import Backbone, Images, SharedText
from perlclip.methods.base import ClassState
from perlclip.methods.parts import LearnedWords, PromptState, WordsConfig
from perlclip.methods.recipe import DASSL_SGD, with_fast
from perlclip.methods.registry import register

PAIRS = 1024  # some 2 GiB of activations at ViT-B/16 size
_TEN_EPOCHS = replace(DASSL_SGD, epochs=10, batch_size=1)  # vit_b16_c4_ep10_batch1_ctxv1


@dataclass(frozen=True, kw_only=True)
class CoCoOpConfig(WordsConfig):
    """CoOp's settings and the Meta-Net's width."""

    reduction: int = 16  # the Meta-Net's hidden width is the embedding's divided by this

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(reduction=(1, 1024))


@register(
    "cocoop",
    summary="M context vectors, Meta-Net of the image",
    where="words 1–4 of the text",
    venue="CVPR 2022",
    recipes=with_fast(_TEN_EPOCHS, cross=_TEN_EPOCHS),
)
class CoCoOp(LearnedWords):
    """CoOp conditioned on the image."""

    config_class = CoCoOpConfig
    config: CoCoOpConfig

    def __init__(self, backbone: Backbone, config: CoCoOpConfig) -> None:
        super().__init__(backbone, config)
        hidden = max(1, backbone.embed_dim // config.reduction)
        self.meta = nn.Sequential(
            nn.Linear(backbone.embed_dim, hidden), nn.ReLU(), nn.Linear(hidden, backbone.text.width)
        )

    def logits(self, images: Images, state: ClassState) -> Tensor:
        """Scaled cosine of each image with its own embedding of each class, (B, C)."""
        assert isinstance(state, PromptState)
        v_BE = self.encode_image(images)
        with torch.autocast(v_BE.device.type, enabled=False):
            words_BnD = self.context + self.meta(v_BE)[:, None]
        B, classes = len(v_BE), len(state.text)
        few = max(1, PAIRS // classes)
        rows = []
        for i in range(0, B, few):
            pieces = [
                self._pairs(words_BnD[i : i + few], v_BE[i : i + few], state.text[j : j + PAIRS], B * classes)
                for j in range(0, classes, PAIRS)
            ]
            rows.append(torch.cat(pieces, 1))
        return torch.cat(rows)

    def _pairs(self, words_BnD: Tensor, v_BE: Tensor, text: SharedText, pairs: int) -> Tensor:
        if torch.is_grad_enabled() and pairs > PAIRS:
            # Nothing here is random, and asking for the generator's state would break a CUDA graph.
            pieces = (words_BnD, v_BE, text)
            out: Tensor = checkpoint(self._cosines, *pieces, use_reentrant=False, preserve_rng_state=False)
            return out
        return self._cosines(words_BnD, v_BE, text)

    def _cosines(self, words_BnD: Tensor, v_BE: Tensor, text: SharedText) -> Tensor:
        h_PD = text.repeat(len(v_BE)).put_words(words_BnD).pool()
        t_BCE = self.backbone.text.project(h_PD).view(len(v_BE), len(text), -1)
        with torch.autocast(v_BE.device.type, enabled=False):
            return self.backbone.logit_scale * torch.einsum("be,bce->bc", v_BE, t_BCE)
