"""The families `siglip` and `siglip2`: no CLS, a pooling head; texts without a causal mask, read at their last row.

    image   h = MAP(LN(x)), a learned query that attends to the patches, and an MLP beside it;   pi(h) = h / |h|
    text    h = x at the last of 64 rows, padding or not;                                        pi = norm, head, unit
    logits  scale cos + bias

SigLIP 2's checkpoints of a fixed size are of the type `siglip`. Those of the type `siglip2` ("NaFlex") take images of
any shape; here they get square ones, of as many patches as they have positions for.

* `Probe`       the query of the pooling head never changes, so that it is multiplied with the keys' weights once, and
                keys and values of the patches are not formed, as in `Block.read`;
* `ProbedTower` under the head, the last block is needed at every patch, so that its Q, K, V of frozen rows are reused,
                too. Texts are neither cut nor shared: a row depends on all others.

Shapes: B images, N rows, P patches, D width, H heads, d = D / H.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from perlclip.backbone.base import Family
from perlclip.backbone.tower import (
    Beside,
    Block,
    ImageEmbedding,
    Norm,
    Rows,
    State,
    TextEmbedding,
    Tower,
    activation,
    make_blocks,
    make_linear,
    make_norm,
)
from perlclip.errors import PerlclipError


class Probe(nn.Module):
    """Attention of one learned query over the rows, then x + MLP(LN(x))."""

    def __init__(self, state: State, prefix: str, config: Any) -> None:
        super().__init__()
        wq_DD, wk_DD, wv_DD = state[f"{prefix}attention.in_proj_weight"].chunk(3)
        bq_D, _, bv_D = state[f"{prefix}attention.in_proj_bias"].chunk(3)
        H, D = config.num_attention_heads, len(wq_DD)
        q_Hd = (wq_DD @ state[f"{prefix}probe"].flatten() + bq_D).view(H, -1) * (D // H) ** -0.5
        # q·(W_k y + b_k) = (W_kᵀ q)·y + c, where c is the same for all rows and leaves the softmax unchanged.
        self.query_HD = nn.Parameter(torch.einsum("hd,hde->he", q_Hd, wk_DD.view(H, -1, D)))
        self.value = make_linear({"weight": wv_DD, "bias": bv_D}, "")
        self.out = make_linear(state, f"{prefix}attention.out_proj.")
        self.norm = make_norm(state, f"{prefix}layernorm.", config.layer_norm_eps)
        self.fc1 = make_linear(state, f"{prefix}mlp.fc1.")
        self.fc2 = make_linear(state, f"{prefix}mlp.fc2.")
        self.act = activation(config.hidden_act)

    def forward(self, y_BPD: Tensor) -> Tensor:
        """Normed rows to the pooled state, (B, D)."""
        H, D = self.query_HD.shape
        s_BPH = y_BPD @ self.query_HD.to(y_BPD.dtype).T
        m_BHD = s_BPH.softmax(1).transpose(1, 2) @ y_BPD
        a_BHd = torch.einsum("bhe,hde->bhd", m_BHD, self.value.weight.view(H, -1, D))
        x_BD = self.out(a_BHd.flatten(1) + self.value.bias).to(self.norm.weight.dtype)
        h_BD: Tensor = x_BD + self.fc2(self.act(self.fc1(self.norm(x_BD))))
        return h_BD


class ProbedTower(Tower):
    """An image tower that is read by a pooling head. The patches are its last rows; it sees no others."""

    def __init__(self, embed: ImageEmbedding, blocks: list[Block], norm: Norm, probe: Probe) -> None:
        super().__init__(embed, blocks, norm, probe, causal=False, starts=0)

    @property
    def full(self) -> int:
        """Every block is computed at every row."""
        return self.depth

    def read(
        self, x: Tensor | Rows, rows_B: Tensor, context_AkD: Tensor | None = None, beside: Beside | None = None
    ) -> Tensor:
        """The last block and the readout, (B, D). The patches are read, whatever rows are named."""
        rows = x if isinstance(x, Rows) else Rows(x)
        if context_AkD is not None:
            raise ValueError("a pooling head reads whole sequences")
        out = self.rows(self.depth - 1, rows, self.depth, on=beside is None)
        return self._probed(out if beside is None else Rows(out.x_BND + beside(rows.x_BND)))

    def finish(self, start: int, rows: Rows, rows_B: Tensor) -> Tensor:
        """Blocks start..L and the readout: (B, D)."""
        return self._probed(self.rows(start, rows, self.depth, on=True))

    def headed(self, h_BD: Tensor) -> Tensor:
        """The pooled state is in the shared space already."""
        return h_BD

    def _probed(self, rows: Rows) -> Tensor:
        y_BND = self.norm(rows.x_BND) if rows.y_BND is None else rows.y_BND
        assert isinstance(y_BND, Tensor)
        h_BD: Tensor = self.head(y_BND[:, -self.patches :])
        return h_BD


def build_towers(state: State, config: Any) -> dict[str, Tower]:
    """Both towers from a SiglipModel's state dict and config; every size is read from them."""
    vision, text = config.vision_config, config.text_config
    if "vision_model.head.probe" not in state:
        raise PerlclipError("its image tower has no pooling head, and without one there are no image embeddings")
    return {
        "vision": ProbedTower(
            ImageEmbedding(state, None),
            make_blocks(state, "vision_model.", vision),
            make_norm(state, "vision_model.post_layernorm.", vision.layer_norm_eps),
            Probe(state, "vision_model.head.", vision),
        ),
        "text": Tower(
            TextEmbedding(state),
            make_blocks(state, "text_model.", text),
            make_norm(state, "text_model.final_layer_norm.", text.layer_norm_eps),
            make_linear(state, "text_model.head."),
            causal=False,
            starts=0,
        ),
    }


def _naflex_towers(state: State, config: Any) -> dict[str, Tower]:
    """The patches of this type are a linear map of pixels in the order row, column, channel."""
    key, p = "vision_model.embeddings.patch_embedding.weight", config.vision_config.patch_size
    weight_D3pp = state[key].view(-1, p, p, 3).permute(0, 3, 1, 2)
    return build_towers({**state, key: weight_D3pp}, config)


def _naflex_size(config: Any) -> int:
    vision = config.vision_config
    return int(vision.patch_size * round(vision.num_patches**0.5))


def _naflex_processor(processor: Any, config: Any) -> Any:
    """What SigLIP's processor makes of images with this one's settings: all of them square, of the tower's size."""
    from transformers import SiglipImageProcessorPil

    same = ("resample", "image_mean", "image_std", "rescale_factor", "do_rescale", "do_normalize")
    size = _naflex_size(config)
    settings: Mapping[str, Any] = {key: getattr(processor, key) for key in same}
    return SiglipImageProcessorPil(size={"height": size, "width": size}, **settings)


SIGLIP = Family(name="siglip", model="SiglipModel", towers=build_towers, lowers=True)
SIGLIP2 = Family(
    name="siglip2",
    model="Siglip2Model",
    towers=_naflex_towers,
    lowers=True,
    positions={"mode": "bilinear", "align_corners": False, "antialias": True},
    size=_naflex_size,
    processor=_naflex_processor,
)
