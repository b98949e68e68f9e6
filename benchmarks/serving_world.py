"""What the parts of `benchmarks.serving` share: adapters, image files, the service in a process, and who asks it."""

import argparse
import csv
import http.client
import io
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

import perlclip
from benchmarks.common import byte_vocabulary, write_csv
from perlclip.adapters.folder import Adapter
from perlclip.heads.head import Head

BOUNDARY = "perlclip-benchmark"
PIECES = 20
Answer = tuple[int, dict]


class World:
    """A backbone, a folder of adapters, image files, a service, and the rows of the result file."""

    def __init__(
        self, folder: Path, options: argparse.Namespace, path: Path, adapters: int, order: Sequence[str]
    ) -> None:
        self.options, self.adapters, self.path, self.order = options, folder / "adapters", path, order
        self.began, self.part, self.rows = time.perf_counter(), "start", []
        self.process: subprocess.Popen[str] | None = None
        name = str(vit_b16(folder / "clip")) if options.backbone == "vit-b16" else options.backbone
        self.name = name
        self.backbone = perlclip.load_backbone(name, device=options.device, dtype=options.dtype)
        self.say(f"{name} on {self.backbone.device}")
        self.names = [f"a{n:03}" for n in range(adapters)]
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
        self._keep([row for row in self.rows if row["part"] == self.part])

    def _keep(self, found: list[dict]) -> None:
        """A part's rows in the place of those that were there; at once, as the next figure may not come."""
        before = list(csv.DictReader(self.path.open(newline=""))) if self.path.exists() else []
        rows = [row for row in before if row["part"] != self.part] + found
        write_csv(self.path, sorted(rows, key=lambda row: self.order.index(row["part"])))

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


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
