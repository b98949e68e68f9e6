"""The frozen CLIP that every plain form steps into, on `transformers`' own layers.

Sentences fill the whole context, every row of every block is computed, text is encoded anew on every call.

The model is a CLIP (or MetaCLIP 2), or a SigLIP, which has no class token but a pooling head over the patches, no start
of text, no mask, and reads a text at its last row: there, rows that a method adds stand before the sequence.

Shapes: B images, C classes, X either; N rows of a tower; M or K learned rows; D width of the tower at hand, E shared
width. A side is "text" or "vision".
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPModel, SiglipModel


class Plain:
    """Zero-shot CLIP, in steps that the methods override where they depart from it."""

    shift = 0  # rows that a method inserts before the words, by which the end-of-text row moves

    def __init__(self, clip: CLIPModel | SiglipModel, tokenizer: Any, method: Any) -> None:
        self.clip, self.tokenizer = clip.requires_grad_(False).eval(), tokenizer
        self.method, self.config = method, method.config
        self.probed = hasattr(clip.vision_model, "head")  # a SigLIP
        self.first = 0 if self.probed else 1  # where words or patches begin
        self.towers = {"text": clip.text_model, "vision": clip.vision_model}

    def text(self, names: list[str], template: str) -> Tensor:
        """(C, E) unit class embeddings, read at the end-of-text row."""
        ids_CN, end_C = self.tokenise(self.sentences(names, template))
        x_CND = self.blocks("text", self.embed_text(ids_CN))
        return self.project("text", self.pool("text", x_CND, end_C + self.shift))

    def image(self, pixels: Tensor) -> Tensor:
        """(B, E) unit image embeddings, read at the class token or by the pooling head."""
        first_B = torch.zeros(len(pixels), dtype=torch.long, device=pixels.device)
        return self.project("vision", self.pool("vision", self.blocks("vision", self.embed_image(pixels)), first_B))

    def logits(self, pixels: Tensor, names: list[str], template: str, novel: bool = False) -> Tensor:
        """(B, C) cosines times CLIP's scale; `novel` classes were not trained on, which only MMRL and MMRL++ ask."""
        return self.similarity(self.centered(self.image(pixels)), self.text(names, template))

    def centered(self, v_BE: Tensor) -> Tensor:
        """Without the center, where a recipe of ours takes one off."""
        return v_BE - self.method.center_E if self.method.center else v_BE

    def loss(self, pixels: Tensor, labels: Tensor, names: list[str], template: str) -> Tensor:
        """Cross-entropy over the classes."""
        return F.cross_entropy(self.logits(pixels, names, template), labels)

    # The way through a tower.

    def sentences(self, names: list[str], template: str) -> list[str]:
        """What is said of each class; a template in the method's own settings goes first."""
        return fill(getattr(self.config, "template", "") or template, names)

    def tokenise(self, sentences: list[str], free: int = 0) -> tuple[Tensor, Tensor]:
        """(C, N) ids that fill the context, `free` places before the words; (C,) the first end-of-text, or the end."""
        length = self.clip.config.text_config.max_position_embeddings - free
        sentences = [sentence.lower() for sentence in sentences] if self.probed else sentences
        ids_CN = self.tokenizer(sentences, padding="max_length", max_length=length, return_tensors="pt")["input_ids"]
        ids_CN = torch.cat([ids_CN[:, :1].expand(-1, free), ids_CN], 1).to(self.clip.device)
        if self.probed:
            return ids_CN, torch.full_like(ids_CN[:, 0], ids_CN.shape[1] - 1)
        return ids_CN, (ids_CN == self.tokenizer.eos_token_id).int().argmax(-1)

    def embed_text(self, ids_CN: Tensor, words_MD: Tensor | None = None) -> Tensor:
        """(C, N, D) words with their positions; learned words, if any, stand in the first M places for words."""
        embeddings = self.towers["text"].embeddings
        words_CND = embeddings.token_embedding(ids_CN)
        if words_MD is not None:
            words_CND = replace(words_CND, self.first, words_MD)
        x_CND: Tensor = embeddings(inputs_embeds=words_CND)
        return x_CND

    def embed_image(self, pixels: Tensor) -> Tensor:
        """(B, N, D) class token and patches with their positions, after the first norm."""
        return self.first_norm(self.towers["vision"].embeddings(pixels))

    def first_norm(self, x_BND: Tensor) -> Tensor:
        """The norm before the first block of a CLIP's image tower."""
        return x_BND if self.probed else self.towers["vision"].pre_layrnorm(x_BND)

    def blocks(self, side: str, x_XND: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Blocks `start` to `stop` (from 0, the last not included), one after the other."""
        for index in range(len(self.towers[side].encoder.layers))[start:stop]:
            x_XND = self.block(side, index, self.before(side, index, x_XND))
        return x_XND

    def before(self, side: str, index: int, x_XND: Tensor) -> Tensor:
        """The input of a block, given the output of the one below it."""
        return x_XND

    def block(self, side: str, index: int, x_XND: Tensor) -> Tensor:
        """One block, under a causal mask in a CLIP's text tower."""
        n, masked = x_XND.shape[1], side == "text" and not self.probed
        causal_NN = torch.full((n, n), float("-inf"), device=x_XND.device, dtype=x_XND.dtype).triu(1)
        out = self.towers[side].encoder.layers[index](x_XND, causal_NN[None, None] if masked else None)
        rows_XND: Tensor = out[0] if isinstance(out, tuple) else out  # a tuple in some versions of `transformers`
        return rows_XND

    def pool(self, side: str, x_XND: Tensor, row_X: Tensor) -> Tensor:
        """(X, D) pooled states: a row of each sequence, or what a pooling head makes of the patches, its last rows."""
        if side == "text" or not self.probed:
            return read(x_XND, row_X)
        patches = len(self.towers["vision"].embeddings.position_embedding.weight)
        h_XD: Tensor = self.towers["vision"].head(self.towers["vision"].post_layernorm(x_XND[:, -patches:]))
        return h_XD

    def project(self, side: str, h_XD: Tensor) -> Tensor:
        """(X, E) unit embeddings of pooled states: the tower's last norm, its head; a pooling head was all of that."""
        if side == "text":
            head = self.towers["text"].head if self.probed else self.clip.text_projection
            return unit(head(self.towers["text"].final_layer_norm(h_XD)))
        return unit(h_XD if self.probed else self.clip.visual_projection(self.towers["vision"].post_layernorm(h_XD)))

    def similarity(self, v_BE: Tensor, t_CE: Tensor) -> Tensor:
        """(B, C) cosines times the model's scale; a softmax over classes does not see SigLIP's bias."""
        z_BC: Tensor = self.clip.logit_scale.exp() * v_BE @ t_CE.T
        return z_BC

    # What methods are held near: `transformers`' own forward passes, not of unit length.

    @torch.no_grad()
    def frozen_text(self, sentences: list[str]) -> Tensor:
        """(C, E)."""
        t_CE: Tensor = self.towers["text"](self.tokenise(sentences)[0]).pooler_output
        return t_CE if self.probed else self.clip.text_projection(t_CE)

    @torch.no_grad()
    def frozen_image(self, pixels: Tensor) -> Tensor:
        """(B, E)."""
        v_BE: Tensor = self.towers["vision"](pixels).pooler_output
        return v_BE if self.probed else self.clip.visual_projection(v_BE)


def fill(template: str, names: list[str]) -> list[str]:
    """The template said of each name."""
    return [template.replace("{}", name) for name in names]


def unit(x_XE: Tensor) -> Tensor:
    """Unit length, in float32 whatever the towers compute in."""
    return F.normalize(x_XE.float(), dim=-1)


def read(x_XND: Tensor, row_X: Tensor) -> Tensor:
    """(X, D), one row of each sequence."""
    return x_XND[torch.arange(len(x_XND), device=x_XND.device), row_X]


def insert(x_XND: Tensor, first: int, rows: Tensor) -> Tensor:
    """New rows, (K, D) or (X, K, D), at `first`; those that were there move on."""
    return torch.cat([x_XND[:, :first], rows.to(x_XND.dtype).expand(len(x_XND), -1, -1), x_XND[:, first:]], 1)


def replace(x_XND: Tensor, first: int, rows: Tensor) -> Tensor:
    """The rows from `first` on overwritten by (K, D) or (X, K, D)."""
    end = first + rows.shape[-2]
    return insert(torch.cat([x_XND[:, :first], x_XND[:, end:]], 1), first, rows)
