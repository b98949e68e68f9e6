"""One frozen tower, opened between its blocks, and read out at a row: CLS, EOS or the last one.

Methods insert, replace and read tokens between blocks, so the forward pass is ours; the weights are those of
`transformers`' models, with which `tests/backbone` checks agreement to 1e-5. Every shortcut here is exact: same
function, less work. A tower has no state: what was computed of a batch is in `frozen.FrozenImages`. `base.py` says what
a tower promises; a family with another readout overrides `finish`, `read` and `headed` (`siglip.py`).

* `Block.read`     the last block evaluated only at the rows that are read out, keys and values never formed;
* `Block.both`     a prefix that many sequences share, computed once, and what is the sequences' own (`SharedText`);
* `Refinement`     the upper blocks entered many times over one frozen sequence, whose queries, keys and values
                   in the first of them are computed once;
* `norm`           a block is told the norm of the one behind it, so that a sum and its norm are one pass (`kernels`);
* attention        `scaled_dot_product_attention`, or a kernel where it is slow (`fused.attention`).

Shapes: B sequences (images or classes), N tokens, k rows put before them, R rows read, D width, H heads, d = D / H,
E shared width, or 3 D where queries, keys and values stand side by side; A context sequences, each of which serves
B / A of the B.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perlclip.backbone.accel.eight import FLOAT8, Linear8, Rows8
from perlclip.backbone.accel.fused import add_norm, attention, enter, linear_silu, read_row, unit
from perlclip.backbone.accel.processor import FrozenLinear

State = Mapping[str, Tensor]
Activation = Callable[[Tensor], Tensor]
Beside = Callable[[Tensor], Tensor]  # what a method adds to a block's output, made of its input
QUICK = 1.702  # CLIP's quick GELU is x sigmoid(1.702 x)


@dataclass(frozen=True)
class Rows:
    """Sequences between two blocks, and what the first norm of the next one makes of them, if that is known."""

    x_BND: Tensor
    y_BND: Tensor | Rows8 | None = None


class Norm(nn.LayerNorm):
    """A layer norm whose result is in the number format of the matrix product behind it."""

    result: torch.dtype | None = None
    form: torch.dtype | None = None  # of 8 bits, in which that product is made (`accel.eight`)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.result is None else y.to(self.result)


class Block(nn.Module):
    """A pre-norm transformer block: x + Attn(LN x), then x + MLP(LN x)."""

    def __init__(self, state: State, prefix: str, heads: int, eps: float, act: Activation) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = make_norm(state, f"{prefix}layer_norm1.", eps)
        self.qkv = make_linear(state, *(f"{prefix}self_attn.{name}_proj." for name in "qkv"))
        self.out = make_linear(state, f"{prefix}self_attn.out_proj.")
        self.norm2 = make_norm(state, f"{prefix}layer_norm2.", eps)
        self.fc1 = make_linear(state, f"{prefix}mlp.fc1.")
        self.fc2 = make_linear(state, f"{prefix}mlp.fc2.")
        self.act = act

    def forward(self, rows: Rows, causal: bool, norm: Norm | None = None) -> Rows:
        """The whole block at every row, and what the norm of the block behind it makes of them."""
        return self.attend(rows.x_BND, self.project_qkv(rows), causal, norm)

    def both(self, prefix_APD: Tensor, x_BND: Tensor) -> tuple[Tensor, Tensor]:
        """The block at sequences that are shared, and at those that stand behind them; causal.

        What works row by row is done for the rows of both in one go.
        """
        (A, P, D), (B, N, _) = prefix_APD.shape, x_BND.shape
        rows_RD = torch.cat([prefix_APD.reshape(-1, D), x_BND.reshape(-1, D)])
        qkv_RD = self.qkv(self.norm1(rows_RD))
        qkv_3AHPd = qkv_RD[: A * P].view(A, P, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        qkv_3BHNd = qkv_RD[A * P :].view(B, N, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a_AHPd = F.scaled_dot_product_attention(qkv_3AHPd[0], qkv_3AHPd[1], qkv_3AHPd[2], is_causal=True)
        k_BHMd, v_BHMd = torch.cat([_serve(qkv_3AHPd[1:], B, 1), qkv_3BHNd[1:]], 3)
        mask_NM = _causal_mask(N, P + N, x_BND.device, k_BHMd.dtype)
        a_BHNd = F.scaled_dot_product_attention(qkv_3BHNd[0], k_BHMd, v_BHMd, attn_mask=mask_NM)
        a_RD = torch.cat([a.transpose(1, 2).reshape(-1, D) for a in (a_AHPd, a_BHNd)])
        out_RD = self._finish(rows_RD, a_RD).x_BND
        return out_RD[: A * P].view(A, P, D), out_RD[A * P :].view(B, N, D)

    def project_qkv(self, rows: Rows) -> Tensor:
        """Queries, keys and values of each row side by side, (B, N, 3 D)."""
        qkv_BNE: Tensor = self.qkv(self.normed(rows))
        return qkv_BNE

    def normed(self, rows: Rows) -> Tensor | Rows8:
        """LN(x), unless the block before has made it already."""
        return self.norm1(rows.x_BND) if rows.y_BND is None else rows.y_BND

    def in_eight(self, form: torch.dtype | None) -> None:
        """Have the large products made in 8 bits."""
        if form is None:
            return
        # Without `fc2`, whose rows have a few large numbers and many small ones, int8 is fast enough on a CPU, and one
        # answer in a thousand more is float32's.
        names = ("qkv", "out", "fc1", "fc2") if form == FLOAT8 else ("qkv", "out", "fc1")
        linears: dict[str, nn.Linear] = {name: getattr(self, name) for name in names}
        if form == FLOAT8 and any((x.in_features | x.out_features) % 16 for x in linears.values()):
            return  # which the cards cannot read
        for name, linear in linears.items():
            columns_D = self._largest_values() if form == FLOAT8 and name == "out" else None
            setattr(self, name, Linear8(linear, form, columns_D))
        self.norm1.form = self.norm2.form = form

    def attend(
        self, x_BND: Tensor, qkv_BNE: Tensor, causal: bool, norm: Norm | None = None, front_BkE: Tensor | None = None
    ) -> Rows:
        """The rest of the block, given the rows' queries, keys and values; those of the first rows can be apart."""
        return self._finish(x_BND, attention(qkv_BNE, self.heads, causal, self.out, front_BkE), norm)

    def read(self, rows: Rows, rows_BR: Tensor, causal: bool, context_AkD: Tensor | None = None) -> Tensor:
        """The block's output at rows `rows_BR[b]` of sequence b, (B, R, D). Context rows stand before the sequence.

        With few queries per sequence, keys and values need not be formed: q·(W_k y_n + b_k) = (W_kᵀ q)·y_n + c, where c
        is the same for all n and leaves the softmax unchanged, and Σ_n a_n (W_v y_n + b_v) = W_v (Σ_n a_n y_n) + b_v.
        That is 2 R H D multiplications a token instead of 2 D².
        """
        x_BND, y_BND = rows.x_BND, self.normed(rows)
        assert isinstance(y_BND, Tensor)
        B, N, D = x_BND.shape
        R, H = rows_BR.shape[1], self.heads
        if R == 1 and context_AkD is None:
            found = read_row(x_BND, y_BND, rows_BR[:, 0], self.qkv, H, causal)
            if found is not None:
                return self._finish(found[0][:, None], found[1][:, None]).x_BND
        at_BRD = rows_BR[..., None].expand(-1, -1, D)  # an index would be sorted first, on the way back
        wq_DD, wk_HdD, wv_HdD = self._split_weight()
        bq_D, _, bv_D = self.qkv.bias.chunk(3)
        q_BRHd = F.linear(y_BND.gather(1, at_BRD), wq_DD, bq_D).view(B, R, H, -1) * (D // H) ** -0.5
        u_BRHD = torch.einsum("brhd,hde->brhe", q_BRHd, wk_HdD)
        # N is any number, so it must not be what lies side by side in memory: cards have no fast product for that.
        u_BRHD = F.pad(u_BRHD, (0, 0, 0, -H % 8)) if H % 8 else u_BRHD
        u_BDS = u_BRHD.flatten(1, 2).transpose(1, 2)
        s_BNRH = (y_BND @ u_BDS).view(B, N, R, -1)
        if causal:
            hidden_BNR = torch.arange(N, device=x_BND.device)[:, None] > rows_BR[:, None]
            s_BNRH = s_BNRH.masked_fill(hidden_BNR[..., None], float("-inf"))
        s_BNS = s_BNRH.flatten(2)
        if context_AkD is None:
            m_BSD = s_BNS.softmax(1).transpose(1, 2) @ y_BND
        else:
            c_BkD = _serve(self.norm1(context_AkD.to(x_BND.dtype)), B, dim=0)
            k = c_BkD.shape[1]
            p_BMS = torch.cat([c_BkD @ u_BDS, s_BNS], 1).softmax(1)
            m_BSD = p_BMS[:, :k].transpose(1, 2) @ c_BkD + p_BMS[:, k:].transpose(1, 2) @ y_BND
        m_BRHD = m_BSD.view(B, R, -1, D)[:, :, :H]
        a_BRHd = torch.einsum("brhe,hde->brhd", m_BRHD, wv_HdD)
        return self._finish(x_BND.gather(1, at_BRD), a_BRHd.reshape(B, R, D) + bv_D).x_BND

    def _largest_values(self) -> Tensor:
        """What no value, so no mean of values, is above: LN is at most √D long before its weight and bias."""
        wv_DD, bias = self.qkv.weight.float().chunk(3)[2], self.qkv.bias
        norm, bv_D = self.norm1, 0.0 if bias is None else bias.float().chunk(3)[2]
        longest_D = len(wv_DD) ** 0.5 * (wv_DD * norm.weight.float()).norm(dim=1)
        most_D: Tensor = longest_D + (wv_DD @ norm.bias.float() + bv_D).abs()
        return most_D

    def _split_weight(self) -> tuple[Tensor, Tensor, Tensor]:
        wq_DD, wk_DD, wv_DD = self.qkv.weight.chunk(3)
        D = wq_DD.shape[0]
        return wq_DD, wk_DD.view(self.heads, -1, D), wv_DD.view(self.heads, -1, D)

    def _finish(self, x: Tensor, attended: Tensor | Rows8, norm: Norm | None = None) -> Rows:
        x, y = add_norm(x, self.out(attended), self.norm2)
        hidden = linear_silu(y, self.fc1) if self.act is F.silu else self.act(self.fc1(y))
        if norm is None:
            return Rows(x + self.fc2(hidden))
        return Rows(*add_norm(x, self.fc2(hidden), norm))


class TextEmbedding(nn.Module):
    """Token ids to rows: token + position embedding."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.token = nn.Parameter(state["text_model.embeddings.token_embedding.weight"].clone())
        self.position = nn.Parameter(state["text_model.embeddings.position_embedding.weight"].clone())

    def forward(self, ids_BN: Tensor, start: int = 0) -> Tensor:
        """(B, N) token ids at positions start, start + 1, … -> (B, N, D)."""
        return F.embedding(ids_BN, self.token) + self.position[start : start + ids_BN.shape[1]]


class ImageEmbedding(nn.Module):
    """Pixels to rows: patches, behind CLS where there is one, position embedding, and a norm where there is one."""

    def __init__(self, state: State, norm: Norm | None) -> None:
        super().__init__()
        prefix = "vision_model.embeddings."
        cls, bias = (state.get(f"{prefix}{name}") for name in ("class_embedding", "patch_embedding.bias"))
        self.cls = None if cls is None else nn.Parameter(cls.clone())
        self.patch = nn.Parameter(state[f"{prefix}patch_embedding.weight"].clone())
        self.bias = None if bias is None else nn.Parameter(bias.clone())
        self.position = nn.Parameter(state[f"{prefix}position_embedding.weight"].clone())
        self.norm = norm or nn.Identity()

    def tokens(self, pixels_B3HW: Tensor) -> Tensor:
        """The rows before the first norm, where some methods insert their own."""
        p, (B, _, height, width) = self.patch.shape[-1], pixels_B3HW.shape
        rows, columns = height // p, width // p
        pixels_B3HW = pixels_B3HW[..., : rows * p, : columns * p]  # what is left over is no whole patch
        # A convolution whose windows do not overlap is a matrix product, and as one it is several times faster.
        windows = pixels_B3HW.to(self.patch.dtype).reshape(B, 3, rows, p, columns, p).permute(0, 2, 4, 1, 3, 5)
        patches_BND = F.linear(windows.reshape(B, -1, 3 * p * p), self.patch.flatten(1), self.bias)
        if self.cls is None:
            return patches_BND + self.position
        first_ND = F.pad(self.cls[None], (0, 0, 0, len(self.position) - 1)) + self.position
        return F.pad(patches_BND, (0, 0, 1, 0)) + first_ND

    def forward(self, pixels_B3HW: Tensor) -> Tensor:
        """(B, 3, size, size) normalised pixels -> (B, CLS and patches, D)."""
        out: Tensor = self.norm(self.tokens(pixels_B3HW))
        return out


class Tower(nn.Module):
    """The frozen text or image encoder: `embed`, `block`, `run`, `pool`, `project`.

    `starts` rows, CLS or SOS, stand before the patches or words; behind them methods put rows of their own.
    """

    def __init__(
        self, embed: nn.Module, blocks: list[Block], norm: Norm, head: nn.Module, *, causal: bool, starts: int = 1
    ) -> None:
        super().__init__()
        self.embed = embed
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = head
        self.causal = causal
        self.starts = starts
        self.form: torch.dtype | None = None
        self.requires_grad_(False).eval()

    def place(self, device: torch.device, dtype: torch.dtype, form: torch.dtype | None = None) -> "Tower":
        """Move to a device and compute in a number format; the large products of all but the last block in 8 bits.

        In half precision on the CPU, rows between blocks stay in float32: there it costs next to nothing, and a few
        answers in a thousand change instead of a few in a hundred. On CUDA it would cost a tenth of the time.
        """
        rows = torch.float32 if device.type == "cpu" else dtype
        self.to(device=device, dtype=rows)
        for block in self.blocks[: self.full]:
            assert isinstance(block, Block)
            block.in_eight(form)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.to(dtype)
            if isinstance(module, Norm):
                module.result = dtype if dtype != rows and module.form is None else None
        self.form = form
        if isinstance(self.embed, ImageEmbedding):
            if isinstance(self.embed.norm, Norm):
                self.embed.norm.result = None
            for p in (self.embed.patch, self.embed.bias):
                if p is not None:
                    p.data = p.to(dtype)
        return self

    @property
    def width(self) -> int:
        """D, the width of the residual stream."""
        return self.norm.normalized_shape[0]

    @property
    def depth(self) -> int:
        """L, the number of blocks."""
        return len(self.blocks)

    @property
    def full(self) -> int:
        """Blocks that are computed at every row: all but the last, which is read at few."""
        return self.depth - 1

    @property
    def middle(self) -> int:
        """Blocks before the middle: 7 of 12, as on ViT-B/16, where PERL's thoughts enter."""
        return min(self.depth - 1, round(self.depth * 7 / 12))

    @property
    def middle_width(self) -> int:
        """Numbers that `FrozenImages.middle` gives."""
        return self.width * (self.starts + 1)

    @property
    def patches(self) -> int:
        """Rows of an image beside CLS; the text tower has as many positions beside SOS."""
        position = self.embed.position
        assert isinstance(position, Tensor)
        return len(position) - self.starts

    def block(self, i: int, x_BND: Tensor) -> Tensor:
        """Block i (from 0) at every row."""
        return self.rows(i, Rows(x_BND), i + 1).x_BND

    def rows(self, start: int, rows: Rows, stop: int, *, on: bool = False) -> Rows:
        """Blocks start..stop-1 at every row, each made ready for the next one; with `on` the last, too."""
        for i in range(start, stop):
            rows = self.blocks[i](rows, self.causal, self.norm_before(i + 1) if on or i + 1 < stop else None)
        return rows

    def norm_before(self, i: int) -> Norm:
        """The first thing that is done to the rows that enter block i; of all blocks, the final norm."""
        if i == self.depth:
            return self.norm
        block = self.blocks[i]
        assert isinstance(block, Block)
        return block.norm1

    def both(self, i: int, prefix_APD: Tensor, x_BND: Tensor) -> tuple[Tensor, Tensor]:
        """Block i of a causal tower at shared sequences and at those that stand behind them."""
        block = self.blocks[i]
        assert isinstance(block, Block) and self.causal
        return block.both(prefix_APD, x_BND)

    def run(self, x_BND: Tensor, start: int, stop: int) -> Tensor:
        """Blocks start..stop-1 at every row."""
        return self.rows(start, Rows(x_BND), stop).x_BND

    def read(
        self, x: Tensor | Rows, rows_B: Tensor, context_AkD: Tensor | None = None, beside: Beside | None = None
    ) -> Tensor:
        """The last block at the row read out of each sequence, (B, D); (B, R, D) if rows are (B, R).

        `beside` makes what is added to its output of its input, at the same rows.
        """
        last = self.blocks[-1]
        assert isinstance(last, Block)
        rows = x if isinstance(x, Rows) else Rows(x)
        if rows_B.ndim == 2:
            assert beside is None
            return last.read(rows, rows_B, self.causal, context_AkD)
        h_BD = last.read(rows, rows_B[:, None], self.causal, context_AkD).squeeze(1)
        if beside is None:
            return h_BD
        return h_BD + beside(rows.x_BND[torch.arange(len(h_BD), device=h_BD.device), rows_B])

    def finish(self, start: int, rows: Rows, rows_B: Tensor) -> Tensor:
        """Blocks start..L, the last only at the rows read out: (B, D)."""
        return self.read(self.rows(start, rows, self.full, on=True), rows_B)

    def pool(self, x_BND: Tensor, rows_B: Tensor, start: int = 0) -> Tensor:
        """Pool(blocks start..L of x): the residual stream at `rows_B` after the last block, before the final norm."""
        return self.finish(start, Rows(x_BND), rows_B)

    def project(self, h_BD: Tensor) -> Tensor:
        """pi: final norm and projection head, then unit length, in float32. (B, D) -> (B, E)."""
        return unit(self.headed(h_BD))

    def features(self, h_BD: Tensor) -> Tensor:
        """The same before it is brought to unit length."""
        return self.headed(h_BD).float()

    def headed(self, h_BD: Tensor) -> Tensor:
        """The same in the tower's number format."""
        out: Tensor = self.head(self.norm(h_BD))
        return out


class Refinement:
    """R_m: blocks start..L over one frozen sequence, entered once per refinement step with more rows before it.

    With `room` for so many rows, those of a step are written before the frozen ones, in rows and queries, keys and
    values alike, instead of copying all of these behind them. That is for one user at a time, without gradients.
    """

    def __init__(self, tower: Tower, x_BND: Tensor, rows_B: Tensor, start: int, room: int = 0) -> None:
        if not 0 <= start < tower.depth:
            raise ValueError(f"start must be in 0..{tower.depth - 1}, got {start}")
        self.tower, self.x_BND, self.rows_B, self.start = tower, x_BND, rows_B, start
        first = tower.blocks[start]
        assert isinstance(first, Block)
        self.first, self.room = first, 0 if torch.is_grad_enabled() else room
        roomy_BMD = F.pad(x_BND, (0, 0, self.room, 0)) if self.room else x_BND
        self.roomy_BMD = roomy_BMD
        # Where the first upper block is one that is read at few rows, no keys are formed to be reused.
        self.qkv_BME = first.project_qkv(Rows(roomy_BMD)) if start < tower.full else None

    def of(self, chosen_b: Tensor) -> "Refinement":
        """The same over some of the sequences."""
        part = copy(self)
        part.x_BND, part.rows_B, part.roomy_BMD = (each[chosen_b] for each in (self.x_BND, self.rows_B, self.roomy_BMD))
        part.qkv_BME = None if self.qkv_BME is None else self.qkv_BME[chosen_b]
        return part

    def tensors(self) -> list[Tensor]:
        """What `over` makes it of again: rows, and queries, keys and values of the first block, room included."""
        return [self.roomy_BMD] if self.qkv_BME is None else [self.roomy_BMD, self.qkv_BME]

    def over(self, tensors: Sequence[Tensor]) -> "Refinement":
        """The same over other sequences, read at their first row."""
        other, (roomy_BMD, *qkv_BME) = copy(self), tensors
        other.roomy_BMD, other.x_BND = roomy_BMD, roomy_BMD[:, self.room :]
        other.rows_B = torch.zeros(len(roomy_BMD), dtype=torch.long, device=roomy_BMD.device)
        other.qkv_BME = qkv_BME[0] if qkv_BME else None
        return other

    def pool(self, front_BkD: Tensor | None = None, later: Mapping[int, Tensor] | None = None) -> Tensor:
        """Pool(R_m(front ‖ x)), read at the sequence's own row, never at a front row. (B, D).

        `later[i]` replaces the front rows before block i.
        """
        x_BND, own_BNE = self.x_BND, None if self.qkv_BME is None else self.qkv_BME[:, self.room :]
        if front_BkD is None:
            return self._pool(x_BND, own_BNE, None, 0, {})
        front_BkD, k = front_BkD.to(x_BND.dtype), front_BkD.shape[1]
        # Only the front rows' queries, keys and values are new.
        if k > self.room or torch.is_grad_enabled():
            if own_BNE is None:
                return self._pool(torch.cat([front_BkD, x_BND], 1), None, None, k, later or {})
            x_BND, y_BkD = enter(front_BkD, x_BND, self.first.norm1)
            return self._pool(x_BND, own_BNE, self.first.project_qkv(Rows(front_BkD, y_BkD)), k, later or {})
        front_BkE = None if own_BNE is None else self.first.project_qkv(Rows(front_BkD))
        begin = self.room - k
        self.roomy_BMD[:, begin : self.room] = front_BkD
        if self.qkv_BME is not None and front_BkE is not None:
            self.qkv_BME[:, begin : self.room] = front_BkE
            own_BNE = self.qkv_BME[:, begin:]
        return self._pool(self.roomy_BMD[:, begin:], own_BNE, None, k, later or {})

    def _pool(
        self, x_BND: Tensor, qkv_BNE: Tensor | None, front_BkE: Tensor | None, k: int, later: Mapping[int, Tensor]
    ) -> Tensor:
        rows, depth, tower = Rows(x_BND), self.start, self.tower
        if qkv_BNE is not None:
            depth += 1
            norm = None if depth in later else tower.norm_before(depth)
            rows = self.first.attend(x_BND, qkv_BNE, tower.causal, norm, front_BkE)
        for i in sorted(later):
            rows = tower.rows(depth, rows, i)
            rows, depth = Rows(torch.cat([later[i].to(x_BND.dtype), rows.x_BND[:, k:]], 1)), i
        return tower.finish(depth, rows, self.rows_B + k)


def make_blocks(state: State, prefix: str, config: Any) -> list[Block]:
    """The blocks of a tower from a state dict with `transformers`' names; every size is read from it."""
    quick = config.hidden_act == "quick_gelu"
    act = F.silu if quick else activation(config.hidden_act)
    blocks = [
        Block(state, f"{prefix}encoder.layers.{i}.", config.num_attention_heads, config.layer_norm_eps, act)
        for i in range(config.num_hidden_layers)
    ]
    for block in blocks if quick else []:
        _fold(block)
    return blocks


def activation(name: str) -> Activation:
    """By the name that a config has for it."""
    from transformers.activations import ACT2FN

    found: Activation = ACT2FN[name]
    return found


@torch.no_grad()
def _fold(block: Block) -> None:
    """x sigmoid(c x) = silu(c x) / c: with c in the weights it is one kernel instead of three, and keeps one tensor."""
    for p in (block.fc1.weight, block.fc1.bias):
        p.mul_(QUICK)
    block.fc2.weight.div_(QUICK)


def _serve(rows: Tensor, count: int, dim: int) -> Tensor:
    """Each of the A sequences along `dim` for the count / A that share it, without a copy where one serves all."""
    A = rows.shape[dim]
    if A == 1:
        return rows.expand(*rows.shape[:dim], count, *rows.shape[dim + 1 :])
    return rows if count == A else rows.repeat_interleave(count // A, dim)


@cache  # a CUDA graph may still read one that has not been asked for lately
def _causal_mask(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The last rows of a causal mask, to be added: row i sees all that stands before the sequence, and itself up to i.

    Rows begin at multiples of 16 numbers in memory, as CUDA's kernels want it, who would copy it each time otherwise.
    """
    with torch.inference_mode(False):  # it may first be needed there, and later where gradients are
        wide = torch.full((rows, -(-columns // 16) * 16), float("-inf"), device=device, dtype=dtype)
        return wide.triu(columns - rows + 1)[:, :columns]


def make_linear(state: State, *prefixes: str) -> nn.Linear:
    """One Linear from one or several stacked ones."""
    weight = torch.cat([state[f"{p}weight"] for p in prefixes])
    has_bias = f"{prefixes[0]}bias" in state
    linear = FrozenLinear(weight.shape[1], weight.shape[0], bias=has_bias, device="meta")
    linear.weight = nn.Parameter(weight)
    if has_bias:
        linear.bias = nn.Parameter(torch.cat([state[f"{p}bias"] for p in prefixes]))
    return linear


def make_norm(state: State, prefix: str, eps: float) -> Norm:
    """A norm from its weight and bias."""
    norm = Norm(len(state[f"{prefix}weight"]), eps=eps, device="meta")
    norm.weight = nn.Parameter(state[f"{prefix}weight"].clone())
    norm.bias = nn.Parameter(state[f"{prefix}bias"].clone())
    return norm
