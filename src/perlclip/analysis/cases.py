"""Single images in depth: which of a data set are worth a look, and what is shown of one.

Shapes: K stands for the steps 0..K, B images, M = 2 classes shown of each, G patches a side, C classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from perlclip.analysis.drift import transitions
from perlclip.analysis.evidence import evidence_maps
from perlclip.analysis.trajectories import Trajectories, logit_steps, require_perl
from perlclip.data.images import read_image
from perlclip.data.sets import ImageSource
from perlclip.heads.answering import Answering
from perlclip.heads.head import Head
from perlclip.methods.base import ClassState, Method


@dataclass(frozen=True, kw_only=True)
class Case:
    """One image: its two classes, their confidence and evidence at each step."""

    name: str  # where it comes from
    transition: str  # or nothing, where the truth is not known
    label: str  # the truth, if known
    classes: tuple[str, str]  # the first answer and the final one, or the answer and its rival
    answers: tuple[str, ...]  # of each step
    confidence_KM: Tensor
    maps_KMGG: Tensor
    cls_KM: Tensor | None
    picture: Image.Image  # as the tower sees it

    def numbers(self) -> dict[str, Any]:
        """Without the picture."""
        return {
            "image": self.name,
            "transition": self.transition,
            "label": self.label,
            "answers": list(self.answers),
            "classes": [
                {
                    "class": name,
                    "confidence": self.confidence_KM[:, m].tolist(),
                    "patches": self.maps_KMGG[:, m].tolist(),
                    "cls": None if self.cls_KM is None else self.cls_KM[:, m].tolist(),
                }
                for m, name in enumerate(self.classes)
            ],
        }


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """An image to look into, and what is known about it."""

    image: ImageSource
    name: str
    label: str = ""
    transition: str = ""


def image_name(image: ImageSource, i: int, where: str = "") -> str:
    """What an image of a set is called: its file's name, or its number."""
    return Path(image).name if isinstance(image, str | Path) else f"{where or 'image'} {i}"


def instructive(found: Trajectories, count: int) -> list[tuple[str, int]]:
    """Of each transition the images with the largest change of confidence, as (transition, position).

    Where the answer changed for the better or worse, that is the change of the true class; where it stayed right or
    wrong, the largest change of the first answer's confidence at any step. Each true class comes once before any
    comes again, so that one class does not fill the gallery.
    """
    chosen = []
    for name, images in transitions(found).items():
        moved = name in ("wrong→correct", "correct→wrong")
        values_KB = (found.target_KB if moved else found.first_KB)[:, images]
        change_B = (values_KB - values_KB[0]).abs()
        score_B = change_B[-1] if moved else change_B.amax(0)
        order = images[score_B.argsort(descending=True, stable=True)].tolist()
        chosen += [(name, i) for i in _varied(order, found.labels_B, count)]
    return chosen


def _varied(order: Sequence[int], labels_B: Tensor, count: int) -> list[int]:
    """The first of each label in this order, then the second ones, …"""
    seen: dict[int, int] = {}
    rank = {}
    for i in order:
        label = int(labels_B[i])
        rank[i] = seen[label] = seen.get(label, -1) + 1
    return sorted(order, key=lambda i: rank[i])[:count]  # stable: the best stay first


def look_into(
    method: Method, wanted: Sequence[Wanted], names: Sequence[str], state: ClassState, *, how: str, shown: str = "",
    head: Head | None = None,
) -> list[Case]:  # fmt: skip
    """Confidence and maps of some images; `shown` is a class to map instead of the first answer."""
    method = require_perl(method)
    backbone = method.backbone
    pixels = torch.stack([backbone.preprocess.test_view(read_image(one.image)) for one in wanted]).to(backbone.device)
    with torch.no_grad():
        p_KBC = logit_steps(Answering(method, state, head), pixels).double().softmax(-1).cpu()
    first_choice = [names.index(shown)] if shown else []
    classes_BM = torch.tensor([_pair(p_KC, first_choice) for p_KC in p_KBC.unbind(1)])
    evidence = evidence_maps(method, pixels, classes_BM, state, how, head)
    cases, seen = [], method.frozen(pixels).shown
    for b, one in enumerate(wanted):
        first, second = classes_BM[b].tolist()
        cases.append(
            Case(
                name=one.name,
                transition=one.transition,
                label=one.label,
                classes=(names[first], names[second]),
                answers=tuple(names[c] for c in p_KBC[:, b].argmax(-1).tolist()),
                confidence_KM=p_KBC[:, b, [first, second]],
                maps_KMGG=evidence.maps_KBMGG[:, b],
                cls_KM=None if evidence.cls_KBM is None else evidence.cls_KBM[:, b],
                picture=backbone.preprocess.picture(seen[b]),
            )
        )
    return cases


def _pair(p_KC: Tensor, wished: Sequence[int]) -> list[int]:
    """Two different classes: those wished for, the first answer, the final one, then its strongest rivals."""
    final_C = p_KC[-1].argsort(descending=True).tolist()
    first = [int(p_KC[0].argmax())]
    ranked = [*wished, final_C[0], *first, *final_C] if wished else [*first, *final_C]
    pair = list(dict.fromkeys(ranked))[:2]
    return pair if len(pair) == 2 else pair * 2  # one class alone has no rival


def overlay(map_GG: Tensor, scale: float) -> Image.Image:
    """A map as a small RGBA picture: orange speaks for the class, blue against it, nothing is transparent."""
    value_GG = (map_GG / scale if scale else map_GG).clamp(-1, 1).numpy()
    rgba = np.zeros((*value_GG.shape, 4), np.uint8)
    rgba[..., :3] = np.where(value_GG[..., None] > 0, FOR, AGAINST)
    rgba[..., 3] = np.round(225 * np.abs(value_GG) ** 0.7)
    return Image.fromarray(rgba, "RGBA")


FOR, AGAINST = (230, 97, 1), (50, 80, 200)  # told apart by every kind of colour vision, also in grey
