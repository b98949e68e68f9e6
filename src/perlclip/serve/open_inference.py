"""The Open Inference Protocol, version 2, as KServe and Triton speak it: an adapter is a model.

    input    image           BYTES  [n]      image files; in JSON as base64 or a data URI
    outputs  label           BYTES  [n]      probability        FP32  [n]
             top_labels      BYTES  [n, k]   top_probabilities  FP32  [n, k]
             steps           INT32  [n]      rejected           BOOL  [n]     with the parameter `reject`

Parameters of a request are those of `/v1/predict`. Tensors come and go as JSON or, by the binary data extension, behind
it: then `Inference-Header-Content-Length` says where the JSON ends. Strings have their length before them, 4 bytes.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perlclip.errors import PerlclipError
from perlclip.inference.judging import Prediction
from perlclip.serve.guard import read_json
from perlclip.serve.images_in import image_bytes

HEADER = "Inference-Header-Content-Length"
INPUT = {"name": "image", "datatype": "BYTES", "shape": [-1]}
OUTPUTS = {
    "label": ("BYTES", 1), "probability": ("FP32", 1), "top_labels": ("BYTES", 2), "top_probabilities": ("FP32", 2),
    "steps": ("INT32", 1), "rejected": ("BOOL", 1),
}  # fmt: skip
USUAL = ("label", "probability", "steps")
NUMPY = {"FP32": np.float32, "INT32": np.int32, "BOOL": np.bool_}


@dataclass(frozen=True)
class InferRequest:
    """What was asked for; `binary` are the outputs that go behind the JSON."""

    id: str | None
    files: list[bytes]
    parameters: dict[str, Any]
    outputs: list[str]
    binary: set[str]

    @classmethod
    def read(cls, body: bytes, header: str | None) -> "InferRequest":
        """Checked."""
        length = len(body)
        if header is not None:
            if not header.isdecimal() or int(header[:20]) > len(body):
                raise PerlclipError(f"{HEADER} must say how many of the {len(body)} bytes are JSON")
            length = int(header)
        asked = read_json(body[:length])
        inputs = asked.get("inputs") if isinstance(asked, dict) else None
        if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
            raise PerlclipError("an inference request has one input, 'image'")
        files = _files(inputs[0], body[length:])
        parameters = _object(asked, "parameters")
        all_binary = parameters.pop("binary_data_output", False) is True
        outputs, binary = [], set()
        for output in asked.get("outputs") or [{"name": name} for name in USUAL]:
            name = output.get("name") if isinstance(output, dict) else None
            if not isinstance(name, str) or name not in OUTPUTS:
                raise PerlclipError(f"an output is one of {', '.join(OUTPUTS)}")
            outputs.append(name)
            if _object(output, "parameters").get("binary_data", all_binary) is True:
                binary.add(name)
        given = asked.get("id")
        return cls(given if isinstance(given, str) else None, files, parameters, outputs, binary)

    def respond(self, model: str, found: Sequence[Prediction]) -> tuple[bytes, dict[str, str]]:
        """The response's body and headers."""
        outputs, tail = [], b""
        for name in dict.fromkeys(self.outputs):
            kind, shape, values = _output(name, found)
            entry: dict[str, Any] = {"name": name, "datatype": kind, "shape": shape}
            if name in self.binary:
                raw = _packed(kind, values)
                tail += raw
                entry["parameters"] = {"binary_data_size": len(raw)}
            else:
                entry["data"] = values
            outputs.append(entry)
        said = {"model_name": model, "model_version": "1", **({"id": self.id} if self.id else {}), "outputs": outputs}
        head = json.dumps(said, ensure_ascii=False).encode(errors="replace")
        if not tail:
            return head, {"content-type": "application/json"}
        return head + tail, {"content-type": "application/octet-stream", HEADER.lower(): str(len(head))}


def model_metadata(name: str, classes: int) -> dict[str, Any]:
    """What the protocol says of a model."""
    outputs = [{"name": key, "datatype": kind, "shape": [-1] * rank} for key, (kind, rank) in OUTPUTS.items()]
    about = {"parameters": {"classes": str(classes)}}
    return {"name": name, "versions": ["1"], "platform": "perlclip", "inputs": [INPUT], "outputs": outputs, **about}


def _object(asked: dict[str, Any], key: str) -> dict[str, Any]:
    value = asked.get(key, {})
    if not isinstance(value, dict):
        raise PerlclipError(f"{key!r} must be an object")
    return dict(value)


def _files(tensor: dict[str, Any], tail: bytes) -> list[bytes]:
    shape = tensor.get("shape")
    if tensor.get("name") != INPUT["name"] or tensor.get("datatype") != "BYTES":
        raise PerlclipError("the input is 'image', of the datatype BYTES: image files, not pixels")
    if not isinstance(shape, list) or not shape or type(shape[0]) is not int or shape[1:] not in ([], [1]):
        raise PerlclipError("the input's shape is [n] or [n, 1], a file for each of n images")
    size = _object(tensor, "parameters").get("binary_data_size")
    if size is not None:
        if type(size) is not int or size != len(tail):
            raise PerlclipError(f"binary_data_size must be the {len(tail)} bytes behind the JSON")
        files = _unpacked(tail)
    else:
        data = tensor.get("data")
        if not isinstance(data, list):
            raise PerlclipError("the input has neither data nor binary data")
        files = [image_bytes(text) for one in data for text in (one if isinstance(one, list) else [one])]
    if len(files) != shape[0]:
        raise PerlclipError(f"the input's shape says {shape[0]} images, and there are {len(files)}")
    return files


def _unpacked(tail: bytes) -> list[bytes]:
    files, at = [], 0
    while at < len(tail):
        (size,) = struct.unpack_from("<I", tail, at) if at + 4 <= len(tail) else (len(tail),)
        if at + 4 + size > len(tail):
            raise PerlclipError("the binary data ends within an image")
        files.append(tail[at + 4 : at + 4 + size])
        at += 4 + size
        if len(files) > 10_000:
            raise PerlclipError("the binary data has too many parts")
    return files


def _output(name: str, found: Sequence[Prediction]) -> tuple[str, list[int], list[Any]]:
    kind, rank = OUTPUTS[name]
    if rank == 2:
        which = 0 if name == "top_labels" else 1
        values = [pair[which] for one in found for pair in one.top]
        return kind, [len(found), len(found[0].top)], values
    if name == "rejected" and any(one.rejected is None for one in found):
        raise PerlclipError("the output 'rejected' needs the parameter reject: true")
    values = [getattr(one, name) for one in found]
    return kind, [len(found)], [-1 if value is None else value for value in values]


def _packed(kind: str, values: Sequence[Any]) -> bytes:
    if kind == "BYTES":
        texts = [str(value).encode(errors="replace") for value in values]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    return np.asarray(values, NUMPY[kind]).tobytes()
