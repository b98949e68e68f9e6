"""Images a second by decoding processes, from the tables of `benchmarks.millions`: a panel for each size of image.

python -m benchmarks.millions_figure OUT.png TABLE.csv …
"""

import csv
import sys
from pathlib import Path

from matplotlib.figure import Figure

from perlclip.viz.drawing import draw
from perlclip.viz.style import BLUE, GREY, VERMILION


def draw_rates(tables: list[list[dict[str, str]]]) -> bytes:
    def paint(figure: Figure) -> None:
        for panel, rows in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables, strict=True):
            workers = [int(row["workers"]) for row in rows]

            def rates(name: str, rows: list[dict[str, str]] = rows) -> list[float]:
                return [float(row[name]) for row in rows]

            panel.plot(workers, rates("decoding"), "s--", color=VERMILION, label="decoding alone")
            panel.plot(workers, rates("device"), color=GREY, label="device alone")
            panel.plot(workers, rates("steady"), "o-", color=BLUE, label="files to shards")
            panel.set(xlabel="decoding processes", ylabel="images a second", title=f"JPEGs of {rows[0]['size']} pixels")
            panel.set(xscale="log", yscale="log")
            panel.set_xticks(workers, list(map(str, workers)))
            panel.minorticks_off()
            panel.legend()

    return draw("rates", "", (5 * len(tables), 3.8), paint).png


if __name__ == "__main__":
    out, *names = map(Path, sys.argv[1:])
    rows = [row for name in names for row in csv.DictReader(name.open())]
    sizes = dict.fromkeys(row["size"] for row in rows)
    out.write_bytes(draw_rates([[row for row in rows if row["size"] == size] for size in sizes]))
