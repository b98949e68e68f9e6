"""A contact sheet of the toybox suite: the first test images of each of the fifteen sets, a row each.

python scripts/draw_suite.py docs/results/toybox/suite.png
"""

import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from perlclip.data.toybox import load_toybox, toybox_names

COLUMNS = 12


def main(path: str) -> None:
    """Draw the sheet."""
    names = toybox_names()
    figure, axes = plt.subplots(len(names), COLUMNS, figsize=(COLUMNS * 0.75, len(names) * 0.75))
    for row, name in zip(axes, names, strict=True):
        for axis, image in zip(row, load_toybox(name).test.images[:COLUMNS], strict=True):
            axis.imshow(image)
            axis.axis("off")
        row[0].set_title(name, fontsize=7, loc="left", pad=2)
    figure.subplots_adjust(left=0.005, right=0.995, top=0.98, bottom=0.005, wspace=0.04, hspace=0.28)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1])
