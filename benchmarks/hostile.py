"""Kills, cuts, flipped bits, bad images, many threads: what is lost, what answers wrongly, what ends in a traceback.

    python -m benchmarks.hostile                       # everything at full counts: an hour on two cores
    python -m benchmarks.hostile --minutes 5           # as much of everything as fits
    python -m benchmarks.hostile save flips            # some of it

The embedded backbone, on the CPU. A kill is SIGKILL at a random moment of a process forked for it; wherever one hits,
the old or the new adapter must load, and what is resumed must end as if nothing had happened. Prints a table and
writes docs/results/hostile.csv; what `wrong` counts should be 0 everywhere.
"""

import argparse
import csv
import io
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import perlclip
from perlclip.adapters.folder import CARD, CONFIG, WEIGHTS, read_info
from perlclip.bench.protocols import Benchmark
from perlclip.bench.schedule import run_all
from perlclip.bench.store import Store
from perlclip.data import read_image
from perlclip.thinking.policy import Policy
from perlclip.thinking.thresholds import Point, Thresholds
from perlclip.training import loop

RESULT = Path(__file__).parents[1] / "docs" / "results" / "hostile.csv"
NAMES = ["pink ring", "$1 or $2 bill", "blue crown"]
COLOURS = {"red": (200, 30, 30), "green_grass": (30, 180, 40), "blue": (30, 40, 200)}


@dataclass
class Count:
    """What was tried, what went wrong, and what else there is to say."""

    what: str
    wanted: int
    done: int = 0
    wrong: int = 0
    seconds: float = 0.0
    notes: dict[str, object] = field(default_factory=dict)

    def tries(self, budget: float) -> Iterator[int]:
        """So many, or as many as the seconds allow."""
        began = time.perf_counter()
        while self.done < self.wanted and (time.perf_counter() - began < budget or not self.done):
            yield self.done
            self.done += 1
            self.seconds = time.perf_counter() - began

    def fail(self, what: str, wrong: bool = True) -> None:
        """One more that went wrong in this way."""
        if wrong:
            self.wrong += 1
            self.note(what)

    def note(self, key: str, amount: int = 1) -> None:
        """One more of these."""
        self.notes[key] = int(str(self.notes.get(key, 0))) + amount


class World:
    """What all sections use: a backbone, pictures and a folder to spoil."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rng = folder, random.Random(1)
        self.backbone = perlclip.load_backbone("tiny", device="cpu")
        self.tree = folder / "tree"
        draws = np.random.default_rng(0)
        for name, colour in COLOURS.items():
            (self.tree / name).mkdir(parents=True)
            for i in range(6):
                pixels = np.clip(np.array(colour) + draws.normal(0, 25, (64, 64, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(self.tree / name / f"{i}.png")

    def save(self, folder: Path, seed: int) -> Path:
        """An adapter with thresholds and metrics, as `fit` makes them."""
        method = perlclip.create_method("perl", self.backbone, seed=seed)
        point = Point(0.0, 1.0, Policy(2.0, 3.0))
        return perlclip.save_adapter(
            method, folder, class_names=NAMES, template="a photo of a {}.", metrics={"validation": {"accuracy": 81.25}},
            thresholds=Thresholds(chosen=point, frontier=(point,), views=8), training={"seed": seed, "shots": 4},
        )  # fmt: skip

    def load(self, folder: Path) -> tuple[object, ...]:
        """All that an adapter's answers depend on."""
        adapter = perlclip.load_adapter(folder, backbone=self.backbone)
        words = adapter.class_names, adapter.template, adapter.method.config, adapter.thresholds, adapter.head
        return (*words, adapter.fingerprint, json.dumps([adapter.training, adapter.metrics]))


def killed(work: Callable[[], object], after: float) -> bool:
    """Do it in a forked process and kill that after so many seconds, if it has not ended; whether it was killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
                work()
            code = 0
        finally:
            os._exit(code)
    until = time.perf_counter() + after
    while time.perf_counter() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            if status:
                raise RuntimeError(f"it failed by itself, with status {status}")
            return False
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def duration(work: Callable[[], object]) -> float:
    """Of one that is left alone, in a forked process as the others."""
    began = time.perf_counter()
    killed(work, math.inf)
    return time.perf_counter() - began


# ---- sections ----


def flips(world: World, budget: float) -> Iterator[Count]:
    """Every truncation, and random bit flips, of the three files."""
    folder = world.save(world.folder / "flips", 1)
    whole, contents = world.load(folder), {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS, CARD)}

    def attempt(count: Count, name: str, content: bytes) -> None:
        (folder / name).write_bytes(content)
        try:
            if world.load(folder) == whole:
                count.note("unchanged")
            else:
                count.wrong += 1
        except perlclip.PerlclipError as error:
            count.note("refused")
            count.wrong += "\n" in str(error)
        except Exception as error:
            count.wrong += 1
            count.note(type(error).__name__)
        (folder / name).write_bytes(contents[name])

    places = [(name, size) for name, content in contents.items() for size in range(len(content))]
    count = Count("truncations of an adapter's three files", len(places))
    for i in count.tries(budget / 2):
        name, size = places[i]
        attempt(count, name, contents[name][:size])
    yield count
    count = Count("bit flips in an adapter's three files", 20_000)
    for i in count.tries(budget / 2):
        name = (CONFIG, CONFIG, WEIGHTS, CARD)[i % 4]
        damaged = bytearray(contents[name])
        damaged[world.rng.randrange(len(damaged))] ^= 1 << world.rng.randrange(8)
        attempt(count, name, bytes(damaged))
    yield count


def save(world: World, budget: float) -> Iterator[Count]:
    """Kills of `save_adapter` over an adapter; then one save that must leave three files."""
    folder = world.folder / "save"
    versions = {}
    for seed in (1, 2):
        world.save(folder, seed)
        versions[seed] = world.load(folder)
    usual = max(duration(lambda: world.save(folder, 1)) for _ in range(3))
    count, here = Count("kills of save_adapter over an adapter", 1000), 1
    for _ in count.tries(budget):
        new = 3 - here
        while not killed(lambda new=new: world.save(folder, new), world.rng.uniform(0, 1.1 * usual)):
            here, new = new, here
            count.note("came to their end")
        try:
            found = world.load(folder)
            count.note("new adapter" if found == versions[new] else "old adapter")
            count.wrong += found not in (versions[here], versions[new])
            here = new if found == versions[new] else here
        except perlclip.PerlclipError:
            count.wrong += 1
            world.save(folder, here)
    world.save(folder, 1)
    count.notes["files left over"] = len(list(folder.iterdir())) - 3
    yield count


def fit(world: World, budget: float) -> Iterator[Count]:
    """Kills of `perlclip fit` over an adapter, resumed by the same command until it ends as an unbroken one does."""
    from perlclip.cli import main

    loop.CHECKPOINT_SECONDS = 0.0

    def train(out: Path) -> None:
        words = ["fit", world.tree, "--out", out, "--backbone", "tiny", "--device", "cpu", "--shots", 3, "--val", 1,
                 "--epochs", 4, "--no-rehearse", "--resume", "--overwrite"]  # fmt: skip
        main([str(word) for word in words], standalone_mode=False)

    def result(out: Path) -> tuple[object, ...]:
        info = read_info(out)
        times = {"seconds", "environment"}
        training = {key: value for key, value in info["training"].items() if key not in times}
        parts = info["weights_sha256"], info["class_names"], info.get("adaptive"), info.get("head"), info["metrics"]
        return (*parts, training)

    whole, out = world.folder / "whole", world.folder / "fit"
    usual = duration(lambda: train(whole))
    wanted = result(whole)
    count = Count("kills of perlclip fit, resumed by the same command", 300)
    old = world.load(world.save(out, 5))

    def check() -> None:
        count.note("trainings that came to their end")
        count.fail("not what an unbroken one gives", result(out) != wanted)
        left = sorted(path.name for path in out.iterdir())
        count.fail(f"left over: {left}", left != sorted([CARD, CONFIG, WEIGHTS]))
        shutil.rmtree(out)

    for _ in count.tries(budget):
        while not killed(lambda: train(out), world.rng.uniform(0, usual)):
            check()
            world.save(out, 5)
        try:
            count.note("checkpoints found", (out / "checkpoint.safetensors").exists())
            count.fail("neither old nor new", world.load(out) != old and result(out) != wanted)
        except perlclip.PerlclipError as error:
            count.fail(f"does not load ({error})")
    killed(lambda: train(out), math.inf)
    check()
    yield count


def bench(world: World, budget: float) -> Iterator[Count]:
    """Kills of a benchmark of three methods, gone on with until it ends: the same numbers and adapters as unbroken."""
    loop.CHECKPOINT_SECONDS = 0.0
    suite = world.folder / "garden.toml"
    suite.write_text(f'name = "garden"\nbackbone = "tiny"\n[sets.tree]\ndata = "{world.tree}"\n')
    runs = Benchmark(suite=str(suite), methods=["zero-shot", "perl", "coop"], seeds=[1, 2], shots=[2]).runs()

    def results(store: Store) -> list[object]:
        found = store.records()
        weights = [(home / WEIGHTS).read_bytes() for home in found.homes if (home / WEIGHTS).exists()]
        numbers = [[record["metrics"], record["predictions"], record["run"]] for record in found.complete]
        return [numbers, weights, len(found.failed), found.damaged]

    whole, store = Store(world.folder / "whole-runs"), Store(world.folder / "runs")
    usual = duration(lambda: run_all(runs, whole))
    wanted = results(whole)
    files = len([path for path in whole.folder.rglob("*") if path.is_file()])
    count = Count("kills of a benchmark, gone on with", 50)

    def check() -> None:
        left = [path for path in store.folder.rglob("*") if path.is_file()]
        count.fail("not what an unbroken one gives", results(store) != wanted)
        count.fail(f"left over: {sorted(path.name for path in left)}", len(left) != files)
        count.note("benchmarks that came to their end")
        shutil.rmtree(store.folder)

    for _ in count.tries(budget):
        while not killed(lambda: run_all(runs, store), world.rng.uniform(0, usual)):
            check()
        count.fail("damaged records", bool(store.folder.exists() and store.records().damaged))
    killed(lambda: run_all(runs, store), math.inf)
    check()
    yield count


MAGIC = (b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"BM", b"RIFF\0\0\0\0WEBPVP8 ", b"II*\0", b"MM\0*")


def images(world: World, budget: float) -> Iterator[Count]:
    """Files that begin like images and are none, and images with some bytes changed: an image or one sentence."""
    picture, formats = Image.open(world.tree / "red" / "0.png"), {}
    for name in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"):
        content = io.BytesIO()
        picture.save(content, name)
        formats[name] = content.getvalue()

    def attempt(count: Count, content: bytes) -> None:
        path = world.folder / "image.png"
        path.write_bytes(content)
        began = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = read_image(path)
            count.note("images")
            count.wrong += found.mode != "RGB" or min(found.size) < 1
        except perlclip.PerlclipError as error:
            count.note("refused")
            count.wrong += "\n" in str(error)
        except Exception as error:
            count.wrong += 1
            count.note(type(error).__name__)
        slowest = float(str(count.notes.get("slowest, s", 0)))
        count.notes["slowest, s"] = round(max(slowest, time.perf_counter() - began), 3)

    count = Count("random files as images", 5000)
    for i in count.tries(budget / 2):
        attempt(count, MAGIC[i % len(MAGIC)] + world.rng.randbytes(world.rng.randrange(2000)))
    yield count
    count = Count("images with bytes changed, cut or doubled", 3000)
    for i in count.tries(budget / 2):
        content = bytearray(formats[list(formats)[i % len(formats)]])
        for _ in range(world.rng.randrange(1, 12)):
            content[world.rng.randrange(len(content))] = world.rng.randrange(256)
        cut = world.rng.randrange(len(content))
        attempt(count, bytes((content, content[:cut], content[:cut] + content)[i % 3]))
    yield count


def threads(world: World, budget: float) -> Iterator[Count]:
    """Sixteen threads that share a classifier, each from another image on: the answers of one thread."""
    adapter = perlclip.load_adapter(world.save(world.folder / "threads", 1), backbone=world.backbone)
    classifier = perlclip.Classifier(adapter)
    paths = sorted(world.tree.rglob("*.png"))
    wanted = [[classifier.predict(path, top_k=3, steps=steps) for path in paths] for steps in (None, "adaptive")]
    count = Count("predictions of 16 threads", 16 * 200)
    found: list[bool] = []
    began = time.perf_counter()

    def ask(thread: int) -> None:
        for i in range(200):
            at = (i + thread) % len(paths)
            answer = classifier.predict(paths[at], top_k=3, steps="adaptive" if i % 2 else None)
            found.append(answer == wanted[i % 2][at])
            if time.perf_counter() - began > budget:
                return

    asking = [threading.Thread(target=ask, args=(thread,)) for thread in range(16)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    count.done, count.wrong, count.seconds = len(found), found.count(False), time.perf_counter() - began
    yield count


def memory(world: World, budget: float) -> Iterator[Count]:
    """What a process holds after many predictions more than after a few."""
    adapter = perlclip.load_adapter(world.save(world.folder / "memory", 1), backbone=world.backbone)
    classifier = perlclip.Classifier(adapter)
    paths = sorted(world.tree.rglob("*.png"))
    count = Count("predictions of one process", 3000)
    before = 0.0
    for i in count.tries(budget):
        classifier.predict(paths[i % len(paths)])
        if i == 300:
            before = _resident()
    if before:
        more = _resident() - before
        count.notes["MiB more than after 300"] = round(more, 1)
        count.wrong = int(more > 50)
    yield count


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


SECTIONS = {one.__name__: one for one in (flips, save, fit, bench, images, threads, memory)}
# Of the time there is, by what full counts take.
SHARES = {"flips": 0.15, "save": 0.1, "fit": 0.4, "bench": 0.15, "images": 0.05, "threads": 0.1, "memory": 0.05}


def write(path: Path, section: str, counts: list[Count]) -> None:
    """The section's rows in place of those that were there."""
    columns = ["section", "what", "wanted", "done", "wrong", "seconds", "notes"]
    rows = list(csv.DictReader(path.open(newline=""))) if path.exists() else []
    new = [
        {"section": section, "what": one.what, "wanted": one.wanted, "done": one.done, "wrong": one.wrong,
         "seconds": round(one.seconds), "notes": "; ".join(f"{key}: {value}" for key, value in one.notes.items())}
        for one in counts
    ]  # fmt: skip
    rows = [row for row in rows if row["section"] != section] + new
    rows.sort(key=lambda row: list(SECTIONS).index(row["section"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Run the sections asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)}; all if not given")
    parser.add_argument("--minutes", type=float, default=60.0, help="for all sections together; full counts if enough")
    parser.add_argument("--out", type=Path, default=RESULT, help="CSV file; other sections' rows in it are kept")
    given = parser.parse_args()
    if unknown := set(given.sections) - SECTIONS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)  # so that forking is safe
    chosen = given.sections or list(SECTIONS)
    wrong = 0
    for name in chosen:
        budget = 60 * given.minutes * SHARES[name] / sum(SHARES[one] for one in chosen)
        with tempfile.TemporaryDirectory(prefix="perlclip-hostile-") as folder:
            counts = []
            for count in SECTIONS[name](World(Path(folder)), budget):
                counts.append(count)
                wrong += count.wrong
                notes = "; ".join(f"{key}: {value}" for key, value in count.notes.items())
                print(f"{count.what}: {count.done:,} of {count.wanted:,}, {count.wrong} wrong, {count.seconds:.0f} s"
                      f"{' (' + notes + ')' if notes else ''}", flush=True)  # fmt: skip
        write(given.out, name, counts)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
