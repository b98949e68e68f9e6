"""Adapters as one page for a browser: the model, onnxruntime-web and a script, in a file that fetches nothing.

The page (`page.html`, beside this file) makes pixels as Pillow does, runs the ONNX file of the backbone with every
adapter in one batch, and finishes as `adapter_arrays` says. What it needs is packed into it, so that it opens from a
disk by a double click. onnxruntime-web itself is not in this package: it is taken from where npm has put it.
"""

import base64
import gzip
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

from perlclip.adapters.folder import Adapter
from perlclip.data.images import ImageSource, read_image
from perlclip.errors import PerlclipError, first_line
from perlclip.export.adapter_arrays import adapter_arrays
from perlclip.export.onnx_graph import ADAPTER, about, export_backbone
from perlclip.files import require_writable, write_files

PAGE = Path(__file__).with_name("page.html")
RUNTIME = {"runtime": "ort.wasm.bundle.min.mjs", "wasm": "ort-wasm-simd-threaded.wasm"}  # of onnxruntime-web
PLACES = ("", "dist", "package/dist", "node_modules/onnxruntime-web/dist")
MAX_FILE = 2**27  # bytes of one of them
PART = 2**22  # letters of a script element: browsers have limits
EXAMPLES, SIDE = 12, 512  # images that are shown to try, and their longer side at most
RESAMPLE = {Image.Resampling.LANCZOS, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC}  # that the page knows
MISSING = "onnxruntime-web is not there: `npm pack onnxruntime-web`, and name the .tgz that it writes as the runtime"


def export_page(
    adapters: Sequence[Adapter], path: str | Path, *, runtime: str | Path, names: Sequence[str] = (),
    examples: Sequence[ImageSource] = (), class_names: Sequence[str] | None = None, template: str | None = None,
    head: bool = True, int8: str | None = None,
) -> Path:  # fmt: skip
    """Write a page that answers with all of these adapters, which have one backbone.

    `runtime` is npm's package onnxruntime-web: the `.tgz` that `npm pack` writes, or its folder. `names` are those of
    the adapters, and some of the images `examples` are there to try.
    """
    path = Path(path)
    require_writable(path.parent)
    parts = runtime_files(Path(runtime))
    arrays = [adapter_arrays(adapter, class_names, template, head=head) for adapter in adapters]
    backbone = adapters[0].method.backbone
    if len({str(each["fingerprint"]) for each in arrays}) > 1:
        raise PerlclipError("adapters of one page have one backbone; these have several")
    depths = sorted({int(each["depth"]) for each in arrays} - {-1}) or [0]
    if len(depths) > 1:
        raise PerlclipError(f"adapters of one page think from one depth; these have {depths}")
    if backbone.preprocess.resample not in RESAMPLE:
        raise PerlclipError(f"backbone {backbone.name!r} resizes images in a way that the page does not know")
    steps = max(int(each["steps"]) for each in arrays)
    with TemporaryDirectory() as folder:
        model = export_backbone(backbone, Path(folder) / "model.onnx", steps=steps, depth=depths[0], int8=int8)
        if Path(f"{model}.data").exists():
            raise PerlclipError(f"backbone {backbone.name!r} is too large for a page")
        parts["model"] = model.read_bytes()
    shown = [*names, *(f"adapter {n}" for n in range(len(names), len(arrays)))]
    told = {
        "about": about(backbone, steps, depths[0]),
        "inputs": {name: _input([each[name] for each in arrays], name, steps) for name in ADAPTER},
        "adapters": [_finishing(name, each) for name, each in zip(shown, arrays, strict=True)],
        "examples": [_picture(image) for image in examples[:: max(1, len(examples) // EXAMPLES)][:EXAMPLES]],
    }
    parts["about"] = json.dumps(told).encode()
    page = PAGE.read_text("utf-8").replace("<!-- parts -->", "\n".join(map(_packed, parts, parts.values())))
    write_files({path: page.encode()})
    return path


def runtime_files(runtime: Path) -> dict[str, bytes]:
    """What the page needs of onnxruntime-web, from its package or its folder."""
    if runtime.is_file():
        found = _from_package(runtime)
    else:
        folders = [runtime / place for place in PLACES]
        paths = {
            part: next((f / name for f in folders if (f / name).is_file()), None) for part, name in RUNTIME.items()
        }
        found = {part: path.read_bytes() for part, path in paths.items() if path and path.stat().st_size <= MAX_FILE}
    if found.keys() != RUNTIME.keys():
        raise PerlclipError(f"{runtime} does not hold {' and '.join(RUNTIME.values())}; {MISSING}")
    return found


def _from_package(package: Path) -> dict[str, bytes]:
    wanted, found = {name: part for part, name in RUNTIME.items()}, dict[str, bytes]()
    try:
        with tarfile.open(package, "r|*") as archive:
            for member in archive:
                part = wanted.get(member.name.rpartition("/")[2])
                if part and member.isreg() and member.size <= MAX_FILE and (file := archive.extractfile(member)):
                    found[part] = file.read()
    except (tarfile.TarError, OSError, EOFError) as error:
        raise PerlclipError(f"cannot read {package}: {first_line(error)}; {MISSING}") from error
    return found


def _input(arrays: Sequence[np.ndarray], name: str, steps: int) -> dict[str, Any]:
    """One input for all adapters; what is smaller is filled up with zeros."""
    shape = np.max([each.shape for each in arrays], 0)
    if name == "classes":
        shape[0] = steps + 1
    whole = np.zeros((len(arrays), *shape), np.float32)
    for place, each in zip(whole, arrays, strict=True):
        place[tuple(slice(n) for n in each.shape)] = each
    return {"shape": list(whole.shape), "data": _letters(whole)}


def _finishing(name: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """What makes an adapter's answer of the model's outputs."""
    names = [
        "weight",
        "weight_mean",
        "weight_middle",
        "bias",
        "readout",
        *({"center", "lens", "lens_offset"} & arrays.keys()),
    ]
    large = {each: _letters(arrays[each]) for each in names}
    numbers = ["steps", "text", "temperature", *({"lens_gain"} & arrays.keys())]
    small = {each: arrays[each].item() for each in numbers}
    return {"name": name, "class_names": arrays["class_names"].tolist(), **small, **large}


def _letters(array: np.ndarray) -> str:
    return base64.b64encode(array.astype("<f4").tobytes()).decode()


def _picture(source: ImageSource) -> str:
    image = read_image(source).copy()
    image.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return base64.b64encode(buffer.getvalue()).decode()


def _packed(name: str, content: bytes) -> str:
    text = base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()
    pieces = (text[i : i + PART] for i in range(0, len(text), PART))  # each a whole number of bytes
    return "\n".join(f'<script type="application/gzip" data-part="{name}">{piece}</script>' for piece in pieces)
