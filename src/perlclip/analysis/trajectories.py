"""Per-step quantities of every image, and their averages with confidence bands.

One forward pass gives the logits of all steps; the gradients of the K+1 true-class logits with respect to the pixels
are K+1 backward passes over that one graph. docs/analysis.md defines every quantity.

Shapes: K stands for the steps 0..K, B images, C classes, E shared width, R resamples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perlclip.backbone import Images
from perlclip.errors import PerlclipError
from perlclip.heads.answering import Answering
from perlclip.heads.head import Head
from perlclip.methods.base import ClassState, Method
from perlclip.methods.perl import Perl

BINS = 15  # of top-1 confidence, for the calibration error
RESAMPLES = 500
Z95 = 1.959964  # a normal variable lies within so many standard deviations 95 % of the time
# Student's t likewise, where the deviation is an estimate from so many values and one: of 1, 2, …, 30.
T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Trajectories:
    """What is kept of each image at each step; all of it (K+1, B) but the labels."""

    labels_B: Tensor
    answers_KB: Tensor  # the most probable class
    target_KB: Tensor  # probability of the true class
    top_KB: Tensor  # of the most probable class
    first_KB: Tensor  # of the class that was most probable at step 0
    final_KB: Tensor  # of the class that is most probable at step K
    brier_KB: Tensor  # sum over classes of (p - y)^2
    drift_KB: Tensor  # KL(p_0 ‖ p_k)
    jacobian_KB: Tensor  # L2 norm of d logit / d pixels, of the true class

    def __len__(self) -> int:
        return len(self.labels_B)

    @property
    def steps(self) -> int:
        """K, the last step."""
        return len(self.answers_KB) - 1

    @property
    def correct_KB(self) -> Tensor:
        """Whether the answer is the true class."""
        return self.answers_KB == self.labels_B

    def tensors(self) -> dict[str, Tensor]:
        """By name, for a file."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def join(parts: Sequence[Trajectories]) -> Trajectories:
    """Several batches as one."""
    columns = [part.tensors() for part in parts]
    return Trajectories(**{name: torch.cat([column[name] for column in columns], -1) for name in columns[0]})


def require_perl(method: Method) -> Perl:
    """Only a method that thinks can be watched."""
    if not isinstance(method, Perl):
        raise PerlclipError(
            f"only PERL adapters have steps to look at; this one is {method.name!r}, which answers at once"
        )
    if method.config.steps < 1:
        raise PerlclipError("this PERL adapter has steps=0, which is zero-shot CLIP: there is nothing to look at")
    return method


def text_steps(method: Perl, state: ClassState) -> Tensor:
    """T^(0), …, T^(K) without a graph, (K+1, C, E); encoded once for all batches."""
    with torch.no_grad():
        return method.class_embedding_steps(state)


def logit_steps(answering: Answering, images: Images, norms_KB1: Tensor | None = None) -> Tensor:
    """What is answered after every step, (K+1, B, C), with a graph if the pixels want one.

    What all classes share, the norms of a readout's probabilities, has no part in the graph, and may be another
    image's: nothing would speak for a class of which the method is sure.
    """
    method = require_perl(answering.method)
    images = method.frozen(images)
    more_BC = answering.middle(images)
    t_KCE, v_KBE = text_steps(method, answering.state), method.encode_image_steps(images)
    norms_KB1 = log_norms(method, v_KBE, t_KCE) if norms_KB1 is None else norms_KB1
    return answering.finish(method.read_out(v_KBE, t_KCE, norms_KB1), v_KBE, more_BC)


@torch.no_grad()
def log_norms(method: Perl, v_KBE: Tensor, t_KCE: Tensor) -> Tensor:
    """Logarithms of the softmax's sums at each step, (K+1, B, 1)."""
    return method.similarity_steps(v_KBE, t_KCE).logsumexp(-1, keepdim=True)


def measure(
    method: Method, pixels: Tensor, labels_B: Tensor, state: ClassState, head: Head | None = None
) -> Trajectories:
    """All quantities of a batch of normalised pixels, (B, 3, H, W), on the CPU."""
    answering = Answering(require_perl(method), state, head)
    pixels = pixels.detach().requires_grad_()
    labels_B = labels_B.to(pixels.device)
    images = torch.arange(len(pixels), device=pixels.device)
    with torch.enable_grad():
        logits_KBC = logit_steps(answering, pixels)
        jacobian_KB = _gradient_norms(logits_KBC[:, images, labels_B], pixels)
    if not torch.isfinite(logits_KBC).all():
        raise PerlclipError("the method's answers are not finite numbers; its weights are unusable")
    logp_KBC = logits_KBC.detach().double().log_softmax(-1)
    p_KBC = logp_KBC.exp()
    answers_KB = logits_KBC.argmax(-1)
    truth_BC = torch.nn.functional.one_hot(labels_B, p_KBC.shape[-1])
    found = Trajectories(
        labels_B=labels_B,
        answers_KB=answers_KB,
        target_KB=p_KBC[:, images, labels_B],
        top_KB=p_KBC.amax(-1),
        first_KB=p_KBC[:, images, answers_KB[0]],
        final_KB=p_KBC[:, images, answers_KB[-1]],
        brier_KB=(p_KBC - truth_BC).square().sum(-1),
        drift_KB=(p_KBC[0] * (logp_KBC[0] - logp_KBC)).sum(-1).clamp(min=0),
        jacobian_KB=jacobian_KB.double(),
    )
    return Trajectories(**{name: tensor.cpu() for name, tensor in found.tensors().items()})


def _gradient_norms(target_KB: Tensor, pixels: Tensor) -> Tensor:
    """Images do not see each other, so the gradient of a batch's sum holds that of each image."""
    norms = []
    for k, target_B in enumerate(target_KB):
        (gradient,) = torch.autograd.grad(target_B.sum(), pixels, retain_graph=k < len(target_KB) - 1)
        norms.append(gradient.flatten(1).float().norm(dim=1))
    return torch.stack(norms)


# ---- averages ----


@dataclass(frozen=True, kw_only=True)
class Metric:
    """How a curve is called, and whether a good one rises."""

    name: str
    title: str
    better: str  # higher, lower, or nothing


METRICS = (
    Metric(name="accuracy", title="accuracy, %", better="higher"),
    Metric(name="confidence", title="confidence of the true class", better="higher"),
    Metric(name="brier", title="Brier score", better="lower"),
    Metric(name="ece", title="expected calibration error", better="lower"),
    Metric(name="jacobian", title="Jacobian norm", better=""),
)


@dataclass(frozen=True)
class Curve:
    """A quantity at every step with its 95 % band."""

    mean: list[float]
    low: list[float]
    high: list[float]

    @classmethod
    def of_means(cls, values_KB: Array) -> "Curve":
        """Averages, with Student's t interval of the mean; of a single value there is no band."""
        mean_K, B = values_KB.mean(1), values_KB.shape[1]
        spread_K = values_KB.std(1, ddof=1) if B > 1 else np.zeros_like(mean_K)
        half_K = t95(B - 1) * spread_K / np.sqrt(B)
        return cls(mean_K.tolist(), (mean_K - half_K).tolist(), (mean_K + half_K).tolist())


def t95(freedom: int) -> float:
    """The 97.5 % point of Student's t; beyond the table the first term of its expansion is good to 0.2 %."""
    return T95[max(freedom, 1) - 1] if freedom <= len(T95) else Z95 * (1 + (Z95**2 + 1) / (4 * freedom))


def curves(found: Trajectories) -> dict[str, Curve]:
    """The curve of each of `METRICS`."""
    correct_KB = found.correct_KB.double().numpy()
    return {
        "accuracy": Curve.of_means(100 * correct_KB),
        "confidence": Curve.of_means(found.target_KB.numpy()),
        "brier": Curve.of_means(found.brier_KB.numpy()),
        "ece": expected_calibration_error(found.top_KB.numpy(), correct_KB),
        "jacobian": Curve.of_means(found.jacobian_KB.numpy()),
    }


def expected_calibration_error(top_KB: Array, correct_KB: Array, resamples: int = RESAMPLES) -> Curve:
    """Mean gap between confidence and accuracy, with the 2.5 and 97.5 % points of a bootstrap over images (fixed seed).

    The error is a sum of absolute values, so that resampling adds to it; the band is therefore the basic bootstrap's,
    twice the value minus the resampled points, cut at 0.
    """
    bins_KB = np.minimum((top_KB * BINS).astype(np.int64), BINS - 1)
    gaps_KB = top_KB - correct_KB
    rng = np.random.default_rng(0)
    B = top_KB.shape[1]
    value_K = np.array([_calibration_error(*row) for row in zip(bins_KB, gaps_KB, strict=True)])
    drawn_RK = np.empty((resamples, len(top_KB)))
    for r in range(resamples):
        images = rng.integers(0, B, B)
        drawn_RK[r] = [
            _calibration_error(bins[images], gaps[images]) for bins, gaps in zip(bins_KB, gaps_KB, strict=True)
        ]
    low_K, high_K = np.quantile(drawn_RK, [0.025, 0.975], axis=0)
    return Curve(value_K.tolist(), *(np.maximum(2 * value_K - edge_K, 0).tolist() for edge_K in (high_K, low_K)))


def _calibration_error(bins_B: NDArray[np.int64], gaps_B: Array) -> float:
    """Sum over bins of (share of images) x |mean confidence - accuracy| = sum |sum of gaps| / B."""
    return float(np.abs(np.bincount(bins_B, gaps_B, minlength=BINS)).sum() / len(gaps_B))
