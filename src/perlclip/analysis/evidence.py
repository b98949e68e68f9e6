"""Evidence maps: what each image patch contributes to the logit with which a class is answered after each step.

gradient    gradient x activation at the split layer: the row S_n of the frozen sequence at depth J (or before it, if a
            head reads there), times the logit's gradient there, summed over channels. Thoughts are functions of S, so
            what a patch does through them counts.
occlusion   the drop of the logit when the patch's pixels are set to the mean colour; model-free, a pass per patch.

Patches are those of the picture as a lens shows it to the tower.

Shapes: K stands for the steps 0..K, B images, M classes mapped of each image, N rows (CLS and patches), P patches,
G patches a side, D width, C classes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from perlclip.analysis.trajectories import log_norms, logit_steps, require_perl, text_steps
from perlclip.backbone import FrozenImages
from perlclip.errors import unknown_name
from perlclip.heads.answering import Answering
from perlclip.heads.head import Head
from perlclip.methods.base import ClassState, Method

OCCLUDED_AT_ONCE = 128  # images in one pass


@dataclass(frozen=True)
class Evidence:
    """Signed contributions to the logits of some classes; CLS is no place in the image and stands apart."""

    maps_KBMGG: Tensor
    cls_KBM: Tensor | None  # with occlusion there is none, nor where there is no CLS
    logits_KBM: Tensor


def contributions(value: Tensor, x_BND: Tensor) -> Tensor:
    """Gradient x activation of the sum of `value`, summed over channels, (B, N); the graph is kept."""
    (gradient_BND,) = torch.autograd.grad(value.sum(), x_BND, retain_graph=True)
    return (gradient_BND.float() * x_BND.detach().float()).sum(-1)


def gradient_maps(answering: Answering, pixels: Tensor, classes_BM: Tensor) -> Evidence:
    """Gradient x activation at the split layer; one forward pass, one backward pass for each step and class."""
    method = require_perl(answering.method)
    with torch.enable_grad():
        images = method.frozen(pixels.detach().requires_grad_())
        # Where the head reads rows from before the split, all of the answer goes through these.
        read = answering.head.middle if answering.head and answering.beyond else None
        s_BND = images.rows(min(method.image_depth, read.depth if read else method.image_depth))
        logits_KBC = logit_steps(answering, images)
        logits_KBM = _of_classes(logits_KBC, classes_BM)
        rows_KBMN = torch.stack(
            [torch.stack([contributions(value_B, s_BND) for value_B in step_BM.unbind(1)], 1) for step_BM in logits_KBM]
        )
    first = method.backbone.vision.starts
    cls_KBM = rows_KBMN[..., 0].cpu() if first else None
    return Evidence(_square(rows_KBMN[..., first:]).cpu(), cls_KBM, logits_KBM.detach().cpu())


@torch.no_grad()
def occlusion_maps(answering: Answering, pixels: Tensor, classes_BM: Tensor) -> Evidence:
    """How much a class logit falls without a patch; grey is the mean pixel, 0 after normalisation."""
    method = require_perl(answering.method)
    norms_KB1 = log_norms(method, method.encode_image_steps(pixels), text_steps(method, answering.state))
    logits_KBM = _of_classes(logit_steps(answering, pixels, norms_KB1), classes_BM)
    P, whole = method.backbone.vision.patches, method.frozen(pixels)
    drops = []
    for image, (pixels_3HW, classes_M) in enumerate(zip(whole.shown, classes_BM, strict=True)):
        hidden = []
        for start in range(0, P, OCCLUDED_AT_ONCE):
            covered = _covered(pixels_3HW, range(start, min(start + OCCLUDED_AT_ONCE, P)), round(P**0.5))
            images = FrozenImages(whole.tower, covered, whole.lens, shown=covered)
            hidden.append(logit_steps(answering, images, norms_KB1[:, image, None])[..., classes_M])
        drops.append(logits_KBM[:, image, :, None] - torch.cat(hidden, 1).transpose(1, 2))
    return Evidence(_square(torch.stack(drops, 1)).cpu(), None, logits_KBM.cpu())


def _covered(pixels_3HW: Tensor, patches: range, side: int) -> Tensor:
    """A copy of the image for each patch, without it."""
    size = pixels_3HW.shape[-1] // side
    copies = pixels_3HW.repeat(len(patches), 1, 1, 1)
    for copy, patch in zip(copies, patches, strict=True):
        row, column = divmod(patch, side)
        copy[:, row * size : (row + 1) * size, column * size : (column + 1) * size] = 0
    return copies


def _of_classes(logits_KBC: Tensor, classes_BM: Tensor) -> Tensor:
    return logits_KBC.gather(-1, classes_BM.to(logits_KBC.device).expand(len(logits_KBC), -1, -1))


def _square(rows_KBMP: Tensor) -> Tensor:
    """Patches in their places; CLIP's images are square."""
    side = round(rows_KBMP.shape[-1] ** 0.5)
    return rows_KBMP.reshape(*rows_KBMP.shape[:-1], side, side)


HOWS: dict[str, Callable[[Answering, Tensor, Tensor], Evidence]] = {
    "gradient": gradient_maps,
    "occlusion": occlusion_maps,
}


def evidence_maps(
    method: Method, pixels: Tensor, classes_BM: Tensor, state: ClassState, how: str = "gradient",
    head: Head | None = None,
) -> Evidence:  # fmt: skip
    """Maps of normalised pixels, (B, 3, H, W), for the classes given of each image: (K+1, B, M, G, G)."""
    if how not in HOWS:
        raise unknown_name("way to map evidence", how, HOWS)
    return HOWS[how](Answering(require_perl(method), state, head), pixels, classes_BM)
