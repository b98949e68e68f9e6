"""PERL as the paper writes it: Eq. 1 to 4, the trajectory and the loss; variants below."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from perlclip.reference.base import Plain, insert, replace


class PlainPerl(Plain):
    """A frozen CLIP that thinks K times before it answers.

    Each tower is cut at depth J into a base B (blocks 1..J) and a refinement R (blocks J+1..L). With S = B(x),

        h0  = Pool(R(S))                                               the state at CLS or EOS: zero-shot CLIP
        phi = W2 GELU(W1 LN(h) + b1) + b2                   Eq. 1      all that is trained, one phi per tower
        zk  = phi(h(k-1))                                   Eq. 2      the thought of step k = 1..K
        hk  = Pool(R(z1 ‖ … ‖ zk ‖ S))                      Eq. 3      all thoughts so far, before the sequence
        L   = CE(tau vK TKᵀ, y) + lambda (1 - cos(v0, vK))  Eq. 4      v = pi(h) of an image, T = pi(h) of the classes
    """

    def states(self, side: str, x_XND: Tensor, row_X: Tensor) -> list[Tensor]:
        """h0, …, hK: J + (K+1)(L-J) blocks, every row of each. A tower without a projector stays at h0."""
        assert self.config.variant in ("shared", "early"), "the others are PlainPerlVariants"
        (J,), K = self.config.depths(side), self.config.steps
        S = self.blocks(side, x_XND, 0, J)
        h, z = [self.pool(side, self.blocks(side, S, J), row_X)], []
        for k in range(1, K + 1 if side in self.method.projectors else 1):
            z.append(self.phi(self.method.projectors[side], h[k - 1]))
            thought = insert(S, 0, torch.stack(z, 1))
            h.append(self.pool(side, self.blocks(side, thought, J), row_X + k))  # CLS and EOS have moved by k rows
        return h + [h[0]] * (K + 1 - len(h))

    def phi(self, projector: Any, h_XD: Tensor) -> Tensor:
        """Eq. 1, in float32 whatever the tower computes in."""
        z_XD: Tensor = projector.up(F.gelu(projector.down(projector.norm(h_XD.float()))))
        return z_XD

    def text_states(self, names: list[str], template: str) -> list[Tensor]:
        """Of each class, read at the end-of-text row."""
        ids_CN, end_C = self.tokenise(self.sentences(names, template))
        return self.states("text", self.embed_text(ids_CN), end_C)

    def image_states(self, pixels: Tensor) -> list[Tensor]:
        """Of each image, read at the class token."""
        first_B = torch.zeros(len(pixels), dtype=torch.long, device=pixels.device)
        return self.states("vision", self.embed_image(pixels), first_B)

    def text(self, names: list[str], template: str) -> Tensor:
        """T^(K), (C, E)."""
        return self.project("text", self.text_states(names, template)[-1])

    def image(self, pixels: Tensor) -> Tensor:
        """v^(K), (B, E)."""
        return self.project("vision", self.image_states(pixels)[-1])

    def trajectory(self, pixels: Tensor, names: list[str], template: str) -> Tensor:
        """(K+1, B, C) logits of the answer after each step k, both towers taken at the same step."""
        v = [self.project("vision", h) for h in self.image_states(pixels)]
        t = [self.project("text", h) for h in self.text_states(names, template)]
        return torch.stack([self.read_out(v[: k + 1], t[: k + 1]) for k in range(len(v))])

    def read_out(self, v: list[Tensor], t: list[Tensor]) -> Tensor:
        """(B, C) logits of steps 0..k as one: step k's in the paper, or a mean over the steps."""
        l_KBC = torch.stack([self.similarity(self.centered(v_BE), t_CE) for v_BE, t_CE in zip(v, t, strict=True)])
        if self.config.readout == "last":
            return l_KBC[-1]
        weights_K = torch.arange(1.0, len(v) + 1) if self.config.readout == "rising" else torch.ones(len(v))
        return torch.einsum("k,kbc->bc", weights_K / weights_K.sum(), l_KBC.softmax(-1)).log()

    def logits(self, pixels: Tensor, names: list[str], template: str, novel: bool = False) -> Tensor:
        """(B, C), the answer after step K."""
        return self.trajectory(pixels, names, template)[-1]

    def loss(self, pixels: Tensor, labels: Tensor, names: list[str], template: str) -> Tensor:
        """Eq. 4."""
        h = self.image_states(pixels)
        v0_BE, vK_BE = self.project("vision", h[0]), self.project("vision", h[-1])
        share = self.config.loss_center / self.config.center if self.config.center else 0.0
        logits_BC = self.similarity(vK_BE - share * self.method.center_E, self.text(names, template))
        classification = F.cross_entropy(float(self.config.loss_scale) * logits_BC, labels)
        anchor = 1 - F.cosine_similarity(v0_BE, vK_BE).mean()
        return classification + float(self.config.anchor) * anchor


class PlainPerlVariants(PlainPerl):
    """Several depths, and projectors of their own for each step, depth or both, added to the shared one's output."""

    def states(self, side: str, x_XND: Tensor, row_X: Tensor) -> list[Tensor]:
        """h0, …, hK; thoughts enter at the first depth, and before each later one its own take their rows."""
        depths, K = self.config.depths(side), self.config.steps
        S = self.blocks(side, x_XND, 0, depths[0])
        h: list[Tensor] = [self.pool(side, self.blocks(side, S, depths[0]), row_X)]
        z: list[list[Tensor]] = [[] for _ in depths]
        for k in range(1, K + 1 if side in self.method.projectors else 1):
            for j, mine in enumerate(z):
                mine.append(torch.stack([self.phi(own, h[-1]) for own in self.used(side, j, k)]).sum(0))
            x_XND = insert(S, 0, torch.stack(z[0], 1))
            for mine, (start, stop) in zip(z, pairwise((*depths, None)), strict=True):
                x_XND = self.blocks(side, replace(x_XND, 0, torch.stack(mine, 1)), start, stop)
            h.append(self.pool(side, x_XND, row_X + k))
        return h + [h[0]] * (K + 1 - len(h))

    def used(self, side: str, j: int, k: int) -> list[Any]:
        """The projectors of step k at the depth number j."""
        place = {"step": k - 1, "layer": j, "layerstep": j * self.config.steps + k - 1}.get(self.config.variant)
        shared = self.method.projectors[side]
        return [shared] if place is None else [shared, self.method.specific[side][place]]
