"""MaPLe, PromptSRC, MMA, MMRL and MMRL++ without shortcuts, on `transformers`' own CLIP modules.

The yardstick that the library's implementations are compared with and timed against: sentences padded to the whole
context, every row of every block, text encoded anew on every call, a second full pass for every teacher, nothing kept.
Everything is float32; gradients reach the parameters of `method`, which are read and never copied.

Shape letters: B images, C classes, N text positions, M vision rows (class token, patches, extra tokens), D width of the
tower at hand (Dt text, Dv vision), E joint dimension, K learned tokens (prompts or representation tokens),
S width of the representation space. A leading X stands for B or C, whichever the tower has.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPModel


class PlainMultimodal:
    """Frozen CLIP with places to step in; as it stands, every method below would be plain CLIP."""

    shift = 0  # rows that the method inserts in front of the words, by which the end-of-text row moves

    def __init__(self, clip: CLIPModel, tokenizer, method) -> None:
        self.clip, self.tokenizer, self.method = clip.requires_grad_(False).eval(), tokenizer, method
        self.towers = {"text": clip.text_model, "vision": clip.vision_model}

    # What the methods override.

    def sentences(self, names: list[str], template: str) -> list[str]:
        """MaPLe, PromptSRC and MMA read the same sentence on every data set."""
        return [self.method.config.template.format(name) for name in names]

    def embed_text(self, ids_CN: Tensor) -> Tensor:
        return self.towers["text"].embeddings(input_ids=ids_CN)

    def embed_vision(self, pixels: Tensor) -> Tensor:
        return self.towers["vision"].pre_layrnorm(self.towers["vision"].embeddings(pixels))

    def before(self, side: str, index: int, x_XND: Tensor) -> Tensor:
        """The input of block `index` (from 0), given the output of the block below it."""
        return x_XND

    def block(self, side: str, index: int, x_XND: Tensor) -> Tensor:
        n = x_XND.shape[1]
        causal_NN = torch.full((n, n), float("-inf"), device=x_XND.device, dtype=x_XND.dtype).triu(1)
        out = self.towers[side].encoder.layers[index](x_XND, causal_NN[None, None] if side == "text" else None)
        return out[0] if isinstance(out, tuple) else out

    # The adapted towers.

    def blocks(self, side: str, x_XND: Tensor) -> Tensor:
        for index in range(len(self.towers[side].encoder.layers)):
            x_XND = self.block(side, index, self.before(side, index, x_XND))
        return x_XND

    def text(self, names: list[str], template: str) -> Tensor:
        """(C, E) unit class embeddings, read at the end-of-text row."""
        ids_CN, end_C = self.tokenise(self.sentences(names, template))
        x_CND = self.towers["text"].final_layer_norm(self.blocks("text", self.embed_text(ids_CN)))
        pooled_CD = x_CND[torch.arange(len(x_CND), device=x_CND.device), end_C + self.shift]
        return F.normalize(self.clip.text_projection(pooled_CD), dim=-1)

    def image(self, pixels: Tensor) -> Tensor:
        """(B, E) unit image embeddings, read at the class token."""
        x_BMD = self.towers["vision"].post_layernorm(self.blocks("vision", self.embed_vision(pixels)))
        return F.normalize(self.clip.visual_projection(x_BMD[:, 0]), dim=-1)

    def logits(self, pixels: Tensor, names: list[str], template: str, novel: bool = False) -> Tensor:
        return self.similarity(self.image(pixels), self.text(names, template))

    def loss(self, pixels: Tensor, labels: Tensor, names: list[str], template: str) -> Tensor:
        return F.cross_entropy(self.logits(pixels, names, template), labels)

    # Small parts.

    def tokenise(self, sentences: list[str]) -> tuple[Tensor, Tensor]:
        """(C, N) ids padded to the whole context, and the (C) position of the first end-of-text token."""
        length = self.clip.config.text_config.max_position_embeddings
        ids_CN = self.tokenizer(sentences, padding="max_length", max_length=length, return_tensors="pt")["input_ids"]
        ids_CN = ids_CN.to(self.clip.device)
        return ids_CN, (ids_CN == self.tokenizer.eos_token_id).int().argmax(-1)

    def similarity(self, f_BE: Tensor, g_CE: Tensor) -> Tensor:
        return self.clip.logit_scale.exp() * f_BE @ g_CE.T

    # The frozen teachers: `transformers`' own forward passes, not normalised.

    @torch.no_grad()
    def frozen_text(self, sentences: list[str]) -> Tensor:
        return self.clip.text_projection(self.towers["text"](self.tokenise(sentences)[0]).pooler_output)

    @torch.no_grad()
    def frozen_image(self, pixels: Tensor) -> Tensor:
        return self.clip.visual_projection(self.towers["vision"](pixels).pooler_output)


def insert(x_XND: Tensor, first: int, tokens: Tensor) -> Tensor:
    """New rows `first`.. holding `tokens` ((K, D) or (X, K, D)); the rows that were there move on."""
    return torch.cat([x_XND[:, :first], tokens.expand(len(x_XND), -1, -1), x_XND[:, first:]], 1)


def replace(x_XND: Tensor, first: int, tokens: Tensor) -> Tensor:
    """Rows `first`.. overwritten by `tokens` ((K, D) or (X, K, D))."""
    end = first + tokens.shape[-2]
    return torch.cat([x_XND[:, :first], tokens.expand(len(x_XND), -1, -1), x_XND[:, end:]], 1)


class PlainPrompted(PlainMultimodal):
    """Deep prompts in both towers: rows 1.. of the text, the last rows of the vision tower."""

    def prompts(self, side: str) -> list[Tensor]:
        """(K, D) prompts of the blocks 0, 1, ..."""
        raise NotImplementedError

    def embed_text(self, ids_CN: Tensor) -> Tensor:
        """The first words give way to the prompts, which get the positions of those words."""
        embeddings = self.towers["text"].embeddings
        words_CND = embeddings.token_embedding(ids_CN)
        return embeddings(inputs_embeds=replace(words_CND, 1, self.prompts("text")[0]))

    def embed_vision(self, pixels: Tensor) -> Tensor:
        """Prompts without a position follow the patches, before the first LayerNorm."""
        x_BMD = self.towers["vision"].embeddings(pixels)
        return self.towers["vision"].pre_layrnorm(insert(x_BMD, x_BMD.shape[1], self.prompts("vision")[0]))

    def before(self, side: str, index: int, x_XND: Tensor) -> Tensor:
        prompts = self.prompts(side)
        if not 1 <= index < len(prompts):
            return x_XND
        first = 1 if side == "text" else x_XND.shape[1] - len(prompts[index])
        return replace(x_XND, first, prompts[index])


class PlainMaPLe(PlainPrompted):
    """Text prompts, and vision prompts that are linear maps of them."""

    def prompts(self, side: str) -> list[Tensor]:
        text = [self.method.context, *self.method.deep]
        if side == "text":
            return text
        return [couple(prompt) for couple, prompt in zip(self.method.couple, text, strict=True)]


class PlainPromptSRC(PlainPrompted):
    """Independent prompts, held near the frozen CLIP in both features and in the logits."""

    def prompts(self, side: str) -> list[Tensor]:
        return list(self.method.text if side == "text" else self.method.vision)

    def teacher_text(self, names: list[str]) -> Tensor:
        """Mean over the templates first, unit length afterwards."""
        templates = self.method.config.templates
        features = [self.frozen_text([template.format(name) for name in names]) for template in templates]
        return F.normalize(torch.stack(features).mean(0), dim=-1)

    def loss(self, pixels: Tensor, labels: Tensor, names: list[str], template: str) -> Tensor:
        f_BE, g_CE = self.image(pixels), self.text(names, template)
        f0_BE, g0_CE = F.normalize(self.frozen_image(pixels), dim=-1), self.teacher_text(names)
        z_BC, z0_BC = self.similarity(f_BE, g_CE), self.similarity(f0_BE, g0_CE)
        log_p_BC, log_p0_BC = z_BC.log_softmax(-1), z0_BC.log_softmax(-1)
        kl_BC = log_p0_BC.exp() * (log_p0_BC - log_p_BC)
        return (
            F.cross_entropy(z_BC, labels)
            + self.method.config.text_weight * (g_CE - g0_CE).abs().mean()
            + self.method.config.image_weight * (f_BE - f0_BE).abs().mean()
            + kl_BC.mean()
        )


class GradientTimes(torch.autograd.Function):
    """The identity, whose gradient is multiplied by `factor`."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class PlainMMA(PlainMultimodal):
    """A bottleneck beside each adapted block, with a middle layer that both towers share."""

    def block(self, side: str, index: int, x_XND: Tensor) -> Tensor:
        """block(x) + s * adapter(LN1(x)); adapter weights get 1/s times the true gradient, x the true one."""
        out_XND = super().block(side, index, x_XND)
        if str(index) not in self.method.adapters:
            return out_XND
        adapter, scale = self.method.adapters[str(index)], self.method.config.scale
        down, up = getattr(adapter, f"{side}_down"), getattr(adapter, f"{side}_up")
        y_XND = GradientTimes.apply(self.towers[side].encoder.layers[index].layer_norm1(x_XND), scale)
        a_XND = up(F.relu(adapter.shared(F.relu(down(y_XND)))))
        return out_XND + scale * GradientTimes.apply(a_XND, 1 / scale)


class PlainMMRL(PlainMultimodal):
    """Tokens of a shared representation space behind row 0 of the upper blocks, and an image feature from them."""

    @property
    def shift(self) -> int:
        return len(self.method.space)

    def aligned(self, side: str, layer: int) -> Tensor:
        """(K, D) tokens of the adapted block number `layer` (from 0)."""
        return (self.method.text_aligners if side == "text" else self.method.vision_aligners)[layer](self.method.space)

    def compose(self, aligned_KD: Tensor, previous_XKD: Tensor) -> Tensor:
        """The next tokens; what the previous block made of the old ones is dropped."""
        return aligned_KD

    def rep_head(self) -> Tensor:
        """(Dv, E) projection of the representation feature."""
        return self.method.rep_head

    def sentences(self, names: list[str], template: str) -> list[str]:
        return [template.format(name) for name in names]

    def before(self, side: str, index: int, x_XND: Tensor) -> Tensor:
        layer = index - self.method.config.start
        if layer < 0:
            return x_XND
        if layer == 0:
            return insert(x_XND, 1, self.aligned(side, 0))
        return replace(x_XND, 1, self.compose(self.aligned(side, layer), x_XND[:, 1 : 1 + self.shift]))

    def branches(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """(B, E) unit features of the class token and of the representation tokens."""
        x_BMD = self.towers["vision"].post_layernorm(self.blocks("vision", self.embed_vision(pixels)))
        class_BE = self.clip.visual_projection(x_BMD[:, 0])
        rep_BE = x_BMD[:, 1 : 1 + self.shift].mean(1) @ self.rep_head()
        return F.normalize(class_BE, dim=-1), F.normalize(rep_BE, dim=-1)

    def image(self, pixels: Tensor) -> Tensor:
        return self.branches(pixels)[0]

    def logits(self, pixels: Tensor, names: list[str], template: str, novel: bool = False) -> Tensor:
        (class_BE, rep_BE), g_CE = self.branches(pixels), self.text(names, template)
        if novel:
            return self.similarity(class_BE, g_CE)
        alpha = self.method.config.alpha
        return alpha * self.similarity(class_BE, g_CE) + (1 - alpha) * self.similarity(rep_BE, g_CE)

    def loss(self, pixels: Tensor, labels: Tensor, names: list[str], template: str) -> Tensor:
        alpha, weight = self.method.config.alpha, self.method.config.weight
        (class_BE, rep_BE), g_CE = self.branches(pixels), self.text(names, template)
        f0_BE, g0_CE = self.frozen_image(pixels), self.frozen_text(self.sentences(names, template))
        return (
            alpha * F.cross_entropy(self.similarity(class_BE, g_CE), labels)
            + (1 - alpha) * F.cross_entropy(self.similarity(rep_BE, g_CE), labels)
            + weight * (1 - F.cosine_similarity(class_BE, f0_BE).mean())
            + weight * (1 - F.cosine_similarity(g_CE, g0_CE).mean())
        )


class PlainMMRLpp(PlainMMRL):
    """MMRL with one shared aligner a tower plus low-rank residues, a low-rank head and tokens that carry on."""

    def aligned(self, side: str, layer: int) -> Tensor:
        aligner: nn.Module = getattr(self.method, side)
        weight_DS = aligner.shared + aligner.left[layer] @ aligner.right[layer]
        return self.method.space @ weight_DS.T + aligner.bias[layer]

    def compose(self, aligned_KD: Tensor, previous_XKD: Tensor) -> Tensor:
        beta = self.method.config.beta
        return beta * aligned_KD + (1 - beta) * previous_XKD

    def rep_head(self) -> Tensor:
        return self.clip.visual_projection.weight.T + self.method.rep_left @ self.method.rep_right
