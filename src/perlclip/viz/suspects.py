"""What a check of labels found, to look at: one page with the images."""

from dataclasses import dataclass

from perlclip.labels.checking import LabelCheck
from perlclip.viz.mistakes import MAX_IMAGES, shown_name, thumbnail
from perlclip.viz.pages import page


@dataclass(frozen=True)
class Card:
    """An image as the page shows it."""

    name: str
    split: str
    label: str
    picture: str
    small: bool
    likely: str = ""
    score: float = 0.0


def suspects_page(found: LabelCheck, *, title: str = "Labels to look at", max_images: int = MAX_IMAGES) -> str:
    """A page of its own: of wrong labels, duplicates and outliers at most so many images each, worst first."""

    def card(place: int, likely: str = "", score: float = 0.0) -> Card:
        picture, small = thumbnail(found.images.images[place])
        label = found.images.class_names[int(found.images.labels[place])]
        return Card(shown_name(found.name(place)), found.splits[place], label, picture, small, likely, score)

    groups, left = [], max_images
    for group in found.duplicates:
        if left <= 0:
            break
        groups.append((group, [card(place) for place in group.places[:left]]))
        left -= len(group.places)
    return page(
        "suspects.html",
        title=title,
        found=found,
        wrong=[card(one.place, one.likely, one.probability) for one in found.wrong[:max_images]],
        groups=groups,
        outliers=[card(one.place, score=one.strangeness) for one in found.outliers[:max_images]],
    )
