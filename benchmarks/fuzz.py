"""Files that nobody wrote: adapters, manifests, class names and hub names, changed at random by `hypothesis`.

    python -m benchmarks.fuzz                      # an hour, all targets in turn
    python -m benchmarks.fuzz --minutes 1 config   # one of them

A target takes what the file holds and must accept it, or refuse it by a `PerlclipError` of one line; anything else is
raised, with the smallest input that `hypothesis` finds for it. tests/test_fuzz.py runs each for a second.
"""

import argparse
import atexit
import hashlib
import json
import random
import shutil
import struct
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import perlclip
from perlclip.adapters.folder import CONFIG, OWN_HASH, WEIGHTS
from perlclip.adapters.hub import HubName
from perlclip.data import read_class_names
from perlclip.data.manifests import text_rows

# Settings size tensors: small ones are made, absurd ones are refused, and those in between would only fill the memory.
WHOLE = st.integers(-300, 300) | st.sampled_from([2**40, 2**63 - 1, 2**64, -(2**70)])
PLAIN = st.none() | st.booleans() | WHOLE | st.floats() | st.text(max_size=20)
VALUE = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4))
CELL = st.text(max_size=12) | st.sampled_from(["path", "label", "split", "train", "a.png", "cat", '"', "\r", "\ud800"])


@cache
def adapter() -> tuple[Path, dict[str, Any], bytes]:
    """A small one of the embedded backbone: its folder, its config without the hash, its tensor file."""
    folder = Path(tempfile.mkdtemp(prefix="perlclip-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    method = perlclip.create_method("perl", backbone(), steps=1)
    perlclip.save_adapter(method, folder, class_names=["cat", "dog"], template="a photo of a {}.")
    info = json.loads((folder / CONFIG).read_bytes())
    info.pop(OWN_HASH)
    return folder, info, (folder / WEIGHTS).read_bytes()


@cache
def backbone() -> perlclip.Backbone:
    """The embedded one."""
    return perlclip.load_backbone("tiny", device="cpu")


def accepted(work: Callable[[], object]) -> bool:
    """Whether it was; what is refused is refused in one line."""
    try:
        work()
    except perlclip.PerlclipError as error:
        if "\n" in str(error) or not str(error):
            raise AssertionError(f"not one line: {error!r}") from error
        return False
    return True


def load(config: bytes, weights: bytes) -> bool:
    """The adapter of these two files."""
    folder, _, _ = adapter()
    (folder / CONFIG).write_bytes(config)
    (folder / WEIGHTS).write_bytes(weights)
    return accepted(lambda: perlclip.load_adapter(folder, backbone=backbone()))


@st.composite
def changed(draw: Any, values: Any) -> Any:
    """The same JSON with one value, however deep, replaced, taken out or put in."""
    if isinstance(values, dict) and values and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(sorted(values)))
        inner = draw(changed(values[key]) | st.just(...))
        return {k: inner if k == key else v for k, v in values.items() if k != key or inner is not ...}
    if isinstance(values, dict):
        return values | {draw(st.text(max_size=8)): draw(VALUE)}
    if isinstance(values, list) and values and draw(st.booleans()):
        place = draw(st.integers(0, len(values) - 1))
        return [*values[:place], draw(changed(values[place])), *values[place + 1 :]]
    return draw(VALUE)


def try_config(data: Any) -> None:
    """A config with something changed, the rest right."""
    _, info, weights = adapter()
    made = data.draw(changed(info))
    load(json.dumps(made).encode(), weights)


def try_config_bytes(data: Any) -> None:
    """A config with bytes changed."""
    _, info, weights = adapter()
    load(_damaged(data, json.dumps(info).encode()), weights)


def try_tensors(data: Any) -> None:
    """A tensor file with a header of any kind, or bytes changed, and the right hash."""
    _, info, weights = adapter()
    size = struct.unpack("<Q", weights[:8])[0]
    header = json.dumps(data.draw(changed(json.loads(weights[8 : 8 + size])))).encode()
    made = struct.pack("<Q", len(header)) + header + weights[8 + size :]
    made = made if data.draw(st.booleans()) else _damaged(data, weights)
    load(json.dumps({**info, "weights_sha256": hashlib.sha256(made).hexdigest()}).encode(), made)


def try_manifest(data: Any) -> None:
    """A list of images: cells of any text between marks, JSON lines, or bytes."""
    lines = data.draw(st.lists(st.lists(CELL, max_size=4), max_size=5))
    mark = data.draw(st.sampled_from(",;\t"))
    rows = [mark.join(cells) for cells in ([["path", "label", "split"]] * data.draw(st.booleans()) + lines)]
    objects = [json.dumps(data.draw(st.dictionaries(CELL, VALUE, max_size=3))) for _ in lines]
    text = "\n".join(rows if data.draw(st.booleans()) else objects)
    content = text.encode(errors="surrogatepass") if data.draw(st.booleans()) else data.draw(st.binary(max_size=80))
    accepted(lambda: text_rows(content, "list.csv"))


def try_names(data: Any) -> None:
    """A file of class names, and names of the hub."""
    folder, _, _ = adapter()
    path = folder / data.draw(st.sampled_from(["names.txt", "names.json"]))
    path.write_bytes(data.draw(st.binary(max_size=60) | VALUE.map(lambda value: json.dumps(value).encode())))
    accepted(lambda: read_class_names(path))
    path.unlink()
    text = data.draw(st.text(alphabet="ab/.-_@~ \\:\0", max_size=12))
    found = HubName.parse(text)
    assert found is None or (found.repo.count("/") == 1 and ".." not in found.repo and not found.repo.startswith("/"))


def _damaged(data: Any, content: bytes) -> bytes:
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, min(len(content), start + 20)))
    return content[:start] + data.draw(st.binary(max_size=20)) + content[end:]


TARGETS: dict[str, Callable[[Any], None]] = {
    "config": try_config,
    "config-bytes": try_config_bytes,
    "tensors": try_tensors,
    "manifest": try_manifest,
    "names": try_names,
}


def explore(target: Callable[[Any], None], examples: int, number: int) -> None:
    """So many inputs, the same ones for the same number."""
    checks = settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    seed(number)(checks(given(st.data())(target)))()


def main() -> None:
    """In turn until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--examples", type=int, default=1000, help="of a target before the next one's turn")
    parser.add_argument("--seed", type=int, help="the same one gives the same inputs; another each time without")
    arguments = parser.parse_args()
    if unknown := set(arguments.targets) - TARGETS.keys():
        parser.error(f"unknown target {unknown.pop()!r}; known: {', '.join(TARGETS)}")
    first = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    print(f"seed {first}", flush=True)
    numbers = random.Random(first)
    until, done = time.monotonic() + 60 * arguments.minutes, dict.fromkeys(arguments.targets or TARGETS, 0)
    while time.monotonic() < until:
        for name in done:
            explore(TARGETS[name], arguments.examples, numbers.randrange(2**32))
            done[name] += arguments.examples
    print(*(f"{name}: {count:,} inputs, none wrong" for name, count in done.items()), sep="\n")


if __name__ == "__main__":
    main()
