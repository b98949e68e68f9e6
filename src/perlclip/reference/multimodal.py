"""MaPLe, PromptSRC, MMA, MMRL and MMRL++ without shortcuts: learned parts in both towers. Shapes: `base.py`."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from perlclip.reference.base import Plain, fill, insert, replace, unit


class PlainPrompted(Plain):
    """Deep prompts in both towers: rows 1.. of the text, the last rows of the vision tower."""

    def prompts(self, side: str) -> list[Tensor]:
        """(K, D) prompts of the blocks 0, 1, ..."""
        raise NotImplementedError

    def text(self, names: list[str], template: str) -> Tensor:
        """(C, E); more prompts than "a photo of a" has words stand before the name alone."""
        K = len(self.prompts("text")[0])
        if K <= 4 or self.config.template != "a photo of a {}.":
            return super().text(names, template)
        ids_CN, end_C = self.tokenise(fill("{}.", names), free=K)
        return self.project("text", self.pool("text", self.blocks("text", self.embed_text(ids_CN)), end_C))

    def embed_text(self, ids_CN: Tensor, words_MD: Tensor | None = None) -> Tensor:
        """The first words give way to the prompts, which get the positions of those words."""
        return super().embed_text(ids_CN, self.prompts("text")[0])

    def embed_image(self, pixels: Tensor) -> Tensor:
        """Prompts without a position follow the patches, before the first norm; where these must be last, lead them."""
        x_BND = self.towers["vision"].embeddings(pixels)
        return self.first_norm(insert(x_BND, 0 if self.probed else x_BND.shape[1], self.prompts("vision")[0]))

    def before(self, side: str, index: int, x_XND: Tensor) -> Tensor:
        """The prompts of a block take the rows of those before."""
        prompts = self.prompts(side)
        if not 1 <= index < len(prompts):
            return x_XND
        behind = side == "vision" and not self.probed
        return replace(x_XND, x_XND.shape[1] - len(prompts[index]) if behind else self.first, prompts[index])


class PlainMaPLe(PlainPrompted):
    """Text prompts, and vision prompts that are linear maps of them."""

    def prompts(self, side: str) -> list[Tensor]:
        """Those of the text, or what the couplings make of them."""
        text = [self.method.context, *self.method.deep]
        if side == "text":
            return text
        return [couple(prompt_KD) for couple, prompt_KD in zip(self.method.couple, text, strict=True)]


class PlainPromptSRC(PlainPrompted):
    """Independent prompts, held near the frozen CLIP in both features and in the logits."""

    def prompts(self, side: str) -> list[Tensor]:
        """Each tower has its own."""
        return list(self.method.text if side == "text" else self.method.vision)

    def teacher_text(self, names: list[str]) -> Tensor:
        """(C, E): mean over the templates first, unit length afterwards."""
        return unit(torch.stack([self.frozen_text(fill(each, names)) for each in self.config.templates]).mean(0))

    def loss(self, pixels: Tensor, labels: Tensor, names: list[str], template: str) -> Tensor:
        """CE, the distances of both features, and the divergence from the frozen answer."""
        v_BE, t_CE = self.image(pixels), self.text(names, template)
        v0_BE, t0_CE = unit(self.frozen_image(pixels)), self.teacher_text(names)
        z_BC, z0_BC = self.similarity(v_BE, t_CE), self.similarity(v0_BE, t0_CE)
        log_p_BC, log_p0_BC = z_BC.log_softmax(-1), z0_BC.log_softmax(-1)
        total: Tensor = (
            F.cross_entropy(z_BC, labels)
            + self.config.text_weight * (t_CE - t0_CE).abs().mean()
            + self.config.image_weight * (v_BE - v0_BE).abs().mean()
            + (log_p0_BC.exp() * (log_p0_BC - log_p_BC)).mean()
        )
        return total


class GradientTimes(torch.autograd.Function):
    """The identity, whose gradient is multiplied by `factor`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        """x itself."""
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradient times the factor."""
        return gradients[0] * ctx.factor, None


class PlainMMA(Plain):
    """A bottleneck beside each adapted block, with a middle layer that both towers share."""

    def block(self, side: str, index: int, x_XND: Tensor) -> Tensor:
        """block(x) + s * adapter(LN1(x)); adapter weights get 1/s times the true gradient, x the true one."""
        out_XND = super().block(side, index, x_XND)
        if str(index) not in self.method.adapters:
            return out_XND
        adapter, scale = self.method.adapters[str(index)], self.config.scale
        down, up = getattr(adapter, f"{side}_down"), getattr(adapter, f"{side}_up")
        normed_XND = self.towers[side].encoder.layers[index].layer_norm1(x_XND)
        y_XND = GradientTimes.apply(normed_XND, scale)  # type: ignore[no-untyped-call]
        a_XND = up(F.relu(adapter.shared(F.relu(down(y_XND)))))
        return out_XND + scale * GradientTimes.apply(a_XND, 1 / scale)  # type: ignore[no-untyped-call,no-any-return]


class PlainMMRL(Plain):
    """Tokens of a shared representation space behind row 0 of the upper blocks, and an image feature from them."""

    @property
    def shift(self) -> int:  # type: ignore[override]
        """As many as there are tokens."""
        return len(self.method.space)

    def aligned(self, side: str, layer: int) -> Tensor:
        """(K, D) tokens of the adapted block number `layer` (from 0)."""
        tokens_KD: Tensor = getattr(self.method, f"{side}_aligners")[layer](self.method.space)
        return tokens_KD

    def compose(self, aligned_KD: Tensor, previous_XKD: Tensor) -> Tensor:
        """The next tokens; what the previous block made of the old ones is dropped."""
        return aligned_KD

    def rep_head(self) -> Tensor:
        """(D, E) projection of the representation feature."""
        head_DE: Tensor = self.method.rep_head
        return head_DE

    def before(self, side: str, index: int, x_XND: Tensor) -> Tensor:
        """Tokens enter before block `start` and are made anew before each later one."""
        layer = index - self.config.start
        if layer < 0:
            return x_XND
        if layer == 0:
            return insert(x_XND, 1, self.aligned(side, 0))
        return replace(x_XND, 1, self.compose(self.aligned(side, layer), x_XND[:, 1 : 1 + self.shift]))

    def branches(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """(B, E) unit features of the class token and of the representation tokens."""
        x_BND = self.blocks("vision", self.embed_image(pixels))
        rep_BD = self.towers["vision"].post_layernorm(x_BND[:, 1 : 1 + self.shift]).mean(1)
        return self.project("vision", x_BND[:, 0]), unit(rep_BD @ self.rep_head())

    def image(self, pixels: Tensor) -> Tensor:
        """(B, E) of the class token."""
        return self.branches(pixels)[0]

    def logits(self, pixels: Tensor, names: list[str], template: str, novel: bool = False) -> Tensor:
        """(B, C) of both branches; of the class token's alone for classes that were not trained on."""
        (class_BE, rep_BE), t_CE = self.branches(pixels), self.text(names, template)
        alpha = 1.0 if novel else self.config.alpha
        return alpha * self.similarity(class_BE, t_CE) + (1 - alpha) * self.similarity(rep_BE, t_CE)

    def loss(self, pixels: Tensor, labels: Tensor, names: list[str], template: str) -> Tensor:
        """CE of each branch, and the pulls of both towers towards the frozen CLIP."""
        alpha, weight = self.config.alpha, self.config.weight
        (class_BE, rep_BE), t_CE = self.branches(pixels), self.text(names, template)
        v0_BE, t0_CE = self.frozen_image(pixels), self.frozen_text(self.sentences(names, template))
        total: Tensor = (
            alpha * F.cross_entropy(self.similarity(class_BE, t_CE), labels)
            + (1 - alpha) * F.cross_entropy(self.similarity(rep_BE, t_CE), labels)
            + weight * (1 - F.cosine_similarity(class_BE, v0_BE).mean())
            + weight * (1 - F.cosine_similarity(t_CE, t0_CE).mean())
        )
        return total


class PlainMMRLpp(PlainMMRL):
    """MMRL with one shared aligner per tower plus low-rank residues, a low-rank head and tokens that carry on."""

    def aligned(self, side: str, layer: int) -> Tensor:
        """(K, D), the aligner's weight being the shared one plus the layer's low-rank part."""
        aligner = getattr(self.method, side)
        weight_DS = aligner.shared + aligner.left[layer] @ aligner.right[layer]
        tokens_KD: Tensor = self.method.space @ weight_DS.T + aligner.bias[layer]
        return tokens_KD

    def compose(self, aligned_KD: Tensor, previous_XKD: Tensor) -> Tensor:
        """beta of the new tokens, 1 - beta of what the block before made of the old."""
        beta: float = self.config.beta
        return beta * aligned_KD + (1 - beta) * previous_XKD

    def rep_head(self) -> Tensor:
        """(D, E): CLIP's own head plus a low-rank part."""
        head_DE: Tensor = self.clip.visual_projection.weight.T + self.method.rep_left @ self.method.rep_right
        return head_DE
