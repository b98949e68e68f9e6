"""CoOp, CoCoOp, KgCoOp, ProVP and TCP without shortcuts: learned rows in one of the towers. Shapes: `base.py`."""

import torch
from torch import Tensor
from torch.nn import functional as F

from perlclip.reference.base import Plain, fill, insert, replace, unit


class PlainCoOp(Plain):
    """One learned context before every class name: `[SOS][V1..VM][name].[EOS]`; the template is not used."""

    def text(self, names: list[str], template: str) -> Tensor:
        """(C, E)."""
        return self.learned_text(names, self.method.context)

    def learned_text(self, names: list[str], context_MD: Tensor) -> Tensor:
        """(C, E), the same context before every name."""
        ids_CN, end_C = self.tokenise(fill("{}.", names), free=len(context_MD))
        return self.project("text", self.pool("text", self.blocks("text", self.embed_text(ids_CN, context_MD)), end_C))


class PlainCoCoOp(PlainCoOp):
    """CoOp whose context is shifted by a vector made from the image: all C sentences are encoded for each image."""

    def logits(self, pixels: Tensor, names: list[str], template: str, novel: bool = False) -> Tensor:
        """(B, C)."""
        context_MD, rows = self.method.context, []
        for v_E in self.image(pixels):
            shifted_MD = context_MD + self.method.meta(v_E.to(context_MD.dtype))
            rows.append(self.similarity(v_E[None], self.learned_text(names, shifted_MD)))
        return torch.cat(rows)


class PlainKgCoOp(PlainCoOp):
    """CoOp held near frozen CLIP's embedding of the template."""

    def loss(self, pixels: Tensor, labels: Tensor, names: list[str], template: str) -> Tensor:
        """CE + lambda (1 - mean cosine), the mean over all classes."""
        t_CE, frozen_CE = self.text(names, template), self.frozen_text(fill(template, names))
        away = 1 - F.cosine_similarity(t_CE, frozen_CE).mean()
        return F.cross_entropy(self.similarity(self.image(pixels), t_CE), labels) + float(self.config.weight) * away


class PlainTCP(PlainKgCoOp):
    """A learned context, replaced inside the text tower by vectors made from frozen CLIP's embedding of the class."""

    def text(self, names: list[str], template: str) -> Tensor:
        """`[SOS][V1..VM][template from {} on, filled][EOS]`; block `layer` reads T_c in the places of V."""
        context_MD, layer = self.method.context, self.config.layer
        knowledge_CE = unit(self.frozen_text(fill(template, names))).to(context_MD.dtype)
        class_CMD = self.method.tke(knowledge_CE).reshape(len(names), *context_MD.shape)
        ids_CN, end_C = self.tokenise(fill(template[template.index("{}") :], names), free=len(context_MD))
        x_CND = self.blocks("text", self.embed_text(ids_CN, context_MD), 0, layer)
        x_CND = self.blocks("text", replace(x_CND, self.first, class_CMD), layer)
        return self.project("text", self.pool("text", x_CND, end_C))


class PlainProVP(Plain):
    """Learned vectors between CLS and the patches of every image block, each mixed with what the block before made."""

    def before(self, side: str, index: int, x_XND: Tensor) -> Tensor:
        """Inserted before the first block; later alpha of the old rows and 1 - alpha of the new."""
        if side == "text":
            return x_XND
        prompt_MD, alpha, first = self.method.prompts[index], self.config.alpha, self.first
        if index == 0:
            return insert(x_XND, first, prompt_MD)
        return replace(x_XND, first, alpha * x_XND[:, first : first + len(prompt_MD)] + (1 - alpha) * prompt_MD)

    def loss(self, pixels: Tensor, labels: Tensor, names: list[str], template: str) -> Tensor:
        """CE + lambda L_ref: each prompted image must find its own frozen embedding in the batch; no temperature."""
        v_BE, frozen_BE = self.image(pixels), unit(self.frozen_image(pixels))
        own_B = torch.arange(len(v_BE), device=v_BE.device)
        classification = F.cross_entropy(self.similarity(v_BE, self.text(names, template)), labels)
        return classification + float(self.config.weight) * F.cross_entropy(v_BE @ frozen_BE.T, own_B)
