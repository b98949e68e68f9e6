"""CoOp, CoCoOp, KgCoOp, ProVP and TCP without shortcuts, on `transformers`' own layers.

Sentences are padded to the whole context, every row of every block is computed, text is encoded anew on every call and
nothing is kept between calls. The yardstick the library's methods are compared with and timed against.

Shape letters: B images, C classes, N text positions (the context length), S image positions, M prompt vectors (one
layer's), D width of the tower at hand, E joint dimension. A vector of one image has no B.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPModel


class PlainPrompts:
    """Frozen CLIP, step by step; a method overrides `text`, `image` or `loss` where it departs from it."""

    def __init__(self, clip: CLIPModel, tokenizer, method) -> None:
        self.clip, self.tokenizer, self.method = clip.requires_grad_(False).eval(), tokenizer, method

    # What a method offers.

    def text(self, names: list[str], template: str) -> Tensor:
        """(C, E) unit class embeddings."""
        return self.frozen_text(names, template)

    def image(self, pixels: Tensor) -> Tensor:
        """(B, E) unit image embeddings."""
        return self.frozen_image(pixels)

    def logits(self, pixels: Tensor, names: list[str], template: str) -> Tensor:
        """(B, C) cosines times CLIP's scale."""
        return self.scaled(self.image(pixels), self.text(names, template))

    def loss(self, pixels: Tensor, labels: Tensor, names: list[str], template: str) -> Tensor:
        """Cross-entropy over the classes."""
        return F.cross_entropy(self.logits(pixels, names, template), labels)

    # Frozen CLIP.

    def frozen_text(self, names: list[str], template: str) -> Tensor:
        """(C, E) unit embeddings of the template filled with each name."""
        ids_CN, eos_C = self.tokens([template.replace("{}", name) for name in names])
        x_CND = self.embed_text(self.clip.text_model.embeddings.token_embedding(ids_CN))
        for layer in self.clip.text_model.encoder.layers:
            x_CND = self.text_block(layer, x_CND)
        return self.text_head(x_CND, eos_C)

    def frozen_image(self, pixels: Tensor) -> Tensor:
        """(B, E) unit embeddings of the images."""
        x_BSD = self.embed_image(pixels)
        for layer in self.clip.vision_model.encoder.layers:
            x_BSD = self.image_block(layer, x_BSD)
        return self.image_head(x_BSD)

    def scaled(self, v_BE: Tensor, t_CE: Tensor) -> Tensor:
        return self.clip.logit_scale.exp() * v_BE @ t_CE.T

    # The text tower in pieces.

    def tokens(self, sentences: list[str], placeholders: int = 0) -> tuple[Tensor, Tensor]:
        """(C, N) ids, `[SOS][placeholders][sentence][EOS]...[EOS]`, and (C,) positions of the first EOS."""
        length = self.clip.config.text_config.max_position_embeddings
        sos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        rows, ends = [], []
        for sentence in sentences:
            ids = self.tokenizer(sentence)["input_ids"]
            ids = ids[:1] + [sos] * placeholders + ids[1:]
            if len(ids) > length:
                raise ValueError(f"{sentence!r} needs {len(ids)} positions, the context has {length}")
            rows.append(ids + [eos] * (length - len(ids)))
            ends.append(ids.index(eos))
        device = self.clip.logit_scale.device
        return torch.tensor(rows, device=device), torch.tensor(ends, device=device)

    def splice(self, ids_CN: Tensor, context_MD: Tensor) -> Tensor:
        """(C, N, D) token embeddings with positions 1..M replaced by the same context for every class."""
        token_CND = self.clip.text_model.embeddings.token_embedding(ids_CN)
        return self.replace(token_CND, context_MD.expand(len(ids_CN), -1, -1))

    @staticmethod
    def replace(x: Tensor, new: Tensor) -> Tensor:
        """`x` with positions 1..M (those after SOS or CLS) replaced by the M vectors of `new`."""
        return torch.cat([x[:, :1], new, x[:, 1 + new.shape[1] :]], 1)

    def embed_text(self, token_CND: Tensor) -> Tensor:
        return token_CND + self.clip.text_model.embeddings.position_embedding.weight

    @staticmethod
    def text_block(layer: nn.Module, x: Tensor) -> Tensor:
        n = x.shape[1]
        causal = torch.full((n, n), float("-inf"), device=x.device, dtype=x.dtype).triu(1)
        return first(layer(x, causal[None, None]))

    def text_head(self, x_CND: Tensor, eos_C: Tensor) -> Tensor:
        x_CND = self.clip.text_model.final_layer_norm(x_CND)
        pooled_CD = x_CND[torch.arange(len(x_CND), device=x_CND.device), eos_C]
        return F.normalize(self.clip.text_projection(pooled_CD), dim=-1)

    # The image tower in pieces.

    def embed_image(self, pixels: Tensor) -> Tensor:
        """(B, S, D) CLS and patches with their position embeddings, after the pre layer norm."""
        vision = self.clip.vision_model
        return vision.pre_layrnorm(vision.embeddings(pixels))

    @staticmethod
    def image_block(layer: nn.Module, x: Tensor) -> Tensor:
        return first(layer(x, None))

    def image_head(self, x_BSD: Tensor) -> Tensor:
        pooled_BD = self.clip.vision_model.post_layernorm(x_BSD[:, 0])
        return F.normalize(self.clip.visual_projection(pooled_BD), dim=-1)


def first(out):
    """The hidden state, which some versions of `transformers` wrap in a tuple."""
    return out[0] if isinstance(out, tuple) else out


class PlainCoOp(PlainPrompts):
    """One learned context before every class name: `[SOS][V1..VM][name].[EOS]`; the template is not used."""

    def text(self, names: list[str], template: str) -> Tensor:
        return self.learned_text(names, self.method.context)

    def learned_text(self, names: list[str], context_MD: Tensor) -> Tensor:
        ids_CN, eos_C = self.tokens([f"{name}." for name in names], placeholders=len(context_MD))
        x_CND = self.embed_text(self.splice(ids_CN, context_MD))
        for layer in self.clip.text_model.encoder.layers:
            x_CND = self.text_block(layer, x_CND)
        return self.text_head(x_CND, eos_C)


class PlainCoCoOp(PlainCoOp):
    """CoOp whose context is shifted by a vector made from the image: all C sentences are encoded for each image."""

    def text(self, names: list[str], template: str, v_E: Tensor) -> Tensor:
        """(C, E) class embeddings for ONE image, given its unit embedding."""
        return self.learned_text(names, self.method.context + self.method.meta(v_E))

    def logits(self, pixels: Tensor, names: list[str], template: str) -> Tensor:
        rows = [self.scaled(v_E[None], self.text(names, template, v_E)) for v_E in self.image(pixels)]
        return torch.cat(rows)


class PlainKgCoOp(PlainCoOp):
    """CoOp held near frozen CLIP's embedding of the template."""

    def loss(self, pixels: Tensor, labels: Tensor, names: list[str], template: str) -> Tensor:
        """CE + lambda (1 - mean cosine), the mean over all classes."""
        t_CE = self.text(names, template)
        reference_CE = self.frozen_text(names, template)
        away = 1 - F.cosine_similarity(t_CE, reference_CE, dim=-1).mean()
        return F.cross_entropy(self.scaled(self.image(pixels), t_CE), labels) + self.method.config.weight * away


class PlainProVP(PlainPrompts):
    """Learned vectors between CLS and the patches of every image block, each mixed with what the block before made."""

    def image(self, pixels: Tensor) -> Tensor:
        prompts, alpha = self.method.prompts, self.method.config.alpha
        m = prompts.shape[1]
        x_BSD = self.embed_image(pixels)
        for i, layer in enumerate(self.clip.vision_model.encoder.layers):
            prompt_BMD = prompts[i].expand(len(x_BSD), -1, -1)
            if i == 0:
                x_BSD = torch.cat([x_BSD[:, :1], prompt_BMD, x_BSD[:, 1:]], 1)
            else:
                x_BSD = self.replace(x_BSD, alpha * x_BSD[:, 1 : 1 + m] + (1 - alpha) * prompt_BMD)
            x_BSD = self.image_block(layer, x_BSD)
        return self.image_head(x_BSD)

    def loss(self, pixels: Tensor, labels: Tensor, names: list[str], template: str) -> Tensor:
        """CE + lambda L_ref: each prompted image must find its own frozen embedding in the batch; no temperature."""
        v_BE, frozen_BE = self.image(pixels), self.frozen_image(pixels)
        own_B = torch.arange(len(v_BE), device=v_BE.device)
        reference = F.cross_entropy(v_BE @ frozen_BE.T, own_B)
        ce = F.cross_entropy(self.scaled(v_BE, self.text(names, template)), labels)
        return ce + self.method.config.weight * reference


class PlainTCP(PlainPrompts):
    """A learned context, replaced inside the text tower by vectors made from frozen CLIP's embedding of the class."""

    def text(self, names: list[str], template: str) -> Tensor:
        return self.learned_text(names, template, self.frozen_text(names, template))

    def learned_text(self, names: list[str], template: str, knowledge_CE: Tensor) -> Tensor:
        """`[SOS][V1..VM][template from {} on, filled][EOS]`; block `layer` reads T_c in place of positions 1..M."""
        context_MD = self.method.context
        tail = template[template.index("{}") :]
        ids_CN, eos_C = self.tokens([tail.replace("{}", name) for name in names], placeholders=len(context_MD))
        class_CMD = self.method.tke(knowledge_CE).reshape(len(names), *context_MD.shape)
        x_CND = self.embed_text(self.splice(ids_CN, context_MD))
        for i, layer in enumerate(self.clip.text_model.encoder.layers):
            if i == self.method.config.layer:
                x_CND = self.replace(x_CND, class_CMD)
            x_CND = self.text_block(layer, x_CND)
        return self.text_head(x_CND, eos_C)

    def loss(self, pixels: Tensor, labels: Tensor, names: list[str], template: str) -> Tensor:
        """CE + lambda (1 - mean cosine to the class knowledge), the mean over all classes."""
        knowledge_CE = self.frozen_text(names, template)
        t_CE = self.learned_text(names, template, knowledge_CE)
        away = 1 - F.cosine_similarity(t_CE, knowledge_CE, dim=-1).mean()
        return F.cross_entropy(self.scaled(self.image(pixels), t_CE), labels) + self.method.config.weight * away
