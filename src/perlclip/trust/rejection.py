"""None of these: does an image look more like things far away from the classes than like any of them?

    odds = log sum_c exp(tau v·t_c) - log sum_w exp(tau v·t_w)

v is the frozen CLIP's image embedding, t_c the classes' frozen texts, t_w those of plain words (`words.txt`) in the
same template: without words that name a class, and without those that are nearest to one. An image whose odds are lower
than those of all but a few images held out is none of these. Where a backbone's tokenizer has few of the words, as
`tiny`'s, the calibrated probability of the best class takes the place of the odds.

Shapes: B images, C classes, W words, E embedding width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perlclip.backbone import Backbone
from perlclip.errors import PerlclipError, unknown_name
from perlclip.text.classes import Classes, spelling
from perlclip.trust.conformal import ascending, check_share, exceeding

FEWEST = 500  # words that a backbone must know
NEAR = 0.25  # share of the words that is left out as too near to a class
RATE = 0.05
SCORES = ("words", "probability")


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
        named = {word for name in classes.names for word in spelling(name).split()}
        words = [word for word in known_words(backbone) if not set(word.split()) & named]
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


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """Scores of images held out, in ascending order: their odds against far words, or the best probability."""

    score: str
    scores: tuple[float, ...]

    @classmethod
    def of(cls, p_NC: Tensor, far: FarWords | None, v_NE: Tensor) -> "Rejection":
        """From calibrated probabilities and frozen embeddings of images held out."""
        found_N = p_NC.amax(-1) if far is None else far.odds(v_NE)
        scores = sorted(round(value, 6) for value in found_N.tolist())
        return cls(score="probability" if far is None else "words", scores=tuple(scores))

    def threshold(self, rate: float) -> float:
        """Below this an image is none of the classes; images of a class are so at most at this rate."""
        rate = check_share("reject_rate", rate)
        return self.scores[exceeding(rate, len(self.scores), f"reject_rate={rate:g}") - 1]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"score": self.score, "scores": list(self.scores)}

    @classmethod
    def from_json(cls, data: Any, images: int) -> "Rejection":
        """Checked."""
        if not isinstance(data, Mapping) or set(data) != {"score", "scores"}:
            raise PerlclipError("rejection needs the scores of images held out")
        if data["score"] not in SCORES:
            raise unknown_name("score of rejection", str(data["score"]), SCORES)
        return cls(score=data["score"], scores=ascending(data["scores"], images))
