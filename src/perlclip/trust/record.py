"""All that images held out say about an adapter's answers: what it carries, checked when it is read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from perlclip.errors import PerlclipError
from perlclip.trust.calibration import Calibration, carried_temperature, fit_temperature
from perlclip.trust.conformal import LabelSets
from perlclip.trust.presence import Presence, Sigmoid
from perlclip.trust.rejection import FarWords, Rejection, text_score

REJECTS_BY = {
    "words": "odds of the classes against far words, and nearness to shots",
    "probability": "probability of the best class, and nearness to shots",
}
NONE = (
    "{what} needs images that were held out, and the adapter knows of none: fit with a head, a rehearsal and at least "
    "two shots of each class, or give others with `perlclip calibrate ADAPTER DATA` (in Python Classifier.calibrate)"
)
OTHER_CLASSES = (
    "sets with a guarantee are for the whole list of classes that they were calibrated on; this is another list: give "
    "labelled images of it to Classifier.calibrate"
)


@dataclass(frozen=True, kw_only=True)
class Trust:
    """How sure answers may be: temperatures, scores to reject by, scores for sets of labels, and for several labels.

    `how` the images were held out of what they are asked about: in a "rehearsal", "each left out", or "own images".
    """

    how: str
    images: int
    calibration: Calibration
    rejection: Rejection = field(repr=False)
    sets: LabelSets = field(repr=False)
    presence: Presence | None = field(default=None, repr=False)  # not in adapters of earlier versions

    @classmethod
    def of(
        cls, how: str, logits_NC: Tensor, texts_NC: Tensor, labels_N: Tensor, v_NE: Tensor, far: FarWords | None,
        means_CE: Tensor, near_N: Tensor, scores: tuple[Tensor, Tensor] | None = None, *, ruled: bool = False,
    ) -> "Trust":  # fmt: skip
        """From the answers to images held out, those of the texts alone, their labels and frozen embeddings.

        `means_CE` are the classes' mean embeddings, and `near_N` how near the images are to them. `scores` are answers
        and texts before any softmax. `ruled`: the head has a rule of its own for new classes.
        """
        temperature = fit_temperature(logits_NC, labels_N)
        p_NC = (logits_NC.double() / temperature).softmax(-1)
        return cls(
            how=how,
            images=len(labels_N),
            calibration=Calibration(
                temperature=temperature,
                texts=fit_temperature(texts_NC, labels_N),
                novel=carried_temperature(texts_NC, labels_N),
                ruled=ruled,
            ),
            rejection=Rejection.of(
                "words" if far else "probability", text_score(p_NC, far, v_NE).cpu(), near_N.cpu(), means_CE
            ),
            sets=LabelSets.of(p_NC, labels_N),
            presence=scores
            and Presence(answers=Sigmoid.fit(scores[0], labels_N), texts=Sigmoid.fit(scores[1], labels_N)),
        )

    def summary(self) -> dict[str, Any]:
        """In words, for a person: the scores themselves are a long list."""
        return {
            "images held out": f"{self.images} ({self.how})",
            "temperature": self.calibration.temperature,
            "temperature of the texts alone": self.calibration.texts,
            "temperature for new classes": self.calibration.novel,
            "rejects by": REJECTS_BY[self.rejection.first],
            "smallest reject_rate": round(1 / (self.images + 1), 4),
            "largest coverage": round(self.images / (self.images + 1), 4),
        }

    def as_json(self) -> dict[str, Any]:
        """Plain data for an adapter's config."""
        return {
            "how": self.how,
            "images": self.images,
            "calibration": self.calibration.as_json(),
            "rejection": self.rejection.as_json(),
            "sets": self.sets.as_json(),
            **({"presence": self.presence.as_json()} if self.presence else {}),
        }

    @classmethod
    def from_json(cls, data: Any) -> "Trust":
        """Checked: numbers that cannot be would be found out only by wrong answers."""
        if not isinstance(data, Mapping) or type(data.get("images")) is not int or not isinstance(data.get("how"), str):
            raise PerlclipError("what it knows of images held out lacks how many there were, or how")
        images = data["images"]
        return cls(
            how=data["how"],
            images=images,
            calibration=Calibration.from_json(data.get("calibration")),
            rejection=Rejection.from_json(data.get("rejection"), images),
            sets=LabelSets.from_json(data.get("sets"), images),
            presence=Presence.from_json(data["presence"]) if "presence" in data else None,
        )


def require_trust(trust: Trust | None, what: str) -> Trust:
    """A sentence where there is nothing to go by."""
    if trust is None:
        raise PerlclipError(NONE.format(what=what))
    return trust
