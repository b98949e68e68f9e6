"""The parts of `benchmarks.serving` that mean harm: hostile bodies, and decoders that are killed."""

import base64
import json
import os
import random
import signal
import struct
import threading
import time
import zlib
from collections import Counter
from pathlib import Path

from benchmarks.serving_world import BOUNDARY, Client, World, form, in_parts, many


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


def children(pid: int) -> list[int]:
    """Processes that it has started; of the service that is the one that forks decoders, and a tracker of resources."""
    try:
        return [int(n) for path in Path(f"/proc/{pid}/task").glob("*/children") for n in path.read_text().split()]
    except OSError:
        return []
