"""`choose_lens`: how pictures are shown to the frozen image tower, from the shots alone, before anything is trained.

Through each lens (`backbone.lens`) the shots are asked two questions that no training has spoilt: how likely the texts
make their true classes, each lens at its best temperature, and how likely a head does, in closed form, with each shot
left out. A lens is taken where both are clearly better than without one, by so many standard errors of the differences
shot by shot: the head speaks for the classes trained on, the texts for all others, so that neither may win at the cost
of the other. With one shot of each class there are the texts alone, and fewer than eight shots choose nothing.
docs/strong.md has the measurements behind this.

Shapes: N shots, B of them in a batch, C classes, E embedding width, F the middle's.
"""

import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from perlclip.backbone import LENSES, PLAIN
from perlclip.data.loading import fixed_views
from perlclip.data.sets import ImageSet
from perlclip.heads.discriminant import Discriminant
from perlclip.methods.base import Method
from perlclip.progress import progress_bar
from perlclip.training.choose_head import TEXTS, Said, choose, logp_of
from perlclip.training.shots import BATCH

SHOTS, IMAGES = 16, 192  # of a class, and in all, that are looked at through every lens
FEWEST = 8  # shots that can say something clearly
CLEAR_TEXTS, CLEAR_HEAD = 3.0, 1.0  # standard errors


@dataclass(frozen=True)
class Through:
    """Shots through one lens: embeddings by the frozen CLIP, and what its middle says."""

    v_NE: Tensor
    m_NF: Tensor


@dataclass(frozen=True, kw_only=True)
class LensChoice:
    """The lens chosen, and what zero-shot CLIP answers right of so many shots through each, in percent."""

    name: str
    images: int
    zero_shot: Mapping[str, float]

    @property
    def sentence(self) -> str:
        """For the screen."""
        if self.name == PLAIN:
            return f"no lens: {self.images} shots are not clearly better off with one"
        through = f"{self.zero_shot[PLAIN]:.1f} % of {self.images} shots as they are, {self.zero_shot[self.name]:.1f} %"
        return f"lens {self.name!r}, {LENSES[self.name].summary}: zero-shot CLIP knows {through} through it"

    def record(self) -> dict[str, Any]:
        """For the training record."""
        accuracy = {name: round(value, 2) for name, value in self.zero_shot.items()}
        return {"name": self.name, "images": self.images, "zero_shot": accuracy}


@torch.no_grad()
def choose_lens(
    method: Method, train_set: ImageSet, *, seed: int = 1, workers: int = 0, progress: bool = False
) -> LensChoice:
    """The lens that shows a method's frozen backbone most of these shots; up to 192 of them are looked at."""
    backbone, shots = method.backbone, some_shots(train_set, seed)
    found: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    with progress_bar("choosing a lens", len(shots) * (1 + len(LENSES)), show=progress) as bar:
        for pixels, _ in fixed_views(shots, backbone.preprocess, BATCH, backbone.device, workers):
            for name in (PLAIN, *LENSES):
                frozen = backbone.frozen(pixels, name)
                m_BF = frozen.middle(backbone.vision.middle)
                found[name].append((backbone.encode_image(frozen).float().cpu(), m_BF.cpu()))
                bar(len(pixels))
    seen = {name: Through(*map(torch.cat, zip(*parts, strict=True))) for name, parts in found.items()}
    there_C, labels_N = torch.unique(torch.tensor([int(label) for label in shots.labels]), return_inverse=True)
    classes = shots.classes if method.as_written else shots.classes.plain()
    prompts = classes.prompts()
    t_CE = backbone.encode_text([prompts[c] for c in there_C.tolist()]).float().cpu()
    return best_lens(seen, labels_N, t_CE, backbone.logit_scale)


def some_shots(train_set: ImageSet, seed: int) -> ImageSet:
    """Up to 16 shots of each class, of as many classes as make 192 shots: all those of a class are needed together."""
    rng, places, count = random.Random(f"lens {seed}"), list(train_set.by_class().values()), 0
    taken: list[list[int]] = []
    for where in rng.sample(places, len(places)):
        taken.append(sorted(rng.sample(where, min(SHOTS, len(where)))))
        count += len(taken[-1])
        if count >= IMAGES and len(taken) > 1:
            break
    return train_set.select(sorted(i for where in taken for i in where))


def best_lens(seen: Mapping[str, Through], labels_N: Tensor, t_CE: Tensor, logit_scale: float) -> LensChoice:
    """The choice among lenses through which these shots of all classes given were looked at, `plain` among them."""
    zero = {name: (logit_scale * each.v_NE @ t_CE.T).float() for name, each in seen.items()}
    texts = {name: _warmed(zero_NC, labels_N) for name, zero_NC in zero.items()}
    sums = {PLAIN: 0.0}
    for name, texts_N in texts.items():
        if name == PLAIN or not _clearly(texts_N - texts[PLAIN], CLEAR_TEXTS):
            continue
        heads = [_left_out(seen[each], zero[each], labels_N) for each in (name, PLAIN)]
        if not len(heads[0]) or _clearly(heads[0] - heads[1], CLEAR_HEAD):
            gains = texts_N - texts[PLAIN], heads[0] - heads[1]
            sums[name] = sum(gain_N.mean().item() for gain_N in gains if len(gain_N))
    right = {name: (zero_NC.argmax(-1) == labels_N).double().mean().item() for name, zero_NC in zero.items()}
    accuracy = {name: 100 * share for name, share in right.items()}
    return LensChoice(name=max(sums, key=lambda name: sums[name]), images=len(labels_N), zero_shot=accuracy)


def _warmed(zero_NC: Tensor, labels_N: Tensor) -> Tensor:
    """How likely the texts make each shot's class, at the temperature that is best for all of them, (N,)."""
    return max((logp_of(text * zero_NC, labels_N) for text in TEXTS), key=lambda logp_N: logp_N.mean().item())


def _left_out(seen: Through, zero_NC: Tensor, labels_N: Tensor) -> Tensor:
    """How likely a head makes each shot of classes that have several, without it; nothing if most have one."""
    count_C = torch.bincount(labels_N)
    asked_n = (count_C[labels_N] > 1).nonzero()[:, 0]
    if 2 * int((count_C > 1).sum()) < len(count_C):
        return torch.empty(0)
    alone_n, solver = torch.arange(len(asked_n)), Discriminant
    scores_LnC, middle_LnC = (
        solver.of(x_NF, labels_N, len(count_C)).left_out(solver.STRENGTHS, alone_n, asked_n)
        for x_NF in (seen.v_NE, seen.m_NF)
    )
    said = Said(
        labels_N=labels_N[asked_n], zero_NC=zero_NC[asked_n], adapted_NC=zero_NC[asked_n], scores_LNC=scores_LnC,
        middle_LNC=middle_LnC, solver=solver,
    )  # fmt: skip
    return logp_of(said.answers(choose(said, (1.0,), ""))[0].float(), said.labels_N)


def _clearly(gain_N: Tensor, errors: float) -> bool:
    """Whether the mean of enough of them is above 0 by so many standard errors."""
    return len(gain_N) >= FEWEST and gain_N.mean().item() > errors * gain_N.std().item() / sqrt(len(gain_N))
