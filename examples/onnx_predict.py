"""Label images with a backbone and adapters in ONNX: onnxruntime, numpy and Pillow, no torch.

perlclip export BACKBONE --format onnx --out clip.onnx
perlclip export ADAPTER --out pets.npz
python onnx_predict.py clip.onnx pets.npz,birds.npz cat.jpg 0 robin.jpg 1     # an image, and which adapter it is for
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def pixels_of(path, about):
    image, size = ImageOps.exif_transpose(Image.open(path)).convert("RGB"), about["size"]
    if edge := about["shortest_edge"]:
        sides = [edge if side == min(image.size) else int(edge * side / min(image.size)) for side in image.size]
        left, top = ((side - size) // 2 for side in sides)
        image = image.resize(sides, about["resample"]).crop((left, top, left + size, top + size))
    else:
        image = image.resize((size, size), about["resample"])
    x_HW3 = (np.asarray(image, np.float32) / about["scale"] - np.float32(about["mean"])) / np.float32(about["std"])
    return x_HW3.transpose(2, 0, 1)


def shown(x_3SS, a):
    if "lens" not in a:
        return x_3SS
    lens, offset = a["lens"], a["lens_offset"][:, None, None]
    return a["lens_gain"] * (lens @ x_3SS @ lens.T if lens.size else x_3SS) + offset


def stacked(arrays):
    shape = np.max([x.shape for x in arrays], 0)
    return np.stack([np.pad(x, [(0, n - m) for n, m in zip(shape, x.shape, strict=True)]) for x in arrays])


def softmax(x):
    e = np.exp(np.float64(x) - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def answer(a, logits, v, middle):
    logits, v = logits[: a["steps"] + 1, : len(a["class_names"])], v[: a["steps"] + 1]
    logits = logits - a.get("center", 0)
    mean = v.sum(0) / np.linalg.norm(v.sum(0))
    text = np.log(np.maximum(a["readout"] @ softmax(logits), 1e-300))
    head = a["weight"] @ v.ravel() + a["weight_mean"] @ mean + a["bias"]
    head = head + a["weight_middle"] @ middle[: a["weight_middle"].shape[1]]  # of an adapter that has none, nothing
    return softmax((a["text"] * text + head) / a["temperature"])


def predict(model, adapters, images, which):
    session = onnxruntime.InferenceSession(model)
    about = json.loads(session.get_modelmeta().custom_metadata_map["perlclip"])
    adapters = [dict(np.load(path)) for path in adapters]
    assert all(a["fingerprint"] == about["fingerprint"] and a["depth"] in (-1, about["depth"]) for a in adapters)
    feed = {name: stacked([a[name] for a in adapters]) for name in (i.name for i in session.get_inputs()[2:])}
    feed["classes"] = stacked([*feed["classes"], np.zeros((about["steps"] + 1, 1, 1), np.float32)])[:-1]
    views = [shown(pixels_of(path, about), adapters[w]) for path, w in zip(images, which, strict=True)]
    feed |= {"pixels": np.stack(views), "which": np.array(which)}
    found = zip(which, *session.run(["logits", "embeddings", "middle"], feed), strict=True)
    return [(adapters[w]["class_names"], answer(adapters[w], *outputs)) for w, *outputs in found]


if __name__ == "__main__":
    images, which = sys.argv[3::2], [int(n) for n in sys.argv[4::2]]
    for path, (names, p) in zip(images, predict(sys.argv[1], sys.argv[2].split(","), images, which), strict=True):
        print(f"{path}\t{names[p.argmax()]}\t{p.max():.4f}")
