"""Ridge regression of one-hot labels on image embeddings, in closed form, for all strengths at once.

    minimise |Y - X W - 1 bᵀ|² + lambda |W|²

The intercept b is not penalised, so X and Y are centred, and with the thin decomposition X = U S Vᵀ

    W = V diag(s / (s² + lambda)) Uᵀ Y         H = U diag(s² / (s² + lambda)) Uᵀ + 11ᵀ / N

come from one eigendecomposition, of XᵀX or XXᵀ, whichever is smaller. Answers for samples that were not in the fit are
exact without another one: for a group g left out together, y_g - f₋g(x_g) = (I - H_gg)⁻¹ (y_g - f(x_g)).

All of it in float64 on the CPU, in one thread: a hundred classes of sixteen images take a fraction of a second, and on
a busy machine threads that wait for each other take a hundred times as long. So the bits do not depend on their number.

Shapes: N samples, E embedding width, C classes, R the smaller of N and E, L strengths, g samples of one group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from perlclip.errors import PerlclipError
from perlclip.threads import one_thread


@dataclass(frozen=True)
class Ridge:
    """Embeddings and labels decomposed, from which the solution for any strength is a product away."""

    u_NR: Tensor
    s_R: Tensor
    v_ER: Tensor
    y_NC: Tensor  # centred
    center_E: Tensor
    mean_C: Tensor

    # Strengths, and weights of the scores beside the texts' logits, to choose from.
    STRENGTHS: ClassVar[tuple[float, ...]] = tuple(10 ** (k / 2) for k in range(-4, 3))
    SCALES: ClassVar[tuple[float, ...]] = (0.0, *(2.0**k for k in range(-2, 7)))

    @classmethod
    @one_thread()
    def of(cls, x_NE: Tensor, labels_N: Tensor, classes: int) -> "Ridge":
        """From unit embeddings and their labels; a class without a sample is never the answer."""
        if not len(x_NE) or len(x_NE) != len(labels_N):
            raise PerlclipError(f"ridge regression needs a label for each embedding, got {len(labels_N)}, {len(x_NE)}")
        x_NE = x_NE.detach().cpu().double()
        y_NC = F.one_hot(labels_N.cpu().long(), classes).double()
        center_E, mean_C = x_NE.mean(0), y_NC.mean(0)
        x_NE, y_NC = x_NE - center_E, y_NC - mean_C
        wide = x_NE.shape[1] > len(x_NE)
        d_R, basis = torch.linalg.eigh(x_NE @ x_NE.T if wide else x_NE.T @ x_NE)
        kept = d_R > d_R[-1].clamp(min=1e-12) * 1e-12  # the rest is rounding: samples that others make up, the centre
        d_R, basis = d_R[kept], basis[:, kept]
        s_R = d_R.sqrt()
        u_NR, v_ER = (basis, x_NE.T @ basis / s_R) if wide else (x_NE @ basis / s_R, basis)
        return cls(u_NR, s_R, v_ER, y_NC, center_E, mean_C)

    @one_thread()
    def solution(self, strength: float) -> tuple[Tensor, Tensor]:
        """Weight (C, E) and bias (C,): scores of an embedding x are weight x + bias, those of one sample sum to 1."""
        weight_CE = self.y_NC.T @ (self.u_NR * (self.s_R / (self.s_R.square() + _positive(strength)))) @ self.v_ER.T
        return weight_CE, self.mean_C - weight_CE @ self.center_E

    @one_thread()
    def left_out(self, strengths: Sequence[float], groups_n: Tensor, asked_n: Tensor | None = None) -> Tensor:
        """Scores of each sample from a fit without its group, (L, n, C); of all samples, or of groups among them."""
        asked_n = torch.arange(len(self.y_NC)) if asked_n is None else asked_n
        projected_RC = self.u_NR.T @ self.y_NC
        scores_LnC = torch.empty(len(strengths), len(asked_n), self.y_NC.shape[1], dtype=torch.float64)
        for at_Gg in groups_of(groups_n):
            place_Gg = asked_n[at_Gg]
            u_GgR, y_GgC = self.u_NR[place_Gg], self.y_NC[place_Gg]
            eye = torch.eye(place_Gg.shape[1], dtype=torch.float64) - 1 / len(self.u_NR)
            for scores_nC, strength in zip(scores_LnC, strengths, strict=True):
                shrunk_GgR = u_GgR * (self.s_R.square() / (self.s_R.square() + _positive(strength)))
                rest_GgC = y_GgC - shrunk_GgR @ projected_RC
                apart_GgC = torch.linalg.solve(eye - shrunk_GgR @ u_GgR.mT, rest_GgC)
                scores_nC[at_Gg] = y_GgC - apart_GgC + self.mean_C
        return scores_LnC


def groups_of(groups_N: Tensor) -> Iterator[Tensor]:
    """Where the samples of each group are, (G, g) for the groups of one size g."""
    order_N = groups_N.cpu().argsort(stable=True)
    sizes = torch.unique_consecutive(groups_N.cpu()[order_N], return_counts=True)[1]
    members = torch.split(order_N, sizes.tolist())
    for size in sizes.unique().tolist():
        yield torch.stack([place for place in members if len(place) == size])


def _positive(strength: float) -> float:
    if not strength > 0:
        raise PerlclipError(f"the strength of ridge regression must be positive, got {strength}")
    return strength
