"""Discriminant analysis of image embeddings, in closed form: class means, and how images of one class differ.

Every class is a Gaussian round its mean m, all with one covariance. A class's score is how much more probable it makes
an image x than a class in the middle of all of them would, where 0 is:

    r(x) = mᵀ P x - ½ mᵀ P m          P = ((1 - s) S / n + s v I)⁻¹

S is the scatter of the shots round their class's mean, n its degrees of freedom (shots less classes), v the mean
variance, and s the `strength` of the pull towards a covariance that is the same in all directions. Scores of shots that
were not in the fit are exact without another one, for given s v and n: with W the rows x - m of a group of g shots that
is left out together, of a class that has c, S loses Wᵀ(I + 11ᵀ / (c - g)) W, and by Woodbury's identity a distance
becomes

    dᵀ P' d = dᵀ P d + dᵀ P Wᵀ (n / (1 - s) (I - 11ᵀ / c) - W P Wᵀ)⁻¹ W P d

A mean of fewer shots is further off, and only the own class of a shot that is left out has fewer: what that adds to the
distance on average is taken off again (`_made_up`), or two shots of each class would seem to say nothing at all.

All of it in float64 on the CPU (but for large matrices), in one thread, like ridge regression (`regression.py`), whose
interface it has. A fit by one strength is a Cholesky root; only what an adapter keeps takes a decomposition.

Shapes: N shots, n of them asked for, E embedding width, C classes, R directions, L strengths, G groups of g shots, X
anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from perlclip.errors import PerlclipError
from perlclip.heads.regression import groups_of
from perlclip.threads import one_thread, side_by_side

LEAST = 1e-6  # strength
COPIES = 1e-3  # of the classes' mean squared distance from the centre: shots of one class differ by that, at least
LARGE = 512  # from that on a scatter matrix is float32's, in half of the time; strength bears the rounding
DIRECTIONS = 32  # that an adapter keeps; in the others images of one class are taken to differ by `rest`


@dataclass(frozen=True)
class Gaussians:
    """Class means, and the covariance round them: what a head is made of."""

    means_CE: Tensor  # from the centre; 0 for a class without a shot
    center_E: Tensor  # the mean of the classes' means
    directions_RE: Tensor  # orthogonal; their lengths are standard deviations
    spread: float  # v, the mean variance of an embedding's numbers round their class's mean
    rest: float = 0.0  # the same in directions that are not kept

    def solution(self, strength: float) -> tuple[Tensor, Tensor]:
        """Weight (C, E) and bias (C,): scores of an embedding x are weight x + bias."""
        return self.scores_of(self.means_CE, strength)

    def scores_of(self, means_CE: Tensor, strength: float) -> tuple[Tensor, Tensor]:
        """The same for classes with these means."""
        weight_CE = self.divided(means_CE, strength)
        return weight_CE, -weight_CE @ self.center_E - (weight_CE * means_CE).sum(-1) / 2

    def scores(self, x_NE: Tensor, means_CE: Tensor, strengths: Sequence[float]) -> Tensor:
        """Scores of embeddings for classes with these means, (L, N, C), with what strengths share done once."""
        x_NE = x_NE - self.center_E
        x_NR, m_CR = (rows @ self.directions_RE.T for rows in (x_NE, means_CE))
        plain_NC, found = x_NE @ means_CE.T - means_CE.square().sum(-1) / 2, []
        for strength in strengths:
            beside, less_R = self._inverse(strength)
            found.append(beside * plain_NC - (x_NR * less_R) @ m_CR.T + m_CR.square() @ less_R / 2)
        return torch.stack(found)

    def divided(self, rows_XE: Tensor, strength: float) -> Tensor:
        """Rows times P = ((1 - strength) (DᵀD + rest beside D) + strength spread I)⁻¹; directions D are orthogonal."""
        beside, less_R = self._inverse(strength)
        return beside * rows_XE - rows_XE @ self.directions_RE.T * less_R @ self.directions_RE

    def _inverse(self, strength: float) -> tuple[float, Tensor]:
        """a and b in P = a I - Dᵀ diag(b) D."""
        own, floor = 1 - strength, between(strength) * self.spread
        variance_R, beside = self.directions_RE.square().sum(-1), 1 / (own * self.rest + floor)
        return beside, (beside - 1 / (own * variance_R + floor)) / variance_R


@dataclass(frozen=True)
class Discriminant:
    """The fit to shots, and what leaving some of them out takes."""

    rest_NE: Tensor  # of each shot, from its class's mean
    labels_N: Tensor
    means_CE: Tensor  # from the centre
    center_E: Tensor
    free: int  # degrees of freedom
    spread: float

    STRENGTHS: ClassVar[tuple[float, ...]] = (0.2, 0.35, 0.5, 0.7, 0.85, 0.95)
    SCALES: ClassVar[tuple[float, ...]] = (0.0, *(2.0**k for k in range(-8, 2)))

    @classmethod
    def of(cls, x_NE: Tensor, labels_N: Tensor, classes: int) -> "Discriminant":
        """From unit embeddings and their labels."""
        if not len(x_NE) or len(x_NE) != len(labels_N):
            raise PerlclipError(f"a head needs a label for each embedding, got {len(labels_N)}, {len(x_NE)}")
        x_NE, labels_N = x_NE.detach().cpu().double(), labels_N.cpu().long()
        count_C = torch.bincount(labels_N, minlength=classes)
        there_C = count_C > 0
        sums_CE = x_NE.new_zeros(classes, x_NE.shape[1]).index_add(0, labels_N, x_NE)
        means_CE = sums_CE / count_C.clamp(min=1)[:, None]
        center_E = means_CE[there_C].mean(0)
        means_CE = (means_CE - center_E) * there_C[:, None]
        rest_NE, free = x_NE - center_E - means_CE[labels_N], max(1, len(x_NE) - int(there_C.sum()))
        # One shot of each class, or copies of it, say nothing about how images of one class differ.
        within, between_C = rest_NE.square().sum().item() / free, means_CE.square().sum(-1)[there_C]
        spread = max(within, COPIES * between_C.mean().item()) if len(x_NE) > len(between_C) else 0.0
        spread = (spread or between_C.mean().item() or 1.0) / x_NE.shape[1]
        return cls(rest_NE, labels_N, means_CE, center_E, free, spread)

    @property
    def wide(self) -> bool:
        """Whether there are fewer shots than numbers of each."""
        return self.rest_NE.shape[1] > len(self.rest_NE)

    @cached_property
    def scatter(self) -> Tensor:
        """S / n, (E, E), or where that is smaller, the products of the shots' differences, (N, N)."""
        rows_NE = self.rest_NE.float() if min(self.rest_NE.shape) >= LARGE else self.rest_NE
        return (rows_NE @ rows_NE.T if self.wide else rows_NE.T @ rows_NE) / self.free

    @one_thread()
    def solution(self, strength: float) -> tuple[Tensor, Tensor]:
        """Weight (C, E) and bias (C,): scores of an embedding x are weight x + bias."""
        root, floor = self._root(strength)
        rows_CX = self.means_CE @ self.rest_NE.T if self.wide else self.means_CE
        weight_CE = torch.cholesky_solve(rows_CX.T.to(root), root).T.double()
        if self.wide:
            weight_CE = (self.means_CE - weight_CE @ self.rest_NE / self.free) / floor
        return weight_CE, -weight_CE @ self.center_E - (weight_CE * self.means_CE).sum(-1) / 2

    @one_thread()
    def left_out(self, strengths: Sequence[float], groups_n: Tensor, asked_n: Tensor | None = None) -> Tensor:
        """Scores of each shot from a fit without its group, of shots of one class, (L, n, C).

        Of all shots, or of those asked for, whose groups are given then.
        """
        asked_n = torch.arange(len(self.rest_NE)) if asked_n is None else asked_n
        labels_n, shots_C = self.labels_N[asked_n], torch.bincount(self.labels_N, minlength=len(self.means_CE))
        rows_XE = torch.cat([self.rest_NE[asked_n], self.means_CE])  # a shot is its mean and the rest
        along_XR = rows_XE @ self.rest_NE.T / self.free**0.5 if self.wide else rows_XE
        self.scatter  # noqa: B018  made now, once for all threads
        groups = [(at_Gg, _Left(labels_n[at_Gg[:, 0]], at_Gg.shape[1], shots_C)) for at_Gg in groups_of(groups_n)]
        plain = [_Products.of(rows_XE, at_Gg, len(asked_n)) for at_Gg, _ in groups] if self.wide else []
        scores_LnC = torch.empty(len(strengths), len(asked_n), len(self.means_CE), dtype=torch.float64)
        own_Ln, others_n = scores_LnC.new_zeros(scores_LnC.shape[:2]), scores_LnC.new_zeros(len(asked_n))
        for at_Gg, left in groups:
            others_n[at_Gg] = left.others_G1.expand(at_Gg.shape).masked_fill(left.gone_G1, 0)

        def of(strength: float) -> list[tuple[Tensor, Tensor]]:
            root, floor = self._root(strength)
            solved_XR = torch.linalg.solve_triangular(root, along_XR.T.to(root), upper=False).T
            dots = [_Products.of(solved_XR, at_Gg, len(asked_n)) for at_Gg, _ in groups]
            if self.wide:
                dots = [all_of_it.less(dot, floor) for all_of_it, dot in zip(plain, dots, strict=True)]
            return [left.scores(dot, 1 - strength) for (_, left), dot in zip(groups, dots, strict=True)]

        for scores_nC, own_n, found in zip(scores_LnC, own_Ln, side_by_side(of, strengths), strict=True):
            for (at_Gg, _), (scores_GgC, own_Gg) in zip(groups, found, strict=True):
                scores_nC[at_Gg], own_n[at_Gg] = scores_GgC, own_Gg
        return _made_up(scores_LnC, own_Ln, others_n, labels_n, shots_C)

    def _root(self, strength: float) -> tuple[Tensor, float]:
        """The lower root of P's inverse, and s v; of wide ones the root of A in P = (I - Rᵀ A⁻¹ R / n) / (s v).

        A = R Rᵀ / n + s v / (1 - s), with R the shots' differences.
        """
        own, floor = 1 - strength, between(strength) * self.spread
        matrix = self.scatter.clone() if self.wide else self.scatter * own
        matrix.diagonal().add_(floor / own if self.wide else floor)
        return torch.linalg.cholesky(matrix), floor

    @one_thread()
    def kept(self) -> Gaussians:
        """What an adapter has of it, in numbers that a file holds: so saved and loaded it answers the same."""
        d_R, basis = (t.double() for t in torch.linalg.eigh(self.scatter))
        some = d_R > d_R[-1].clamp(min=1e-12) * 1e-12
        d_R, basis = d_R[some].flip(0), basis[:, some].flip(1)[:, :DIRECTIONS]
        rows_RE = basis.T @ self.rest_NE / self.free**0.5 if self.wide else basis.T * d_R[:DIRECTIONS].sqrt()[:, None]
        means_CE, directions_RE = (t.half().double().contiguous() for t in (self.means_CE, rows_RE))
        directions_RE = directions_RE[directions_RE.any(-1)]  # some are too short for float16
        rest = d_R[DIRECTIONS:].sum().item() / max(1, self.rest_NE.shape[1] - len(directions_RE))
        return Gaussians(means_CE, self.center_E.float().double(), directions_RE, self.spread, rest)


def _made_up(scores_LnC: Tensor, own_Ln: Tensor, others_n: Tensor, labels_n: Tensor, shots_C: Tensor) -> Tensor:
    """Without the mean's error that is a left out shot's own class's alone, as it has fewer shots than it will.

    A mean of c shots is off by v / c, squared and on average, with v what a shot is off by; distances from it are
    v (1 + 1 / c), by which v is known.
    """
    there_n = others_n > 0
    if not there_n.any():
        return scores_LnC
    v_L = (own_Ln * others_n / (others_n + 1))[:, there_n].mean(1)
    lack_n = torch.where(there_n, 1 / others_n.clamp(min=1) - 1 / shots_C[labels_n], 0.0)
    return scores_LnC.scatter_add_(-1, labels_n.expand(own_Ln.shape)[..., None], (v_L[:, None] * lack_n)[..., None] / 2)


@dataclass(frozen=True)
class _Products:
    """aᵀPb of shots' differences w from their class's mean, and of the means m; a shot x is the sum of both."""

    ww_Ggg: Tensor
    wm_GgC: Tensor
    mm_CC: Tensor

    @classmethod
    def of(cls, rows_XE: Tensor, at_Gg: Tensor, shots: int) -> "_Products":
        """With P the unit matrix, of rows that have w of so many shots, and then m."""
        w_GgE, m_CE = rows_XE[at_Gg], rows_XE[shots:]
        return cls((w_GgE @ w_GgE.mT).double(), (w_GgE @ m_CE.T).double(), (m_CE @ m_CE.T).double())

    def less(self, along: "_Products", floor: float) -> "_Products":
        """With the inverse covariance of a wide fit: (all - what lies along the shots' differences) / floor."""
        return _Products(*((a - b) / floor for a, b in zip(vars(self).values(), vars(along).values(), strict=True)))


class _Left:
    """Groups of one size g that are left out, each of a class of its own."""

    def __init__(self, label_G: Tensor, size: int, shots_C: Tensor) -> None:
        there_C, c_G = shots_C > 0, shots_C[label_G].double()
        self.label_G, self.label_Gg1 = label_G, label_G[:, None, None].expand(-1, size, 1)
        self.nowhere_C = ~there_C
        self.gone_G1 = (c_G == size)[:, None]  # the class has no other shots
        self.others_G1 = (c_G[:, None] - size).clamp(min=1)
        classes = int(there_C.sum())
        # The centre moves by the mean's shift over the classes, or by what the class itself was of it.
        self.by_w_G1 = torch.where(self.gone_G1, 0.0, 1 / (self.others_G1 * classes))
        self.by_m_G1 = torch.where(self.gone_G1, 1.0 / max(1, classes - 1), 0.0 * self.others_G1)
        share_G11 = torch.where(self.gone_G1, 0.0 * self.others_G1, 1 / c_G[:, None])[..., None]
        eye_gg = torch.eye(size, dtype=torch.float64)
        self.inner_Ggg = max(1, int(shots_C.sum()) - classes) * (eye_gg - share_G11)

    def scores(self, dot: _Products, own: float) -> tuple[Tensor, Tensor]:
        """(G, g, C), and distances from the own class's mean; `own` is the share of the scatter in the covariance."""
        inner_Ggg = self.inner_Ggg / own - dot.ww_Ggg

        def distance(dd_GgX: Tensor, dw_GgXg: Tensor) -> Tensor:
            """dᵀP'd, from dᵀPd and dᵀPWᵀ."""
            dw_GYg = dw_GgXg.flatten(1, 2)
            more_GY: Tensor = (dw_GYg * torch.linalg.solve(inner_Ggg, dw_GYg.mT).mT).sum(-1)
            return dd_GgX + more_GY.view(dd_GgX.shape)

        ww_Gg, mm_C = dot.ww_Ggg.diagonal(dim1=-2, dim2=-1), dot.mm_CC.diagonal()
        wm_Gg, mm_G1 = dot.wm_GgC.gather(-1, self.label_Gg1)[..., 0], mm_C[self.label_G, None]  # with the own mean
        xx_Gg, xm_GgC = ww_Gg + 2 * wm_Gg + mm_G1, dot.wm_GgC + dot.mm_CC[self.label_G, None]
        xw_Ggg, xm_Gg = dot.ww_Ggg + wm_Gg[:, None], wm_Gg + mm_G1
        ws_Gg, wss_G1 = dot.ww_Ggg.sum(-1), dot.ww_Ggg.sum((-1, -2))[:, None]
        far_GgC = distance(
            xx_Gg[..., None] - 2 * xm_GgC + mm_C, xw_Ggg[:, :, None] - dot.wm_GgC.transpose(1, 2)[:, None]
        )
        # d = w_i + the sum of all w over the shots that stay: from the mean of these.
        a_G1 = 1 / self.others_G1
        dd_Gg = ww_Gg + 2 * a_G1 * ws_Gg + a_G1.square() * wss_G1
        own_Gg1 = distance(dd_Gg[..., None], (dot.ww_Ggg + (a_G1 * ws_Gg)[:, None])[:, :, None])
        # d = x - the centre without them.
        b_G1, c_G1 = self.by_w_G1, self.by_m_G1
        dd_Gg = xx_Gg + 2 * b_G1 * xw_Ggg.sum(-1) + b_G1.square() * wss_G1 + 2 * c_G1 * xm_Gg + c_G1.square() * mm_G1
        dw_Ggg = xw_Ggg + (b_G1 * ws_Gg + c_G1 * wm_Gg)[:, None]
        base_Gg1 = distance(dd_Gg[..., None], dw_Ggg[:, :, None])
        far_GgC = far_GgC.scatter(-1, self.label_Gg1, torch.where(self.gone_G1[..., None], base_Gg1, own_Gg1))
        return (base_Gg1 - torch.where(self.nowhere_C, base_Gg1, far_GgC)) / 2, own_Gg1[..., 0]


def between(strength: float) -> float:
    """A strength that has a solution."""
    if not LEAST <= strength < 1:
        raise PerlclipError(f"the strength of a head must be between 0 and 1, got {strength}")
    return strength
