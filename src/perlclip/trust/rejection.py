"""None of these: does an image look like a class at all, by its text and by its shots?

    odds     = log sum_c exp(tau v·t_c) - log sum_w exp(tau v·t_w)
    nearness = max_c v·m_c
    score    = z(odds) + 2 z(nearness)         z: less the mean of images held out, over their standard deviation

v is the frozen CLIP's image embedding, t_c the classes' frozen texts, t_w those of plain words (`words.txt`) in the
same template: without words that name a class, and without those that are nearest to one. m_c is the mean embedding of
a class's shots; a shot is left out of its own. An image that scores lower than all but a few of those held out is none
of these. Where a backbone's tokenizer has few of the words, as `tiny`'s, the log of the best class's calibrated
probability takes the place of the odds; where a list has new classes, of which there are no shots, the odds are all.

Shapes: B and N images, C classes, W words, E embedding width.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from perlclip.backbone import Backbone
from perlclip.errors import PerlclipError, unknown_name
from perlclip.text.classes import Classes, spelling
from perlclip.trust.conformal import ascending, check_share, exceeding

FEWEST = 500  # words that a backbone must know
NEAR = 0.25  # share of the words that is left out as too near to a class
RATE = 0.05
IMAGES = 2.0  # weight of nearness to the shots, against 1 of the texts
FIRST = ("words", "probability")  # what the texts are asked for


@cache
def word_list() -> tuple[str, ...]:
    """The plain words of the package."""
    lines = (Path(__file__).parent / "words.txt").read_text().splitlines()
    return tuple(word.strip() for line in lines if not line.startswith("#") for word in line.split(","))


def known_words(backbone: Backbone) -> list[str]:
    """Words that the tokenizer has as they are; what it spells in pieces, a small backbone has not learned."""
    words = word_list()
    pieces = backbone.tokenizer(list(words), add_special_tokens=False)["input_ids"]
    return [word for word, ids in zip(words, pieces, strict=True) if len(ids) <= len(word.split())]


def free_words(backbone: Backbone, classes: Classes) -> list[str]:
    """Those of them that are in no class's name."""
    named = {word for name in classes.names for word in spelling(name).split()}
    return [word for word in known_words(backbone) if not set(word.split()) & named]


@dataclass(frozen=True)
class FarWords:
    """What is far from a list of classes, beside the classes, as the frozen CLIP's texts."""

    words: tuple[str, ...]
    t_WE: Tensor
    t_CE: Tensor
    scale: float

    @classmethod
    @torch.no_grad()
    def of(cls, backbone: Backbone, classes: Classes) -> "FarWords | None":
        """Encoded once for a list of classes; None where the backbone knows too few words."""
        words = free_words(backbone, classes)
        if len(words) < FEWEST:
            return None
        t_CE = backbone.encode_text(classes.prompts()).float()
        template = classes.template if not classes.sentences else "{}"
        t_WE = backbone.encode_text([template.format(word) for word in words]).float()
        return cls.chosen(words, t_WE, t_CE, backbone.logit_scale)

    @classmethod
    def chosen(cls, words: Sequence[str], t_WE: Tensor, t_CE: Tensor, scale: float, near: float = NEAR) -> "FarWords":
        """Without the share of the words that is nearest to a class."""
        kept_W = (t_WE @ t_CE.T).amax(-1).argsort(stable=True)[: len(words) - int(near * len(words))].sort().values
        return cls(tuple(words[i] for i in kept_W.tolist()), t_WE[kept_W], t_CE, scale)

    def odds(self, v_BE: Tensor) -> Tensor:
        """Of the classes against the words, for frozen image embeddings: (B,)."""
        v_BE = self.scale * v_BE.float()
        return (v_BE @ self.t_CE.T).logsumexp(-1) - (v_BE @ self.t_WE.T).logsumexp(-1)


def text_score(p_BC: Tensor, far: FarWords | None, v_BE: Tensor | None) -> Tensor:
    """What the texts say: the odds against far words, or how probable the best class is: (B,)."""
    return p_BC.amax(-1).log() if far is None or v_BE is None else far.odds(v_BE)


def class_means(v_NE: Tensor, labels_N: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Unit mean embeddings of each class, (C, E), and how near each image is to one, itself left out, (N,)."""
    v_NE, labels_N = v_NE.float(), labels_N.to(v_NE.device)
    sums_CE = torch.zeros(classes, v_NE.shape[1], device=v_NE.device).index_add_(0, labels_N, v_NE)
    near_NC = v_NE @ F.normalize(sums_CE, dim=-1).T
    rest_NE = sums_CE[labels_N] - v_NE
    own_N = torch.where(rest_NE.norm(dim=-1) > 1e-4, (v_NE * F.normalize(rest_NE, dim=-1)).sum(-1), -1.0)
    near_NC[torch.arange(len(v_NE)), labels_N] = own_N
    return F.normalize(sums_CE, dim=-1), near_NC.amax(-1)


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of images held out."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values_N: Tensor) -> "Spread":
        """Rounded as it is saved."""
        deviation = values_N.double().std(correction=0).item()
        return cls(round(values_N.double().mean().item(), 6), max(round(deviation, 6), 1e-6))

    def z(self, values_B: Tensor) -> Tensor:
        """How many deviations above the mean."""
        return (values_B - self.mean) / self.deviation


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """Scores of images held out, in ascending order: of texts and shots together, and of the texts `alone`.

    `first` says what the texts are asked for; `means` are the classes' mean embeddings, as the text of a file.
    """

    first: str
    texts: Spread
    near: Spread
    means: str
    scores: tuple[float, ...]
    alone: tuple[float, ...]

    @classmethod
    def of(cls, first: str, texts_N: Tensor, near_N: Tensor, means_CE: Tensor) -> "Rejection":
        """From what the texts say about images held out, and how near they are to the classes' means."""
        texts, near = Spread.of(texts_N), Spread.of(near_N)
        both_N = texts.z(texts_N) + IMAGES * near.z(near_N)
        content = means_CE.half().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return cls(
            first=first, texts=texts, near=near, means=base64.b64encode(content).decode(),
            scores=_rounded(both_N), alone=_rounded(texts_N),
        )  # fmt: skip

    @cached_property
    def numbers(self) -> Tensor:
        """All of the means, one after the other."""
        return torch.frombuffer(bytearray(base64.b64decode(self.means)), dtype=torch.float16).float()

    def means_of(self, classes: Sequence[int], like: Tensor) -> Tensor:
        """Those of some of the classes, (c, E), where embeddings such as these are."""
        width = like.shape[-1]
        if len(self.numbers) % width or max(classes) >= len(self.numbers) // width:
            raise PerlclipError("the adapter's mean embeddings are not those of its classes and its backbone")
        return self.numbers.view(-1, width)[list(classes)].to(like.device)

    def score(self, texts_B: Tensor, v_BE: Tensor, classes: Sequence[int] | None) -> Tensor:
        """What is compared with the threshold, (B,); `classes` are those of the list, or None if some are new."""
        if classes is None:
            return texts_B
        near_B = (v_BE.float() @ self.means_of(classes, v_BE).T).amax(-1)
        return self.texts.z(texts_B) + IMAGES * self.near.z(near_B)

    def threshold(self, rate: float, *, alone: bool = False) -> float:
        """Below this an image is none of the classes; images of a class are so at most at this rate."""
        rate, scores = check_share("reject_rate", rate), self.alone if alone else self.scores
        return scores[exceeding(rate, len(scores), f"reject_rate={rate:g}") - 1]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "first": self.first,
            "texts": list(vars(self.texts).values()),
            "near": list(vars(self.near).values()),
            "means": self.means,
            "scores": list(self.scores),
            "alone": list(self.alone),
        }

    @classmethod
    def from_json(cls, data: Any, images: int) -> "Rejection":
        """Checked."""
        if not isinstance(data, Mapping) or set(data) != {"first", "texts", "near", "means", "scores", "alone"}:
            raise PerlclipError("rejection needs the scores of images held out")
        if data["first"] not in FIRST:
            raise unknown_name("score of rejection", str(data["first"]), FIRST)
        found = cls(
            first=data["first"], texts=_spread(data["texts"]), near=_spread(data["near"]), means=data["means"],
            scores=ascending(data["scores"], images), alone=ascending(data["alone"], images),
        )  # fmt: skip
        try:
            whole = bool(torch.isfinite(found.numbers).all())
        except (TypeError, ValueError, binascii.Error, RuntimeError) as error:
            raise PerlclipError("the mean embeddings of its classes are damaged") from error
        if not whole:
            raise PerlclipError("the mean embeddings of its classes hold numbers that are not finite")
        return found


def _rounded(values_N: Tensor) -> tuple[float, ...]:
    return tuple(sorted(round(value, 6) for value in values_N.tolist()))


def _spread(data: Any) -> Spread:
    if not isinstance(data, list) or len(data) != 2 or not all(type(n) in (int, float) and isfinite(n) for n in data):
        raise PerlclipError(f"a spread is a mean and a deviation, got {data!r}")
    if data[1] <= 0:
        raise PerlclipError(f"a deviation is above 0, got {data[1]}")
    return Spread(*data)
