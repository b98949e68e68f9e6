"""`perlclip serve` under load: adapters in the mix, latency, one image through ten adapters, wrong answers, memory,
hostile bodies, killed decoders.

    python -m benchmarks.serving                                          # the embedded backbone, minutes on two cores
    python -m benchmarks.serving --backbone vit-b16 --device cuda --dtype bfloat16 --batch-size 256 \
        --per-request 16 --requests 10000 --soak 100000 --hostile 5000     # an H200; random weights at ViT-B/16 size
    python -m benchmarks.serving mix share                                # some of it

Adapters are random PERLs (K = 4, readout "rising", a head, other classes each) in a temporary folder; the service is
the command itself, in a process of its own, and is asked over HTTP by threads of this one. Writes
benchmarks/results/serving-….csv figure by figure, where parts that were not run keep their rows. What is measured by
the clock ends after `--seconds`, if it has not after so many requests.
"""

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import torch

import perlclip
from benchmarks.common import RESULTS, file_name, machine
from benchmarks.serving_attacks import hostile, kill
from benchmarks.serving_world import Client, World, first_use, in_parts, many, timed
from perlclip.data.images import read_image
from perlclip.serve.engine import Engine, ImageRow
from perlclip.serve.guard import give_way
from perlclip.serve.shelf import Shelf
from perlclip.viz.drawing import draw
from perlclip.viz.style import GREY, VERMILION

MIXES = (1, 16, 256)
TURNS = 5
LOADS = (0.25, 0.5, 0.75, 0.9)


def mix(world: World) -> None:
    """Throughput with 1, 16 and 256 adapters in the mix: of the engine alone, and over HTTP."""
    options, backbone = world.options, world.backbone
    shelf, engine = Shelf(world.adapters, backbone, max_bytes=2**34), Engine(backbone)
    size = options.batch_size
    views = list(torch.randn(size, 3, backbone.preprocess.size, backbone.preprocess.size).to(backbone.device))
    loaded = [shelf.get(name) for name in world.names]
    world.say("all adapters loaded here")
    world.note("memory of an adapter", shelf.bytes / len(loaded) / 2**10, "KiB", classes=options.classes)
    # So many batches that every adapter of the mix has come: each batch has as many of them as it has room for.
    batches = {n: [] for n in MIXES}
    for n in MIXES:
        for turn in range(options.rounds):
            chosen = [loaded[(turn * size + i) % n] for i in range(size)]
            batches[n].append(
                [
                    ImageRow(pixels=v, adapter=a, wanted=a.classifier.judge.wanted())
                    for v, a in zip(views, chosen, strict=True)
                ]
            )
    times: dict[int, list[float]] = {n: [] for n in MIXES}
    began = time.perf_counter()
    for turn in range(-2, options.rounds):  # on CUDA the second batch of a size is recorded
        for n in MIXES:
            took = timed(partial(engine.answer, batches[n][turn]))
            if turn >= 0:
                times[n].append(took)
        if turn >= 0 and time.perf_counter() - began > options.seconds:
            break
    speed = {n: size / statistics.median(times[n]) for n in MIXES}
    for n in MIXES:
        more = dict(batch=size, of_one_adapter=round(speed[n] / speed[1], 3), batches=len(times[n]))
        world.note(f"engine, {n} adapters in the mix", speed[n], "images/s", **more)
    mix_over_http(world)


def mix_over_http(world: World) -> None:
    """In turn, so that a machine that slows down slows all of them."""
    options, (address, _) = world.options, world.service()
    loads = many(address, 1, lambda c, i: first_use(c, world.names[i]), len(world.names))[0]
    world.note("first use of an adapter", 1e3 * statistics.median(loads), "ms", classes=options.classes)

    def turn(n: int, start: int) -> tuple[list, float]:
        def work(client: Client, i: int) -> int:
            files = [world.files[(i + j) % 64] for j in range(options.per_request)]
            return client.predict(files, [world.names[(start + i) % n]])[0]

        most = options.requests // options.per_request // TURNS
        return many(address, options.threads, work, max(1, most), options.seconds / TURNS)

    for n in MIXES:
        turn(n, 0)
    world.say(f"{TURNS} turns for each")
    seconds = dict.fromkeys(MIXES, 0.0)
    statuses: dict[int, Counter[int]] = {n: Counter() for n in MIXES}
    for _ in range(TURNS):
        for n in MIXES:
            found, took = turn(n, sum(statuses[n].values()))
            seconds[n] += took
            statuses[n].update(found)
    rate = {n: statuses[n][200] * options.per_request / seconds[n] for n in MIXES}
    for n in MIXES:
        more = dict(per_request=options.per_request, threads=options.threads, statuses=statuses[n])
        more |= dict(of_one_adapter=round(rate[n] / rate[1], 3))
        world.note(f"HTTP, {n} adapters in the mix", rate[n], "images/s", **more)


def load(world: World) -> None:
    """p50 and p99 at shares of what one image per request reaches; requests come at random moments."""
    options, (address, _) = world.options, world.service()
    names = world.names[:16]

    def work(client: Client, i: int) -> int:
        return client.predict([world.files[i % 64]], [names[i % 16]])[0]

    many(address, options.threads, work, 64)
    world.say("16 adapters loaded")
    found, seconds = many(address, options.threads, work, options.requests, options.seconds)
    most = found.count(200) / seconds
    world.note("most requests, one image each", most, "1/s", threads=options.threads, statuses=Counter(found))
    for share in LOADS:
        count = max(10, min(options.requests, int(share * most * options.seconds)))
        moments = np.cumsum(np.random.default_rng(1).exponential(1 / (share * most), count)).tolist()
        began = time.perf_counter() + 0.2

        def on_time(client: Client, i: int, began: float = began, moments: list[float] = moments) -> tuple[float, int]:
            time.sleep(max(0.0, began + moments[i] - time.perf_counter()))
            status = work(client, i)
            return 1e3 * (time.perf_counter() - began - moments[i]), status  # from when it was due

        found, _ = many(address, 4 * options.threads, on_time, count)
        late = statistics.quantiles([ms for ms, _ in found], n=100)
        more = dict(requests=count, statuses=Counter(status for _, status in found))
        world.note(f"p50 at {share:.0%} load", late[49], "ms", **more)
        world.note(f"p99 at {share:.0%} load", late[98], "ms", **more)
    draw_load([row for row in world.rows if row["part"] == "load"], world.path.with_name(f"{world.path.stem}-load.png"))


def share(world: World) -> None:
    """One image through ten adapters: one call against ten."""
    address, _ = world.service()
    client, names = Client(address), world.names[:10]
    for name in names:
        first_use(client, name)
    world.say("10 adapters loaded")
    times: dict[str, list[float]] = {"one call": [], "ten calls": []}
    wrong, until = 0, time.perf_counter() + world.options.seconds
    for turn in range(-3, world.options.rounds):
        file = [world.files[turn % 64]]
        began = time.perf_counter()
        whole = client.answers(file, names)
        times["one call"].append(time.perf_counter() - began)
        began = time.perf_counter()
        single = {name: client.answers(file, [name])[name] for name in names}
        times["ten calls"].append(time.perf_counter() - began)
        wrong += sum(abs(whole[name]["probability"] - single[name]["probability"]) > world.close for name in names)
        if turn >= 0 and time.perf_counter() > until:
            break
    middle = {name: 1e3 * statistics.median(found[3:]) for name, found in times.items()}
    for name, value in middle.items():
        world.note(f"one image x 10 adapters, {name}", value, "ms", max_wait_ms=world.options.max_wait_ms)
    more = dict(wrong=wrong, rounds=len(times["one call"]) - 3)
    world.note("one image x 10 adapters", middle["ten calls"] / middle["one call"], "x faster", **more)
    refused = many(address, 1, lambda c, i: timed(lambda: c.predict([world.files[i]], ["nobody"])), 20)[0]
    world.note("a request that is refused before decoding", 1e3 * statistics.median(refused), "ms")
    share_of_engine(world)


def share_of_engine(world: World) -> None:
    """The same without HTTP: decoding, and one row against ten of one image."""
    shelf, engine = Shelf(world.adapters, world.backbone), Engine(world.backbone)
    loaded = [shelf.get(name) for name in world.names[:10]]
    view = world.backbone.preprocess.test_view(read_image(world.files[0]))
    works = {
        "decode an image": lambda: world.backbone.preprocess.test_view(read_image(world.files[0])),
        "base alone": lambda: world.backbone.encode_image(view[None].to(world.backbone.device)).float().cpu(),
    }
    for count in (1, 10):
        rows = [ImageRow(pixels=view, adapter=one, wanted=one.classifier.judge.wanted()) for one in loaded[:count]]
        works[f"engine, one image x {count} adapters"] = partial(engine.answer, rows)
    with torch.no_grad():
        times = {name: [timed(work) for _ in range(3 + world.options.rounds)][3:] for name, work in works.items()}
    for name, found in times.items():
        world.note(name, 1e3 * statistics.median(found), "ms")


def threads(world: World) -> None:
    """64 threads x 100 adapters: every answer against that of the adapter alone."""
    options, names = world.options, world.names[:100]
    files = world.files[:8]
    expected = {}
    for name in names:
        alone = perlclip.Classifier.from_pretrained(world.adapters / name, backbone=world.backbone, compile="off")
        for i, one in enumerate(alone.predict(files, top_k=1 if options.dtype == "float32" else 3)):
            expected[name, i] = dict(one.top)  # with few bits, batches of other sizes may turn two that are close
    world.say("100 adapters asked alone")
    address, _ = world.service()
    loads = many(address, 1, lambda c, i: first_use(c, names[i]), len(names))[0]
    world.note("first use of an adapter", 1e3 * statistics.median(loads), "ms", classes=options.classes)

    def work(client: Client, i: int) -> str:
        name, image = names[i * 7 % 100], i % 8
        for _ in range(20):
            status, said = client.predict([files[image]], [name])
            if status != 503:
                break
            time.sleep(0.2)
        if status != 200:
            return f"status {status}"
        found, top = said["results"][0]["answers"][name], expected[name, image]
        if abs(found["probability"] - top.get(found["label"], 9)) > world.close:
            return "wrong"
        return "right" if found["label"] == next(iter(top)) else "right but for rounding"

    in_parts(world, 64, work, options.requests, "64 threads x 100 adapters, wrong", "answers", lambda n: n["wrong"])


def memory(world: World) -> None:
    """Growth of the service's memory over the requests; all adapters are loaded before. Nine of ten ask for no step."""
    options, (address, pid) = world.options, world.service()

    def work(client: Client, i: int) -> int:
        return client.predict([world.files[i % 64]], [world.names[i % 100]], **({} if i % 10 == 0 else {"steps": "0"}))[
            0
        ]

    many(address, 1, lambda c, i: first_use(c, world.names[i]), 100)
    world.say("100 adapters loaded")
    many(address, options.threads, work, max(options.soak // 100, 200))
    before = resident(pid)
    world.say(f"{before:.0f} MiB before")

    def growth(_: Counter) -> float:
        return resident(pid) - before

    in_parts(world, options.threads, work, options.soak, "growth of memory", "MiB", growth)


def resident(pid: int) -> float:
    """MiB of the service's own process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


PARTS = {
    "mix": mix,
    "load": load,
    "share": share,
    "threads": threads,
    "memory": memory,
    "hostile": hostile,
    "kill": kill,
}

NEEDS = dict(mix=max(MIXES), load=16, share=10, threads=100, memory=100, hostile=16, kill=16)  # adapters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--backbone", default="tiny", help="'tiny', 'vit-b16' (random weights), or any other")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--classes", type=int, default=100, help="of each adapter")
    parser.add_argument("--pixels", type=int, default=256, help="a side of the images sent")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=16, help="that ask")
    parser.add_argument("--per-request", type=int, default=4, help="images in a request of the mix")
    parser.add_argument("--max-wait-ms", type=float, default=2.0, help="of the service")
    parser.add_argument("--seconds", type=float, default=20.0, help="the most that a figure taken by the clock takes")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--soak", type=int, default=5000)
    parser.add_argument("--hostile", type=int, default=500)
    parser.add_argument("--attackers", type=int, default=2, help="threads that send hostile bodies")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--out", type=Path, help="another result file")
    options = parser.parse_args()
    where = f"{Path(options.backbone).name}-{machine('cuda' if options.device.startswith('cuda') else 'cpu')}"
    path = options.out or RESULTS / file_name("serving", where, getattr(torch, options.dtype))
    give_way()  # here many threads wait for answers
    with tempfile.TemporaryDirectory() as folder:
        parts = options.parts or list(PARTS)
        world = World(Path(folder), options, path, max(NEEDS[part] for part in parts), list(PARTS))
        signal.signal(signal.SIGTERM, lambda *_: world.leave())
        try:
            for world.part in parts:
                PARTS[world.part](world)
        finally:
            world.end()


def draw_load(rows: list[dict], path: Path) -> None:
    """Latency against load."""
    found = {kind: [row["value"] for row in rows if row["what"].startswith(kind)] for kind in ("p50", "p99")}
    most = rows[0]["value"]

    def paint(figure) -> None:
        axis = figure.subplots()
        for (kind, values), colour in zip(found.items(), (GREY, VERMILION), strict=True):
            axis.plot([share * most for share in LOADS], values, color=colour, marker="o", markersize=4, label=kind)
        axis.axvline(most, color=GREY, linestyle=":", label=f"the most it answers, {most:.0f}/s")
        axis.set(xlabel="requests per second, one image each", ylabel="ms until the answer", xlim=(0, None))
        axis.set_ylim(0, None)
        axis.legend()

    path.write_bytes(draw("load", "", (5, 3.2), paint).png)


if __name__ == "__main__":
    main()
