"""One frozen CLIP tower, opened between its blocks.

Methods insert, replace and read tokens between blocks, so the forward pass is ours; the weights are those of
`transformers.CLIPModel`, with which `tests/test_tower.py` checks agreement to 1e-5. Every shortcut here is exact:
same function, less work.

* `Block.read`     the last block evaluated only at the row that is read out, keys and values never formed;
* `Refinement`     the upper blocks entered many times over one frozen sequence, whose queries, keys and values
                   in the first of them are computed once;
* attention        always through `scaled_dot_product_attention`.

Shapes: B sequences (images or classes), N tokens, k rows put before them, D width, H heads, d = D / H, E shared width.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

State = Mapping[str, Tensor]
QKV = tuple[Tensor, Tensor, Tensor]


class Block(nn.Module):
    """A pre-norm transformer block: x + Attn(LN x), then x + MLP(LN x)."""

    def __init__(self, state: State, prefix: str, heads: int, eps: float, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.heads = heads
        self.act = act
        self.norm1 = _norm(state, f"{prefix}layer_norm1.", eps)
        self.qkv = _linear(state, *(f"{prefix}self_attn.{name}_proj." for name in "qkv"))
        self.out = _linear(state, f"{prefix}self_attn.out_proj.")
        self.norm2 = _norm(state, f"{prefix}layer_norm2.", eps)
        self.fc1 = _linear(state, f"{prefix}mlp.fc1.")
        self.fc2 = _linear(state, f"{prefix}mlp.fc2.")

    def forward(self, x_BND: Tensor, causal: bool) -> Tensor:
        """The whole block at every row."""
        return self.attend(x_BND, self.project_qkv(x_BND), causal)

    def project_qkv(self, x_BND: Tensor) -> QKV:
        """Queries, keys and values of each row, (B, H, N, d) each."""
        B, N, _ = x_BND.shape
        qkv_B3HNd = self.qkv(self.norm1(x_BND)).view(B, N, 3, self.heads, -1).permute(0, 2, 3, 1, 4)
        q_BHNd, k_BHNd, v_BHNd = qkv_B3HNd.unbind(1)
        return q_BHNd, k_BHNd, v_BHNd

    def attend(self, x_BND: Tensor, qkv: QKV, causal: bool) -> Tensor:
        """The rest of the block, given the rows' queries, keys and values."""
        a_BHNd = F.scaled_dot_product_attention(*qkv, is_causal=causal)
        return self._finish(x_BND, a_BHNd.transpose(1, 2).flatten(2))

    def read(self, x_BND: Tensor, rows_B: Tensor, causal: bool) -> Tensor:
        """The block's output at row `rows_B[b]` of sequence b, (B, D).

        With one query per sequence, keys and values need not be formed: q·(W_k y_n + b_k) = (W_kᵀ q)·y_n + c, where c
        is the same for all n and leaves the softmax unchanged, and Σ_n a_n (W_v y_n + b_v) = W_v (Σ_n a_n y_n) + b_v.
        That is 2 H D multiplications a token instead of 2 D².
        """
        B, N, D = x_BND.shape
        y_BND = self.norm1(x_BND)
        b = torch.arange(B, device=x_BND.device)
        wq_DD, wk_HdD, wv_HdD = self._split_weight()
        bq_D, _, bv_D = self.qkv.bias.chunk(3)
        q_BHd = F.linear(y_BND[b, rows_B], wq_DD, bq_D).view(B, self.heads, -1) * (D // self.heads) ** -0.5
        s_BHN = torch.einsum("bhd,hde->bhe", q_BHd, wk_HdD) @ y_BND.transpose(1, 2)
        if causal:
            hidden_BN = torch.arange(N, device=x_BND.device) > rows_B[:, None]
            s_BHN = s_BHN.masked_fill(hidden_BN[:, None], float("-inf"))
        p_BHN = s_BHN.softmax(-1, dtype=torch.float32).to(y_BND.dtype)
        a_BHd = torch.einsum("bhe,hde->bhd", p_BHN @ y_BND, wv_HdD)
        return self._finish(x_BND[b, rows_B], a_BHd.reshape(B, D) + bv_D)

    def _split_weight(self) -> QKV:
        wq_DD, wk_DD, wv_DD = self.qkv.weight.chunk(3)
        D = wq_DD.shape[0]
        return wq_DD, wk_DD.view(self.heads, -1, D), wv_DD.view(self.heads, -1, D)

    def _finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.out(attended)
        out: Tensor = x + self.fc2(self.act(self.fc1(self.norm2(x))))
        return out


class TextEmbedding(nn.Module):
    """Token ids to rows: token + position embedding."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.token = nn.Parameter(state["text_model.embeddings.token_embedding.weight"].clone())
        self.position = nn.Parameter(state["text_model.embeddings.position_embedding.weight"].clone())

    def forward(self, ids_BN: Tensor) -> Tensor:
        """(B, N) token ids -> (B, N, D)."""
        return F.embedding(ids_BN, self.token) + self.position[: ids_BN.shape[1]]


class ImageEmbedding(nn.Module):
    """Pixels to rows: CLS and patches, position embedding, norm."""

    def __init__(self, state: State, eps: float) -> None:
        super().__init__()
        self.cls = nn.Parameter(state["vision_model.embeddings.class_embedding"].clone())
        self.patch = nn.Parameter(state["vision_model.embeddings.patch_embedding.weight"].clone())
        self.position = nn.Parameter(state["vision_model.embeddings.position_embedding.weight"].clone())
        self.norm = _norm(state, "vision_model.pre_layrnorm.", eps)

    def tokens(self, pixels_B3HW: Tensor) -> Tensor:
        """The rows before the first norm, where some methods insert their own."""
        pixels_B3HW = pixels_B3HW.to(self.patch.dtype)
        patches_BND = F.conv2d(pixels_B3HW, self.patch, stride=self.patch.shape[-1]).flatten(2).transpose(1, 2)
        cls_B1D = self.cls.expand(len(pixels_B3HW), 1, -1)
        return torch.cat([cls_B1D, patches_BND], 1) + self.position

    def forward(self, pixels_B3HW: Tensor) -> Tensor:
        """(B, 3, size, size) normalised pixels -> (B, 1 + patches, D)."""
        out: Tensor = self.norm(self.tokens(pixels_B3HW))
        return out


class Tower(nn.Module):
    """The frozen text or image encoder: `embed`, `block`, `run`, `pool`, `project`."""

    def __init__(
        self, embed: nn.Module, blocks: list[Block], norm: nn.LayerNorm, head: nn.Linear, *, causal: bool
    ) -> None:
        super().__init__()
        self.embed = embed
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = head
        self.causal = causal
        self.requires_grad_(False).eval()

    @property
    def width(self) -> int:
        """D, the width of the residual stream."""
        return self.head.in_features

    @property
    def depth(self) -> int:
        """L, the number of blocks."""
        return len(self.blocks)

    def block(self, i: int, x_BND: Tensor) -> Tensor:
        """Block i (from 0) at every row."""
        out: Tensor = self.blocks[i](x_BND, self.causal)
        return out

    def run(self, x_BND: Tensor, start: int, stop: int) -> Tensor:
        """Blocks start..stop-1 at every row."""
        for i in range(start, stop):
            x_BND = self.block(i, x_BND)
        return x_BND

    def read(self, x_BND: Tensor, rows_B: Tensor) -> Tensor:
        """The last block at the rows read out."""
        last = self.blocks[-1]
        assert isinstance(last, Block)
        return last.read(x_BND, rows_B, self.causal)

    def pool(self, x_BND: Tensor, rows_B: Tensor, start: int = 0) -> Tensor:
        """Pool(blocks start..L of x): the residual stream at `rows_B` after the last block, before the final norm."""
        return self.read(self.run(x_BND, start, self.depth - 1), rows_B)

    def project(self, h_BD: Tensor) -> Tensor:
        """pi: final norm and projection head, then unit length, in float32. (B, D) -> (B, E)."""
        return F.normalize(self.head(self.norm(h_BD)).float(), dim=-1)


class Refinement:
    """R_m: blocks start..L over one frozen sequence, entered once per refinement step with more rows before it."""

    def __init__(self, tower: Tower, x_BND: Tensor, rows_B: Tensor, start: int) -> None:
        if not 0 <= start < tower.depth:
            raise ValueError(f"start must be in 0..{tower.depth - 1}, got {start}")
        self.tower, self.x_BND, self.rows_B, self.start = tower, x_BND, rows_B, start
        first = tower.blocks[start]
        assert isinstance(first, Block)
        self.first = first
        # Where the first upper block is also the last, `read` forms no keys to reuse.
        self.qkv = first.project_qkv(x_BND) if start < tower.depth - 1 else None

    def pool(self, front_BkD: Tensor | None = None) -> Tensor:
        """Pool(R_m(front ‖ x)), read at the sequence's own row, never at a front row. (B, D)."""
        k = 0 if front_BkD is None else front_BkD.shape[1]
        x_BND = self.x_BND if front_BkD is None else torch.cat([front_BkD.to(self.x_BND.dtype), self.x_BND], 1)
        if self.qkv is None:
            return self.tower.read(x_BND, self.rows_B + k)
        qkv = self.qkv
        if k:
            front = self.first.project_qkv(x_BND[:, :k])
            qkv = tuple(torch.cat([new, kept], 2) for new, kept in zip(front, qkv, strict=True))  # type: ignore[assignment]
        x_BND = self.first.attend(x_BND, qkv, self.tower.causal)
        return self.tower.pool(x_BND, self.rows_B + k, self.start + 1)


def build_towers(
    state: State, config: Any, activation: Callable[[str], Callable[[Tensor], Tensor]]
) -> dict[str, Tower]:
    """Both towers from a CLIPModel's state dict and config; every size is read from them."""
    towers = {}
    for side, final_norm, head in (("vision", "post_layernorm", "visual"), ("text", "final_layer_norm", "text")):
        part = getattr(config, f"{side}_config")
        eps = part.layer_norm_eps
        blocks = [
            Block(
                state, f"{side}_model.encoder.layers.{i}.", part.num_attention_heads, eps, activation(part.hidden_act)
            )
            for i in range(part.num_hidden_layers)
        ]
        towers[side] = Tower(
            TextEmbedding(state) if side == "text" else ImageEmbedding(state, eps),
            blocks,
            _norm(state, f"{side}_model.{final_norm}.", eps),
            _linear(state, f"{head}_projection."),
            causal=side == "text",
        )
    return towers


def _linear(state: State, *prefixes: str) -> nn.Linear:
    """One Linear from one or several stacked ones."""
    weight = torch.cat([state[f"{p}weight"] for p in prefixes])
    has_bias = f"{prefixes[0]}bias" in state
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=has_bias, device="meta")
    linear.weight = nn.Parameter(weight)
    if has_bias:
        linear.bias = nn.Parameter(torch.cat([state[f"{p}bias"] for p in prefixes]))
    return linear


def _norm(state: State, prefix: str, eps: float) -> nn.LayerNorm:
    norm = nn.LayerNorm(len(state[f"{prefix}weight"]), eps=eps, device="meta")
    norm.weight = nn.Parameter(state[f"{prefix}weight"].clone())
    norm.bias = nn.Parameter(state[f"{prefix}bias"].clone())
    return norm
