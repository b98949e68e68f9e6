"""From files to shards of answers: images a second end to end, beside decoding alone and the device alone; memory.

    python -m benchmarks.millions --images DATA/dtd/train --workers 1 2 --device cpu --dtype bfloat16 --count 300
    python -m benchmarks.millions --images DATA/dtd/train --workers 1 4 8 12 16 --device cuda --count 20000
    python -m benchmarks.millions --images DATA/dtd/train --backbone tiny --memory 100000 --workers 16 --device cuda
    python -m benchmarks.millions --images DATA/dtd/train --backbone tiny --ray

Photographs are scaled up by `--scale` (the shorter side of DTD's is 224) and saved as JPEGs, `--files` different ones;
a list names them over and over until there are `--count`, or less by as much as there are fewer processes. PERL takes
all of its K = 4 steps, with a random projector. `end_to_end` is a whole job but for loading the model, with the start
of its processes and the first batches; `steady` is what comes behind its first tenth. `share` is that over the slower
of decoding and device, the goal of which is 90 %; where the device is a CPU, both take the same cores, and
`share_of_both` is over what remains if they take turns. `--memory N` labels N images and says what the processes hold
after each tenth. `--ray` does a job here, on a local Ray cluster, and on one of two nodes, killing a worker and a node.
"""

import argparse
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import perlclip
from benchmarks.common import RESULTS, Table, machine
from perlclip.backbone.preprocess import Preprocess
from perlclip.batch.decoders import SLOTS, decoded
from perlclip.batch.job import predict_all
from perlclip.batch.shards import answers
from perlclip.batch.work import BATCH, DECODE, Job
from perlclip.data.images import images_under, read_image
from perlclip.progress import heard_by

NAMES = [f"thing {i}" for i in range(100)]


def make_files(folder: Path, out: Path, files: int, scale: float) -> list[Path]:
    """Large JPEGs from real photographs."""
    made = []
    out.mkdir()
    for i, path in enumerate(images_under(folder)[:: max(1, len(images_under(folder)) // files)][:files]):
        image = read_image(path)
        size = round(image.width * scale), round(image.height * scale)
        made.append(out / f"{i:06}.jpg")
        image.resize(size, Image.Resampling.BICUBIC).save(made[-1], quality=90)
    return made


@dataclass(frozen=True)
class Bytes:
    """A preprocessing that stops before the device."""

    made: Preprocess

    @property
    def size(self) -> int:
        return self.made.size

    def crop(self, image: Image.Image) -> np.ndarray:
        return self.made.crop(image)

    def pixels(self, crops_B3HW: torch.Tensor) -> torch.Tensor:
        return crops_B3HW


def decoding(job: Job, backbone: perlclip.Backbone, paths: list[Path], size: int) -> float:
    """Images a second that come out of the decoding processes, with nobody behind them; without their start."""
    least = job.least(backbone.preprocess.size)
    feed = decoded(
        enumerate(paths), Bytes(backbone.preprocess), size, torch.device("cpu"), workers=job.workers or 0, least=least
    )
    count = len(next(feed).tags)
    began, first = time.perf_counter(), count
    for batch in feed:
        count += len(batch.tags)
    return (count - first) / (time.perf_counter() - began)


def device(classifier: perlclip.Classifier, size: int, seconds: float) -> float:
    """Images a second of the device with its pixels already there."""
    backbone = classifier.method.backbone
    side = backbone.preprocess.size
    pixels = torch.randn(size, 3, side, side, device=backbone.device)

    def batches(until: Callable[[], bool]) -> Iterator:
        while not until():
            yield pixels, {}

    list(classifier.predict_batches(batches(iter([False, False, True]).__next__)))
    began = time.perf_counter()
    ahead = backbone.device.type == "cuda"
    found = list(classifier.predict_batches(batches(lambda: time.perf_counter() - began > seconds), ahead=ahead))
    return size * len(found) / (time.perf_counter() - began)


def whole(job: Job, size: int) -> tuple[float, float]:
    """Images a second of a job, and of what comes behind its first tenth, and behind what was decoded meanwhile."""
    times: list[tuple[int, float]] = []

    def listen(_title: str, done: int, _total: int, _note: str) -> None:
        times.append((done, time.perf_counter()))

    with heard_by(listen):
        found = predict_all(job)
    first, began = next(each for each in times if each[0] >= max(found.images // 10, (SLOTS + 1) * size))
    last, ended = times[-1]
    return found.added / found.seconds, (last - first) / (ended - began) if last > first else 0.0


def resident() -> dict[str, float]:
    """MiB of this process alone, and of it and its children with shared pages counted once."""

    def kib(pid: int, field: str) -> int:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) for line in lines if line.startswith(field))

    me = os.getpid()
    children = [int(pid) for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()]
    everyone = sum(kib(pid, "Pss:") for pid in (me, *children))
    return {"main_MiB": kib(me, "Rss:") / 1024, "all_MiB": everyone / 1024}


def memory(job: Job, rows: Table) -> None:
    """What is held after each tenth of a job."""
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            done = sum(1 for _ in (Path(job.out) / "predictions").glob("*.parquet"))
            if done > len(rows):
                rows.add({"images": done * job.shard_size, **resident()})
            over.wait(0.1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    found = predict_all(job)
    over.set()
    watcher.join()
    print(f"{found.images:,} images, {found.added / found.seconds:,.1f} a second")


def on_ray(job: Job) -> Iterator[dict]:
    """The same job here, on a cluster of its own, and on one of two nodes while an actor and then a node are killed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    def done(what: str, **more) -> dict:
        out = Path(f"{job.out}-{what.partition(',')[0]}-{len(more)}")
        found = predict_all(Job(**vars(job) | {"out": out} | more))
        in_order = [row["key"] for row in answers(out)] == Path(job.sources[0]).read_text().splitlines()
        return {"what": what, "images": found.images, "seconds": found.seconds, "rows_in_order": in_order}

    yield done("local")
    yield done("ray", executor="ray")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=2, object_store_memory=2**28) for _ in range(2)]
    out, said = Path(f"{job.out}-ray-2"), list[int]()

    def kill() -> None:
        for number, how in enumerate((kill_actor, lambda: cluster.remove_node(nodes[0], allow_graceful=False)), 1):
            while len(list(out.glob("predictions/*.parquet"))) < number:
                time.sleep(0.05)
            how()
            said.append(len(list(out.glob("predictions/*.parquet"))))

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    row = done("ray, killed", executor="ray", address=cluster.address)
    killer.join(10)
    cluster.shutdown()
    yield row | dict(zip(("actor_killed_after_shards", "node_killed_after_shards"), said, strict=False))


def kill_actor() -> None:
    """Actors have what they do as their title."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            title = (process / "cmdline").read_bytes()
            if title.startswith(b"ray::") and b"_Answer" in title:
                os.kill(int(process.name), signal.SIGKILL)
                return
    raise RuntimeError("there is no actor to kill")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--backbone", default="openai/clip-vit-base-patch16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--workers", type=int, nargs="+", default=[os.cpu_count() or 1])
    parser.add_argument("--decode", nargs="+", choices=list(DECODE), default=["exact"])
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--count", type=int, nargs="+", default=[2000], help="for each scale, or one for all")
    parser.add_argument("--files", type=int, default=500)
    parser.add_argument("--scale", type=float, nargs="+", default=[3.0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of the device alone")
    parser.add_argument("--memory", type=int, metavar="N", default=0)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="millions-"))
    backbone = perlclip.load_backbone(args.backbone, device=args.device, dtype=args.dtype)
    method = perlclip.create_method("perl", backbone)
    perlclip.save_adapter(method, root / "adapter", class_names=NAMES, template="a photo of a {}.")
    kind = backbone.device.type
    size = args.batch_size or BATCH.get(kind, 32)

    def job(listed: Path, **more) -> Job:
        given = dict(adapter=root / "adapter", sources=[str(listed)], device=args.device, dtype=args.dtype)
        given |= dict(batch_size=size, workers=max(args.workers), out=root / f"out{time.monotonic_ns()}")
        return Job(**given | more)

    what = "memory-" if args.memory else "ray-" if args.ray else ""
    rows = Table(args.out or RESULTS / f"millions-{what}{machine(kind)}.csv")
    alone = 0.0 if args.memory or args.ray else device(perlclip.Classifier(method, NAMES), size, args.seconds)
    print(f"device alone: {alone:,.1f} images a second", flush=True)
    for scale, most in zip(args.scale, args.count * (len(args.scale) if len(args.count) == 1 else 1), strict=True):
        paths = make_files(args.images, root / f"files-{scale}", min(args.files, args.memory or most), scale)
        kilobytes = sum(path.stat().st_size for path in paths) / len(paths) / 1000
        shape = "x".join(map(str, read_image(paths[0]).size))
        print(f"JPEGs, the first of {shape}, {kilobytes:.0f} kB on average; batches of {size} on {kind}", flush=True)

        def listed(count: int, paths: list[Path] = paths, scale: float = scale) -> Path:
            made = root / f"list-{scale}-{count}.txt"
            made.write_text("".join(f"{paths[i % len(paths)]}\n" for i in range(count)))
            return made

        if args.memory:
            memory(job(listed(args.memory), shard_size=max(1, args.memory // 10), progress=False), rows)
        elif args.ray:
            tenth = max(1, most // 10)
            for row in on_ray(job(listed(most), shard_size=tenth, device="cpu", progress=False)):
                rows.add(row)
        else:
            for word in args.decode:
                for workers in args.workers:
                    count = max(12 * size, most * workers // max(args.workers))
                    one = job(listed(count), workers=workers, decode=word)
                    feed = decoding(one, backbone, [paths[i % len(paths)] for i in range(count)], size)
                    found, steady = whole(one, size)
                    row = {"where": machine(kind), "size": shape, "kB": kilobytes, "decode": word, "workers": workers}
                    row |= {"images": count, "decoding": feed, "device": alone, "end_to_end": found, "steady": steady}
                    row["share_percent"] = 100 * steady / min(feed, alone)
                    if kind == "cpu":
                        row["share_of_both_percent"] = 100 * steady * (1 / feed + 1 / alone)
                    rows.add(row)
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
