"""A simulated annotator at the studio's HTTP interface, and how long a refit takes (docs/studio.md).

    python -m benchmarks.studio annotator --set noisy_shapes              a drawn set, embedded backbone
    python -m benchmarks.studio annotator --set eurosat --real FOLDER     photographs: FOLDER/{clip,sets.json,eurosat}
    python -m benchmarks.studio figure                                    the annotators' curves, for the document
    python -m benchmarks.studio time --backbone tiny --labels 10          from the first label to an adapter

The annotator has a folder of training and test images. It puts the test images aside, gives true labels to the others,
and reads from the table that the page reads what the test images are taken for. It labels what the studio suggests
(`suggested`), any image (`random`), or suggestions and, after every four of them, a grid of images of one guess, of
which it gives what is wrong its own class and confirms the others (`grid`). A stroke is a key pressed: a label, a grid.
"""

import argparse
import csv
import io
import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
from PIL import Image

import perlclip
from benchmarks.common import RESULTS, file_name, machine
from benchmarks.labels import labels_needed, write
from benchmarks.photographs import photographs
from perlclip.data.images import read_image
from perlclip.data.sets import DataSet, ImageSet
from perlclip.data.toybox import load_toybox
from perlclip.serve.guard import Limits, give_way, running
from perlclip.studio.interface import studio_app
from perlclip.studio.project import SKIPPED, Project
from perlclip.studio.worker import Worker
from perlclip.viz.drawing import draw
from perlclip.viz.style import BLUE, GREY, VERMILION

SIZES = (20, 40, 60, 80, 120, 160, 200, 240)
SHARE = 0.8  # of the pool that a seed sees
GRID, BETWEEN, SURE = 24, 4, 128  # images of a grid at most, labels between two of them, what the page selects: p ≥ 0.5


class Annotator:
    """One who knows the truth, at the interface of the page."""

    def __init__(self, address: str, truth: dict[str, int], classes: tuple[str, ...], template: str) -> None:
        self.address = address
        images = self.get("images")
        self.listing, self.truth = images["listing"], np.array([truth[name] for name in images["names"]])
        self.names, self.strokes = images["names"], 0
        body = {"classes": [[None, name] for name in classes], "template": template, "version": 0}
        self.post("classes", body)

    def get(self, path: str) -> dict:
        with urlopen(f"{self.address}/api/{path}") as answer:
            return json.load(answer)

    def post(self, path: str, body: dict) -> dict:
        headers = {"content-type": "application/json"}
        with urlopen(Request(f"{self.address}/api/{path}", json.dumps(body).encode(), headers)) as answer:
            return json.load(answer)

    def label(self, places: list[int], value: int) -> None:
        self.post("label", {"listing": self.listing, "places": places, "value": value})

    def settled(self) -> dict:
        """The state, once guesses are those of the last label and all images have been looked at."""
        while True:
            state = self.get("state")
            if state["guessed"] == state["version"] and state["looked"] == state["images"]:
                return state
            time.sleep(0.01)

    def table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        with urlopen(f"{self.address}/api/table") as answer:
            content, size = answer.read(), len(self.truth)
        label, guess = np.frombuffer(content[: 8 * size], "<i4").reshape(2, size)
        return label, guess, np.frombuffer(content[8 * size :], "u1")


def annotate(one: Annotator, how: str, seed: int) -> Iterator[tuple[int, int, float]]:
    """Labels, strokes and accuracy on the test images, in percent, as labels are given."""
    rng = random.Random(f"pool {seed}")
    pool = [i for i, name in enumerate(one.names) if name.startswith("train")]
    test = [i for i, name in enumerate(one.names) if name.startswith("test")]
    left = set(rng.sample(pool, int(SHARE * len(pool))))
    one.label([*test, *(i for i in pool if i not in left)], SKIPPED)
    given, since, sizes = 0, 0, [size for size in SIZES if size <= len(left) // 2]
    while sizes:
        if given >= sizes[0]:
            one.settled()
            _, guess, _ = one.table()
            yield given, one.strokes, 100 * float(np.mean(guess[test] == one.truth[test]))
            sizes = [size for size in sizes if size > given]
            continue
        if how == "grid" and since >= BETWEEN:
            since, (label, guess, sure) = 0, one.table()
            free = np.array([i for i in sorted(left) if label[i] == -1])
            most = np.bincount(guess[free]).argmax() if rng.random() < 0.5 else rng.choice(guess[free].tolist())
            shown = free[(guess[free] == most) & (sure[free] >= SURE)]
            shown = shown[np.argsort(shown.astype("u4") * np.uint32(0x9E3779B1), kind="stable")][:GRID]  # as the page
            right = [int(i) for i in shown if one.truth[i] == most]
            strokes = [([int(i)], int(one.truth[i])) for i in shown if one.truth[i] != most]
            strokes += [(right, int(most))] if right else []
        else:
            queue = one.settled()["queue"] if how != "random" else []
            place = queue[0][0] if queue else rng.choice(sorted(left))
            strokes, since = [([place], int(one.truth[place]))], since + 1
        for places, value in strokes:
            one.label(places, value)
            one.strokes += 1
            left -= set(places)
            given += len(places)


def fill(folder: Path, data: DataSet, train: int, test: int) -> dict[str, int]:
    """Images under names that say only which part they are of; the truth by name."""
    folder.mkdir(parents=True, exist_ok=True)
    truth = {}
    for part, limit in (("train", train), ("test", test)):
        images: ImageSet = getattr(data, part)
        chosen = sorted(i for places in images.by_class().values() for i in places[:limit])
        for n, i in enumerate(random.Random(1).sample(chosen, len(chosen))):
            path = folder / f"{part}-{n:05}.png"
            truth[path.name] = int(images.labels[i])
            if not path.exists():
                read_image(images.images[i]).save(path)
    return truth


def annotator(options: argparse.Namespace) -> None:
    data = photographs(options.real, options.set) if options.real else load_toybox(options.set)
    name = str(options.real / "clip") if options.real else "tiny"
    backbone = perlclip.load_backbone(name, device=options.device, dtype=options.dtype)
    folder = options.work / options.set
    truth = fill(folder, data, *options.per_class)
    path, curves = options.out / f"studio-annotator-{options.set}.csv", {}
    before = list(csv.DictReader(path.open(newline=""))) if path.exists() else []
    rows = [row for row in before if row["how"] not in options.how]  # of ways that are not run now
    for how in options.how:
        for seed in range(options.seeds):
            with Project(folder) as project:  # labels anew, what was seen stays
                features = Worker(project, backbone).features.folder
            shutil.rmtree(options.work / "project", ignore_errors=True)
            if features.exists():
                shutil.copytree(features, options.work / "project" / features.name)
            with Project(folder, options.work / "project") as project:
                worker = Worker(project, backbone, every=10**9)
                worker.start()
                with running(studio_app(worker), Limits(port=0)) as address:
                    one = Annotator(address, truth, data.train.class_names, data.train.template)
                    run = []
                    for labels, strokes, accuracy in annotate(one, how, seed):
                        run.append((labels, strokes, accuracy))
                        rows.append({"set": options.set, "how": how, "seed": seed, "labels": labels,
                                     "strokes": strokes, "accuracy": round(accuracy, 2)})  # fmt: skip
                worker.stop()
                if not features.exists():
                    shutil.copytree(worker.features.folder, features)
            curves.setdefault(how, []).append(run)
            write(path, rows)
        shortest = min(map(len, curves[how]))  # a grid may give so many labels at once that a size is left out
        labels, strokes, accuracy = np.array([run[:shortest] for run in curves[how]]).mean(0).round(1).T
        print(f"{options.set} {how:10s} labels {labels} strokes {strokes} → {accuracy}", flush=True)
    if {"random", "suggested"} <= curves.keys():
        sizes = [row[0] for row in curves["random"][0]]
        both = (np.array([[row[2] for row in run] for run in curves[how]]).mean(0) for how in ("random", "suggested"))
        needed = labels_needed(sizes, *both)
        print(f"share of random's labels that suggestions need: {needed.round(2)}, mean {np.nanmean(needed[1:]):.2f}")


def figure(options: argparse.Namespace) -> None:
    """All sets that were annotated: mean and standard deviation over the seeds."""
    sets: dict[str, dict[str, dict[int, list[tuple[float, float]]]]] = {}
    for path in sorted(options.out.glob("studio-annotator-*.csv")):
        for row in csv.DictReader(path.open(newline="")):
            found = sets.setdefault(row["set"], {}).setdefault(row["how"], {})
            # A grid gives several labels at once, so that sizes differ a little from seed to seed.
            size = max(size for size in SIZES if size <= int(row["labels"]))
            found.setdefault(size, []).append((float(row["strokes"]), float(row["accuracy"])))

    def paint(figure) -> None:
        for axis, (name, ways) in zip(figure.subplots(1, len(sets), squeeze=False)[0], sets.items(), strict=True):
            for (how, curve), colour in zip(ways.items(), (GREY, VERMILION, BLUE), strict=False):
                points = np.array([np.mean(found, 0) for found in curve.values()])
                spread = np.array([np.std(found, 0)[1] for found in curve.values()])
                axis.plot(*points.T, color=colour, marker="o", markersize=3, label=how)
                low, high = points[:, 1] - spread, points[:, 1] + spread
                axis.fill_between(points[:, 0], low, high, color=colour, alpha=0.15, linewidth=0)
            axis.set(title=name, xlabel="keys pressed", ylabel="accuracy %")
        max(figure.axes, key=lambda axis: len(axis.lines)).legend()

    picture = Image.open(io.BytesIO(draw("annotator", "", (3.2 * len(sets), 3), paint).png))
    picture.convert("RGB").quantize(64).save("docs/studio-annotator.png", optimize=True)


def trained(worker: Worker, count: int) -> dict:
    """What was said of so many trainings' last one, when it is over."""
    while len(rows := [row for row in worker.history if row["kind"] == "perl"]) < count:
        if worker.status.error:
            raise SystemExit(worker.status.error)
        time.sleep(0.02)
    return rows[count - 1]


def timing(options: argparse.Namespace) -> None:
    """Toys as large as the backbone takes them: only the time counts here."""
    data, work = load_toybox("cluttered_toys"), Path(tempfile.mkdtemp(dir=options.work))
    backbone = perlclip.load_backbone(options.backbone, device=options.device, dtype=options.dtype)
    truth = fill(work / "images", data, -(-options.images // 32), 0)
    for name in sorted(truth)[options.images :]:
        (work / "images" / name).unlink()
    kind = "vit-b16" if Path(options.backbone).is_dir() else options.backbone
    where = f"{kind}-{machine(backbone.device.type)}"
    path, rows = options.out / file_name("studio-time", where, backbone.dtype), []

    def note(what: str, seconds: float, **more: object) -> None:
        rows.append({"what": what, "seconds": round(seconds, 2), "images": options.images, "labels": options.labels})
        write(path, rows)
        print(f"{what:48} {seconds:8.2f} s {more or ''}", flush=True)

    give_way()  # as the command does
    with Project(work / "images") as project:
        worker = Worker(project, backbone, every=options.labels)
        started = time.perf_counter()
        worker.start()
        with running(studio_app(worker), Limits(port=0)) as address:
            one = Annotator(address, truth, data.train.class_names, data.train.template)
            one.settled()
            note("all images looked at", time.perf_counter() - started)
            while worker.status.task:
                time.sleep(0.02)
            note("ready to train", time.perf_counter() - started)
            started, first = time.perf_counter(), 0.0
            for place in range(options.labels):
                one.label([place], int(one.truth[place]))
                if not first and any(row["kind"] == "quick" for row in worker.history):
                    first = time.perf_counter() - started
            one.settled()
            first = first or time.perf_counter() - started
            note("first label to a quick adapter on disk", first)
            note("first label to all labels' quick adapter", time.perf_counter() - started)
            last = time.perf_counter()
            row = trained(worker, 1)
            note("first label to PERL's adapter on disk", time.perf_counter() - started)
            note("last label to PERL's adapter on disk", time.perf_counter() - last)
            note("of it training", row["seconds"], trained_on=row["labels"] - row["held"])
            for what in ("reading", "steps", "recording", "head", "testing", "saving"):
                note(f"of that {what}", row[f"{what}_seconds"])
            worker.ask("train")
            note("PERL's adapter trained again", trained(worker, 2)["seconds"])
        worker.stop()
    shutil.rmtree(work)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("annotator", "figure", "time"))
    parser.add_argument("--set", default="noisy_shapes")
    parser.add_argument("--real", type=Path)
    parser.add_argument("--how", nargs="+", default=["random", "suggested", "grid"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--per-class", type=int, nargs=2, default=(32, 16), metavar=("TRAIN", "TEST"))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "perlclip-studio-bench")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--backbone", default="tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--images", type=int, default=80)
    parser.add_argument("--labels", type=int, default=10)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    {"annotator": annotator, "figure": figure, "time": timing}[given.what](given)
