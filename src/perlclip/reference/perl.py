"""PERL without shortcuts: `transformers`' own layers, every position, every row, nothing kept between calls.

The yardstick of `test_perl.py` and of the benchmarks, as `PLAIN` is for the other methods.
"""

import torch
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPModel

from perlclip.reference import multimodal as plain_multimodal
from perlclip.reference import prompts as plain_prompts

# The other methods, written apart from the library; PERL is below.
PLAIN = {
    "coop": plain_prompts.PlainCoOp,
    "cocoop": plain_prompts.PlainCoCoOp,
    "kgcoop": plain_prompts.PlainKgCoOp,
    "provp": plain_prompts.PlainProVP,
    "tcp": plain_prompts.PlainTCP,
    "maple": plain_multimodal.PlainMaPLe,
    "promptsrc": plain_multimodal.PlainPromptSRC,
    "mma": plain_multimodal.PlainMMA,
    "mmrl": plain_multimodal.PlainMMRL,
    "mmrl++": plain_multimodal.PlainMMRLpp,
}


class PlainPerl(nn.Module):
    """The paper's equations, word for word; prompts padded to the whole context."""

    def __init__(
        self, clip: CLIPModel, projectors: nn.ModuleDict, steps: int, depth, anchor: float, specific=(), variant=""
    ) -> None:
        super().__init__()
        self.clip, self.projectors = clip.requires_grad_(False).eval(), projectors
        self.steps, self.anchor, self.variant = steps, anchor, variant
        self.depths = depth if isinstance(depth, tuple) else (depth,)
        self.specific = specific

    def states(self, side: str, inputs: Tensor, rows_B: Tensor) -> list[Tensor]:
        """h0..hK as the paper writes them: J + (K+1)(L-J) whole blocks."""
        base = self.embed(side, inputs)
        for layer in self.layers(side)[: self.depths[0]]:
            base = self.call(layer, base, side)
        thoughts: dict[int, list[Tensor]] = {depth: [] for depth in self.depths}
        h = [self.pool(side, base, rows_B, thoughts)]
        for k in range(self.steps if side in self.projectors else 0):
            for depth in self.depths:
                thoughts[depth].append(self.think(side, k, depth, h[-1].float()))
            h.append(self.pool(side, base, rows_B, thoughts))
        return h

    def think(self, side: str, k: int, depth: int, h: Tensor) -> Tensor:
        """The shared projector's output, plus that of the depth's, the step's or the pair's own."""
        used = [self.projectors[side]]
        j = self.depths.index(depth)
        if self.variant in ("step", "layer", "layerstep"):
            used.append(self.specific[side][{"step": k, "layer": j, "layerstep": j * self.steps + k}[self.variant]])
        return sum(p.up(F.gelu(p.down(p.norm(h)))) for p in used)

    def pool(self, side: str, x: Tensor, rows_B: Tensor, thoughts: dict[int, list[Tensor]]) -> Tensor:
        count = len(thoughts[self.depths[0]])
        for i, layer in enumerate(self.layers(side)):
            if i in thoughts and count:
                rows = x if i == self.depths[0] else x[:, count:]
                x = torch.cat([torch.stack(thoughts[i], 1).to(x.dtype), rows], 1)
            if i >= self.depths[0]:
                x = self.call(layer, x, side)
        return x[torch.arange(len(x)), rows_B + count]

    def layers(self, side: str) -> nn.ModuleList:
        return getattr(self.clip, f"{side}_model").encoder.layers

    def embed(self, side: str, inputs: Tensor) -> Tensor:
        if side == "text":
            return self.clip.text_model.embeddings(input_ids=inputs)
        vision = self.clip.vision_model
        return vision.pre_layrnorm(vision.embeddings(inputs))

    @staticmethod
    def call(layer: nn.Module, x: Tensor, side: str) -> Tensor:
        n = x.shape[1]
        mask = torch.full((n, n), float("-inf"), device=x.device, dtype=x.dtype).triu(1)[None, None]
        out = layer(x, mask if side == "text" else None)
        return out[0] if isinstance(out, tuple) else out

    def project(self, side: str, h: Tensor) -> Tensor:
        norm = self.clip.text_model.final_layer_norm if side == "text" else self.clip.vision_model.post_layernorm
        head = self.clip.text_projection if side == "text" else self.clip.visual_projection
        return F.normalize(head(norm(h)).float(), dim=-1)

    def trajectory(self, pixels: Tensor, ids_CN: Tensor, eos_C: Tensor) -> Tensor:
        v = [
            self.project("vision", h) for h in self.states("vision", pixels, torch.zeros(len(pixels), dtype=torch.long))
        ]
        t = [self.project("text", h) for h in self.states("text", ids_CN, eos_C)]
        scale = self.clip.logit_scale.exp()
        return torch.stack([scale * v[min(k, len(v) - 1)] @ t[min(k, len(t) - 1)].T for k in range(self.steps + 1)])

    def loss(self, pixels: Tensor, labels: Tensor, ids_CN: Tensor, eos_C: Tensor) -> Tensor:
        h = self.states("vision", pixels, torch.zeros(len(pixels), dtype=torch.long))
        v0, v = self.project("vision", h[0]), self.project("vision", h[-1])
        t = self.project("text", self.states("text", ids_CN, eos_C)[-1])
        logits = self.clip.logit_scale.exp() * v @ t.T
        return F.cross_entropy(logits, labels) + self.anchor * (1 - F.cosine_similarity(v0, v).mean())


def padded(backbone, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """Ids padded to the whole context with EOS, and the first EOS position."""
    encoded = backbone.tokenizer(prompts, padding="max_length", max_length=backbone.context_length, return_tensors="pt")
    ids = encoded["input_ids"]
    return ids, (ids == backbone.tokenizer.eos_token_id).int().argmax(-1)


def byte_vocabulary() -> dict[str, int]:
    """CLIP's vocabulary without merges: one token a letter."""
    letters = sorted(ByteLevel.alphabet())
    tokens = letters + [letter + "</w>" for letter in letters] + ["<|startoftext|>", "<|endoftext|>"]
    return {token: i for i, token in enumerate(tokens)}
