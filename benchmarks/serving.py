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
import base64
import csv
import http.client
import io
import json
import os
import random
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

import perlclip
from benchmarks.common import RESULTS, byte_vocabulary, file_name, machine, write_csv
from perlclip.adapters.folder import Adapter
from perlclip.data.images import read_image
from perlclip.heads.head import Head
from perlclip.serve.engine import Engine, ImageRow
from perlclip.serve.guard import give_way
from perlclip.serve.shelf import Shelf
from perlclip.viz.drawing import draw
from perlclip.viz.style import GREY, VERMILION

MIXES = (1, 16, 256)
TURNS = 5
PIECES = 20
LOADS = (0.25, 0.5, 0.75, 0.9)
BOUNDARY = "perlclip-benchmark"
Answer = tuple[int, dict]


class World:
    """A backbone, a folder of adapters, image files, a service, and the rows of the result file."""

    def __init__(self, folder: Path, options: argparse.Namespace, path: Path) -> None:
        self.options, self.adapters, self.path = options, folder / "adapters", path
        self.began, self.part, self.rows = time.perf_counter(), "start", []
        self.process: subprocess.Popen[str] | None = None
        name = str(vit_b16(folder / "clip")) if options.backbone == "vit-b16" else options.backbone
        self.name = name
        self.backbone = perlclip.load_backbone(name, device=options.device, dtype=options.dtype)
        self.say(f"{name} on {self.backbone.device}")
        self.names = [f"a{n:03}" for n in range(max(NEEDS[part] for part in options.parts or PARTS))]
        for n, adapter in enumerate(self.names):
            perlclip.save_adapter(random_adapter(self.backbone, options.classes, n), self.adapters / adapter)
        self.say(f"{len(self.names)} adapters written")
        self.files = [picture(seed, options.pixels) for seed in range(64)]
        self.close = 1e-3 if options.dtype == "float32" else 0.1  # probabilities that are the same but for rounding

    def say(self, what: str) -> None:
        """How far it has come."""
        print(f"[{time.perf_counter() - self.began:6.1f} s] {self.part}: {what}", flush=True)

    def note(self, what: str, value: float, unit: str, **more: object) -> None:
        """One figure, at once on the screen and in the file."""
        row = {"part": self.part, "what": what, "value": float(value), "unit": unit, "more": json.dumps(more)}
        self.rows.append(row)
        self.say(f"{what:48} {value:12.2f} {unit:10} {more or ''}")
        keep(self.path, self.part, [row for row in self.rows if row["part"] == self.part])

    def service(self) -> tuple[str, int]:
        """The command in a process of its own, ready to answer: its address and process id."""
        if self.process is None:
            options, began = self.options, time.perf_counter()
            command = [sys.executable, "-c", "from perlclip.cli import main; main()", "serve", str(self.adapters)]
            command += ["--backbone", self.name, "--device", str(options.device), "--dtype", options.dtype]
            command += ["--port", "0", "--batch-size", str(options.batch_size), "--workers", str(options.workers)]
            command += ["--max-wait-ms", str(options.max_wait_ms)]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            line = self.process.stdout.readline()
            if not line:
                raise SystemExit("the service did not start")
            self.address = line.split()[-1]
            listens, client = time.perf_counter() - began, Client(self.address)
            while client.ask("GET", "/readyz")[0] != 200:
                time.sleep(0.05)
            warm = time.perf_counter() - began - listens
            self.say(f"the service listens after {listens:.1f} s and has warmed up {warm:.1f} s later")
        return self.address, self.process.pid

    def leave(self) -> None:
        """At once, as when a time limit is over: threads that ask are not waited for, and no service is left."""
        if self.process is not None:
            self.process.kill()
        os._exit(143)

    def end(self) -> None:
        """End the service."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(60)
            self.process = None


def vit_b16(folder: Path) -> Path:
    """Random weights at ViT-B/16 size, as a Hugging Face folder."""
    torch.manual_seed(0)
    tokenizer = CLIPTokenizer(vocab=byte_vocabulary(), merges=[])
    ids = dict(eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id)
    CLIPModel(CLIPConfig(vision_config=dict(patch_size=16), text_config=ids)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    CLIPImageProcessorPil().save_pretrained(folder)
    return folder


def random_adapter(backbone: perlclip.Backbone, classes: int, seed: int) -> Adapter:
    torch.manual_seed(seed)
    method = perlclip.create_method("perl", backbone, readout="rising")
    with torch.no_grad():  # so that a thought of another adapter would be seen in the answer
        for p in method.parameters():
            p.add_(0.3 * torch.randn(p.shape).to(p) * (p.shape[-1] ** -0.5 if p.ndim > 1 else 1.0))
    names = tuple(f"c{seed} {n}" for n in range(classes))
    head = Head(
        class_names=names, weight_CE=0.1 * torch.randn(classes, backbone.embed_dim).half().float(),
        bias_C=torch.zeros(classes), scale=2.0,
    )  # fmt: skip
    return Adapter(method=method.eval(), class_names=names, template="a {}.", head=head)


def picture(seed: int, pixels: int) -> bytes:
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    small.resize((pixels, pixels), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


# ---- asking ----


class Client:
    """One connection, kept; the service closes one that was idle for seconds, so that it is opened again."""

    def __init__(self, address: str) -> None:
        place = urlsplit(address)
        self.connection = http.client.HTTPConnection(place.hostname, place.port, timeout=120)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        for _ in range(1 if self.connection.sock is None else 2):
            try:
                self.connection.request(method, path, body, named)
                response = self.connection.getresponse()
                content = response.read()
                return response.status, json.loads(content) if content.startswith(b"{") else {}
            except (OSError, http.client.HTTPException):
                self.connection.close()
        return 0, {}

    def answers(self, files: list[bytes], adapters: list[str]) -> dict[str, dict]:
        """Of the first image, by adapter."""
        status, said = self.predict(files, adapters)
        if status != 200:
            raise SystemExit(f"the service says {status}: {said.get('error')}")
        return said["results"][0]["answers"]

    def predict(self, files: list[bytes], adapters: list[str], **fields: str) -> Answer:
        body = form(files, adapters=",".join(adapters), **fields)
        return self.ask("POST", "/v1/predict", body, Content_Type=f"multipart/form-data; boundary={BOUNDARY}")


def form(files: list[bytes], **fields: str) -> bytes:
    line = f"--{BOUNDARY}\r\nContent-Disposition: form-data; name="
    parts = [f'{line}"{name}"\r\n\r\n{value}\r\n'.encode() for name, value in fields.items()]
    parts += [f'{line}"images"; filename="x"\r\n\r\n'.encode() + data + b"\r\n" for data in files]
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def many(
    address: str, threads: int, work: Callable[[Client, int], object], count: int, seconds: float = float("inf")
) -> tuple[list, float]:
    """`work(client, i)` for i in 0..count-1 by so many threads with a connection each, or as many as there is time for.

    Results, as they came, and how long it took.
    """
    numbers, found, began = iter(range(count)), [], time.perf_counter()

    def worker() -> None:
        client = Client(address)
        for i in numbers:
            if time.perf_counter() - began > seconds:
                return
            found.append(work(client, i))

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(worker) for _ in range(threads)]:
            done.result()
    return found, time.perf_counter() - began


# ---- the parts ----


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
        if time.perf_counter() - began > options.seconds:
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


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


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


def in_parts(
    world: World, threads: int, work: Callable[[Client, int], object], count: int, what: str, unit: str,
    value: Callable[[Counter], float], also: Callable[[], dict] = dict,
) -> None:  # fmt: skip
    """So many requests in parts: after each the figure so far, which the last one replaces."""
    (address, _), counted, began = world.service(), Counter(), time.perf_counter()
    for part in range(PIECES):
        start, end = count * part // PIECES, count * (part + 1) // PIECES
        counted.update(many(address, threads, lambda c, i, start=start: work(c, start + i), end - start)[0])
        world.rows = [row for row in world.rows if (row["part"], row["what"]) != (world.part, what)]
        spent = round(time.perf_counter() - began)
        more = {str(k): n for k, n in counted.items()} | {"seconds": spent} | also()
        world.note(what, value(counted), unit, requests=end, **more)


def first_use(client: Client, name: str) -> float:
    """Seconds until an adapter is loaded."""
    began = time.perf_counter()
    assert client.ask("GET", f"/v2/models/{name}/ready")[0] == 200
    return time.perf_counter() - began


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


def hostile(world: World) -> None:
    """Bodies that nobody should send, and a good request after each, by a few threads at a time."""
    options, (address, pid) = world.options, world.service()
    client, slowest = Client(address), [0.0]
    for name in world.names[:16]:
        client.predict(world.files[:1], [name])

    def work(client: Client, i: int) -> str:
        path, body, headers = hostile_body(random.Random(i), world.files)
        status = Client(address).ask("POST", path, body, **headers)[0]
        began = time.perf_counter()
        good = client.predict([world.files[i % 64]], [world.names[i % 16]])[0]
        slowest[0] = max(slowest[0], time.perf_counter() - began)
        return str(status) if good == 200 else f"{status}, then {good}"

    def crashed(_: Counter) -> int:
        return int(Client(address).ask("GET", "/readyz")[0] != 200 or not Path(f"/proc/{pid}").exists())

    def also() -> dict:
        return {"attackers": options.attackers, "slowest_good_answer_ms": round(1e3 * slowest[0])}

    in_parts(world, options.attackers, work, options.hostile, "hostile bodies, crashes", "", crashed, also)


def hostile_body(rng: random.Random, files: list[bytes]) -> tuple[str, bytes, dict[str, str]]:
    """A path, a body and headers."""
    file = bytearray(rng.choice(files))
    for _ in range(rng.randrange(1, 50)):
        file[rng.randrange(len(file))] = rng.randrange(256)
    spoilt = bytes(file[: rng.randrange(1, len(file))])
    name = rng.choice(
        ["a000", "../a000", "a000/../../etc", "%2e%2e", "\x00", "a" * 5000, "", "COM1", "é", "a000\r\nX: y"]
    )
    noise = rng.randbytes(rng.choice([0, 1, 100, 100_000]))
    deep = rng.choice(["[", '{"a":', '{"images":[', '"\\ud800']) * rng.choice([10, 5000])
    numbers = rng.choice(["1e999", "-1", "NaN", "9" * 5000, "0.0001", '"adaptive"', "null", "[]", "true"])
    option = rng.choice(["steps", "top_k", "max_ms", "max_mean_steps", "coverage", "reject_rate", "adapters", "images"])
    good = base64.b64encode(files[0]).decode()
    kinds: list[tuple[str, bytes, str]] = [
        ("/v1/predict", form([spoilt], adapters="a000"), f"multipart/form-data; boundary={BOUNDARY}"),
        ("/v1/predict", form([bomb(rng)], adapters="a000"), f"multipart/form-data; boundary={BOUNDARY}"),
        ("/v1/predict", form([noise] * rng.randrange(80), adapters=name), f"multipart/form-data; boundary={BOUNDARY}"),
        ("/v1/predict", noise, f"multipart/form-data; boundary={BOUNDARY}"),
        ("/v1/predict", deep.encode(errors="replace"), "application/json"),
        ("/v1/predict", json.dumps({"images": [good], "adapters": name}).encode(), "application/json"),
        ("/v1/predict", f'{{"images":["{good}"],"adapters":"a000","{option}":{numbers}}}'.encode(), "application/json"),
        ("/v1/predict", b"[" + b"[]," * 100_000 + b"[]]", "application/json"),
        ("/v2/models/a000/infer", noise, "application/octet-stream"),
        ("/v2/models/a000/infer", b'{"inputs":[{"name":"image","datatype":"BYTES","shape":[1],"parameters":'
         b'{"binary_data_size":8}}]}' + struct.pack("<I", 2**31) + b"abcd", "application/octet-stream"),
    ]  # fmt: skip
    path, body, kind = rng.choice(kinds)
    headers = {"Content_Type": kind}
    if path.startswith("/v2"):
        headers["Inference_Header_Content_Length"] = rng.choice(["0", "-1", "x", str(len(body)), str(len(body) - 8)])
    if not rng.randrange(20):
        headers |= rng.choice(
            [{"Content_Encoding": "gzip"}, {"Host": "evil.example"}, {"Origin": "http://evil.example"}]
        )
    return path, body, headers


def bomb(rng: random.Random) -> bytes:
    """A PNG of a few hundred bytes that says it is enormous, or a true one of many pixels."""
    width, height = rng.choice([(2**31 - 1, 2**31 - 1), (60_000, 60_000), (1, 60_000), (0, 5), (7000, 7000)])

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pixels = zlib.compress(bytes((width // 8 + 2) * height)) if width == 7000 else zlib.compress(bytes(1000))
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def kill(world: World) -> None:
    """Decoders killed while threads ask: what is lost are the requests that they had."""
    options, (address, pid) = world.options, world.service()
    many(address, 8, lambda c, i: c.predict([world.files[i % 64]], [world.names[i % 16]])[0], 64)
    world.say("16 adapters loaded")
    kills = 0

    def killing() -> None:
        nonlocal kills
        rng = random.Random(1)
        while kills < options.kills:
            time.sleep(0.1)
            found = [p for server in children(pid) for p in children(server)]
            if found:
                os.kill(rng.choice(found), signal.SIGKILL)
                kills += 1

    thread = threading.Thread(target=killing, daemon=True)
    thread.start()
    found: list[int] = []
    while thread.is_alive():
        found += many(address, 8, lambda c, i: c.predict([world.files[i % 64]], [world.names[i % 16]])[0], 64)[0]
        world.say(f"{kills} killed, {len(found)} requests")
    after = many(address, 8, lambda c, i: c.predict([world.files[i % 64]], ["a000"])[0], 64)[0]
    lost = sum(status != 200 for status in found)
    more = dict(requests=len(found), statuses=Counter(found), after=Counter(after))
    world.note(f"{kills} decoders killed, requests lost", lost, "requests", **more)


def resident(pid: int) -> float:
    """MiB of the service's own process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def children(pid: int) -> list[int]:
    """Processes that it has started; of the service that is the one that forks decoders, and a tracker of resources."""
    try:
        return [int(n) for path in Path(f"/proc/{pid}/task").glob("*/children") for n in path.read_text().split()]
    except OSError:
        return []


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
        world = World(Path(folder), options, path)
        signal.signal(signal.SIGTERM, lambda *_: world.leave())
        try:
            for world.part in options.parts or PARTS:
                PARTS[world.part](world)
        finally:
            world.end()


def keep(path: Path, part: str, found: list[dict]) -> None:
    """A part's rows in the place of those that were there; at once, as the next figure may not come."""
    before = list(csv.DictReader(path.open(newline=""))) if path.exists() else []
    rows = [row for row in before if row["part"] != part] + found
    write_csv(path, sorted(rows, key=lambda row: list(PARTS).index(row["part"])))


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
