"""What an evaluation got wrong, to look at: confusion matrix and reliability as pictures, a page with the images."""

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from perlclip.data.images import ImageSource, Unreadable, try_image
from perlclip.inference.evaluation import Evaluation, labelled
from perlclip.viz.drawing import Drawing, draw
from perlclip.viz.markup import MISSING
from perlclip.viz.pages import data_url, page
from perlclip.viz.style import BLUE, GREY, INK, VERMILION

CLASSES = 40  # in the picture; of more, those that most mistakes are about
NUMBERS = 20  # classes of which the cells' numbers can be read
NAME = 24  # letters of a class name beside the picture
MAX_IMAGES = 200  # on the page
SIDE = 144  # pixels of a thumbnail, at most
PAIRS = 30  # of the most confused, on the page


def draw_confusion(found: Evaluation) -> Drawing:
    """Rows are the classes of the images, columns the answers, darkness the share of the row."""
    counts_CC = found.confusion.numpy()
    wrong_C = counts_CC.sum(0) + counts_CC.sum(1) - 2 * counts_CC.diagonal()
    # Classes without an image and without an answer tell nothing.
    order = [c for c in np.argsort(-wrong_C, kind="stable") if counts_CC[c].any() or counts_CC[:, c].any()]
    chosen = sorted(order[:CLASSES])
    part_CC = counts_CC[np.ix_(chosen, chosen)]
    share_CC = part_CC / np.maximum(counts_CC.sum(1)[chosen], 1)[:, None]
    names = [_short(name) for name in np.array(labelled(found.class_names), dtype=object)[chosen]]

    def paint(figure: Figure) -> None:
        axis = figure.subplots()
        axis.imshow(share_CC, cmap=_shades(), vmin=0, vmax=1, interpolation="nearest")
        places = range(len(chosen))
        size = 9 if len(chosen) <= NUMBERS else 7
        axis.set_xticks(places, names, rotation=45, ha="right", rotation_mode="anchor", fontsize=size)
        axis.set_yticks(places, names, fontsize=size)
        axis.set(xlabel="answer", ylabel="class of the image")
        axis.grid(False)
        axis.spines[:].set_visible(False)
        if len(chosen) <= NUMBERS:
            for i, j in zip(*np.nonzero(part_CC), strict=True):
                ink = "white" if share_CC[i, j] > 0.55 else INK
                axis.text(j, i, f"{part_CC[i, j]:,}", ha="center", va="center", fontsize=8, color=ink)

    of = f" The {len(chosen)} classes with most mistakes of {len(order)}." if len(chosen) < len(order) else ""
    caption = f"Rows: the class of the images; columns: the answer; dark: many of the row.{of}"
    side = 2.2 + 0.32 * max(len(chosen), 4) * (1.0 if len(chosen) <= NUMBERS else 0.72)
    return draw("confusion", caption, (side + 0.6, side), paint)


def draw_reliability(found: Evaluation) -> Drawing:
    """How often answers of a certain confidence are right, uncalibrated and as answered; the diagonal is ideal."""

    def paint(figure: Figure) -> None:
        axis, below = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
        axis.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":")
        shown = {"without calibration": (found.uncalibrated, VERMILION), "as answered": (found.reliability, BLUE)}
        for name, (measured, colour) in shown.items():
            if measured is None:
                continue
            x, y = [one.confidence for one in measured.bins], [one.accuracy for one in measured.bins]
            axis.plot(x, y, color=colour, marker="o", markersize=4, label=f"{name}: {measured.ece:.1f} %")
            counts = [one.images / found.total for one in measured.bins]
            below.vlines(x, 0, counts, color=colour, linewidth=4, alpha=0.7)
        axis.set(ylabel="share that is right", xlim=(0, 1), ylim=(0, 1))
        below.set(xlabel="confidence of the answer", ylabel="images")
        axis.legend(title="calibration error", loc="upper left")

    caption = f"Answers of {found.total} images by their confidence, 15 bins of equal width; below, the share in each."
    return draw("reliability", caption, (4.6, 5.2), paint)


def _shades() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("share", ["#ffffff", BLUE])


def _short(name: str) -> str:
    return name if len(name) <= NAME else f"{name[: NAME - 1]}…"


@dataclass(frozen=True)
class Mistake:
    """An image that was answered wrongly, as the page shows it."""

    name: str
    label: int
    answer: int
    probability: float
    label_probability: float
    picture: str  # an address that holds it, or nothing where it cannot be read any more
    small: bool


def mistakes_page(found: Evaluation, *, title: str = "Mistakes", max_images: int = MAX_IMAGES) -> str:
    """A page of its own with the mistakes to look at: at most so many, most confused pairs and surest ones first."""
    wrong = _chosen(found)
    shown = [_mistake(found, b) for b in wrong[:max_images]]
    rows = [
        (score.name, str(score.support), _percent(score.precision), _percent(score.recall), _percent(score.f1))
        for score in found.per_class()
        if score.support or score.answered
    ]
    return page(
        "mistakes.html",
        title=title,
        found=found,
        mistakes=shown,
        wrong=len(wrong),
        names=labelled(found.class_names),
        pairs=_pairs(found, PAIRS),
        picture=draw_confusion(found),
        reliability=draw_reliability(found),
        head=("class", "images", "precision %", "recall %", "F1 %"),
        rows=rows,
        missing=MISSING,
    )


def _percent(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1f}"


def _pairs(found: Evaluation, n: int) -> list[tuple[int, int, Any]]:
    """The most confused classes with their labels, for the filter."""
    number = {name: i for i, name in enumerate(labelled(found.class_names))}
    return [(number[pair.label], number[pair.answer], pair) for pair in found.most_confused(n)]


def _chosen(found: Evaluation) -> list[int]:
    """All mistakes: of every pair of classes the one that was surest, pairs with many first, then the second ones, …"""
    labels_B, answers_B = found.labels_B.tolist(), found.predictions_KB[-1].tolist()
    pairs: dict[tuple[int, int], list[int]] = {}
    for b, pair in enumerate(zip(labels_B, answers_B, strict=True)):
        if pair[0] != pair[1]:
            pairs.setdefault(pair, []).append(b)
    ranked = []
    for pair, images in pairs.items():
        images.sort(key=lambda b: -float(found.probabilities_BC[b, answers_B[b]]))
        ranked += [((rank, -len(images), pair), b) for rank, b in enumerate(images)]
    return [b for _, b in sorted(ranked)]


def _mistake(found: Evaluation, b: int) -> Mistake:
    label, answer = int(found.labels_B[b]), int(found.predictions_KB[-1, b])
    picture, small = thumbnail(found.images[int(found.places_B[b])])
    return Mistake(
        # A file's name may have bytes that are no text.
        name=shown_name(found.image_name(b)),
        label=label,
        answer=answer,
        probability=float(found.probabilities_BC[b, answer]),
        label_probability=float(found.probabilities_BC[b, label]),
        picture=picture,
        small=small,
    )


def shown_name(name: str) -> str:
    """A file's name to read: it may have bytes that are no text, and signs that turn what follows around."""
    text = name.encode("utf-8", "replace").decode()
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def thumbnail(source: ImageSource) -> tuple[str, bool]:
    """The address of a picture of a few kilobytes, and whether it is so small that its pixels are to be seen."""
    image = try_image(source)
    if isinstance(image, Unreadable):
        return "", False
    content, kind = small_picture(image, SIDE)
    return data_url(content, kind), kind == "image/png"


def small_picture(image: Image.Image, side: int) -> tuple[bytes, str]:
    """An image that fits into a square, as a file, and its media type: PNG for one so small that its pixels show."""
    small = max(image.size) <= side // 2
    image = image.copy()  # it may be one that is kept
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    if small:
        image.save(buffer, "png", optimize=True)
    else:
        image.save(buffer, "jpeg", quality=78, optimize=True)
    return buffer.getvalue(), "image/png" if small else "image/jpeg"
