"""The adapter folder: `adapter_config.json`, `adapter_model.safetensors`, `README.md`.

It names its backbone by a fingerprint of the weights and is refused on another; the config carries a hash of the tensor
file, so a truncated or mixed-up folder is found out before anything is used. No pickle.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

import perlclip
from perlclip.adapters.card import model_card
from perlclip.backbone import Backbone, load_backbone
from perlclip.errors import PerlclipError
from perlclip.files import write_files
from perlclip.heads.head import Head
from perlclip.methods.base import Method, config_dict
from perlclip.methods.registry import create_method
from perlclip.text.classes import check_class_names
from perlclip.text.templates import check_template
from perlclip.thinking.thresholds import Thresholds

FORMAT_VERSIONS = (1, 2)  # 2: with a head, without which earlier versions of perlclip would answer
CONFIG, WEIGHTS, CARD = "adapter_config.json", "adapter_model.safetensors", "README.md"


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A trained method with the classes it was trained for, how it was trained and how good it is.

    `thresholds` are those of adaptive thinking and `head` what is added to the text classifier, where there are any;
    `info` is the whole of `adapter_config.json`, if it was loaded from a folder.
    """

    method: Method
    class_names: tuple[str, ...]
    template: str
    training: Mapping[str, Any] = field(default_factory=dict, repr=False)
    metrics: Mapping[str, Any] = field(default_factory=dict, repr=False)
    thresholds: Thresholds | None = field(default=None, repr=False)
    head: Head | None = field(default=None, repr=False)
    info: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the trained tensors and the head, as the adapter's config has it."""
        return hashlib.sha256(_tensor_bytes(self)).hexdigest()

    @property
    def num_learned(self) -> int:
        """Numbers that were learned: the method's, and those of the head."""
        return self.method.num_trainable + (self.head.numbers if self.head else 0)

    def save(self, folder: str | Path) -> Path:
        """Write the adapter folder, as `save_adapter`."""
        return save_adapter(self, folder)


def save_adapter(
    trained: Adapter | Method,
    folder: str | Path,
    *,
    class_names: Sequence[str] | None = None,
    template: str | None = None,
    training: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    thresholds: Thresholds | None = None,
    head: Head | None = None,
) -> Path:
    """Write an adapter folder: of what `fit` gave or `load_adapter` loaded, or of a method, its classes and template.

    An older adapter there is replaced only once the new files are wholly on disk. A kill in the moment between their
    renames leaves a folder that is refused, never one that answers wrongly.
    """
    if isinstance(trained, Method):
        if class_names is None or template is None:
            raise PerlclipError("save_adapter needs class_names and template, or what fit returned instead of a method")
        trained = Adapter(method=trained, class_names=tuple(class_names), template=template)
    given: dict[str, Any] = dict(
        class_names=class_names,
        template=template,
        training=training,
        metrics=metrics,
        thresholds=thresholds,
        head=head,
    )
    adapter = replace(trained, **{key: value for key, value in given.items() if value is not None})
    folder, method = Path(folder), adapter.method
    check_class_names(adapter.class_names, unique=False)
    check_template(adapter.template)
    if adapter.head:  # its columns are those of these classes, under whatever names
        adapter = replace(adapter, head=replace(adapter.head, class_names=adapter.class_names))
    weights = _tensor_bytes(adapter)
    info = {
        "format_version": 2 if adapter.head else 1,
        "perlclip_version": perlclip.__version__,
        "peft_type": method.name.upper(),
        "base_model_name_or_path": method.backbone.name,
        "backbone_fingerprint": method.backbone.fingerprint,
        "method": method.name,
        "config": config_dict(method),
        "num_trainable": method.num_trainable,
        "class_names": list(adapter.class_names),
        "templates": [adapter.template],
        "sentence": method.sentence(adapter.template),
        **({} if method.as_written else {"plain_names": True}),
        "training": dict(adapter.training),
        "metrics": dict(adapter.metrics),
        **({"adaptive": adapter.thresholds.as_json()} if adapter.thresholds else {}),
        **({"head": adapter.head.as_json()} if adapter.head else {}),
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
    }
    # The config comes last: it is what makes the other two valid.
    write_files(
        {
            folder / WEIGHTS: weights,
            folder / CARD: model_card(info, folder.resolve().name).encode(),
            folder / CONFIG: (json.dumps(info, indent=2, ensure_ascii=False) + "\n").encode(),
        }
    )
    return folder


def _tensor_bytes(adapter: Adapter) -> bytes:
    """The tensor file's contents."""
    tensors = {name: p.detach().cpu().contiguous() for name, p in adapter.method.named_parameters()}
    tensors |= adapter.head.tensors() if adapter.head else {}
    return tensors_to_bytes(tensors, {"format": "pt"})


def load_adapter(
    folder: str | Path,
    *,
    backbone: Backbone | str | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "float32",
) -> Adapter:
    """Load an adapter on its backbone: the one it names, or the one given, which must be the same weights."""
    folder = Path(folder)
    info = read_info(folder)
    tensors = _read_weights(folder, info)
    if not isinstance(backbone, Backbone):
        backbone = load_backbone(backbone or info["base_model_name_or_path"], device=device, dtype=dtype)
    if backbone.fingerprint != info["backbone_fingerprint"]:
        raise PerlclipError(
            f"adapter {folder} was trained on backbone {info['base_model_name_or_path']!r} "
            f"({info['backbone_fingerprint'][:12]}); it does not fit {backbone.name!r} ({backbone.fingerprint[:12]})"
        )
    method = create_method(info["method"], backbone, **info["config"])
    method.as_written = not info.get("plain_names")
    class_names = tuple(info["class_names"])
    head = _read_head(class_names, info, tensors, backbone.embed_dim, folder) if "head" in info else None
    own = {name: tensor for name, tensor in tensors.items() if head is None or name not in head.tensors()}
    _put_weights(method, own, folder)
    return Adapter(
        method=method.eval(),
        class_names=class_names,
        template=info["templates"][0],
        training=info["training"],
        metrics=info["metrics"],
        thresholds=Thresholds.from_json(info["adaptive"]) if "adaptive" in info else None,
        head=head,
        info=info,
    )


def read_info(folder: str | Path) -> dict[str, Any]:
    """The checked contents of `adapter_config.json`."""
    path = Path(folder) / CONFIG
    if not path.parent.is_dir():
        raise PerlclipError(f"no adapter folder {folder}")
    try:
        info = json.loads(path.read_bytes())
    except OSError as error:
        raise PerlclipError(f"{folder} is not an adapter: cannot read {CONFIG}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PerlclipError(f"adapter file {path} is damaged: {error}") from error
    if not isinstance(info, dict) or "format_version" not in info:
        raise PerlclipError(f"{path} is not a perlclip adapter (no format_version)")
    if info["format_version"] not in FORMAT_VERSIONS:
        raise PerlclipError(
            f"adapter {folder} has format version {info['format_version']!r}; "
            f"this perlclip reads versions {' and '.join(map(str, FORMAT_VERSIONS))}"
        )
    if ("head" in info) != (info["format_version"] == 2):
        raise PerlclipError(f"adapter file {path} is damaged: version 2 has a head, version 1 has none")
    for key, kind in _FIELDS.items():
        if not isinstance(info.get(key), kind):
            raise PerlclipError(f"adapter file {path} is damaged: field {key!r} is missing or not a {kind.__name__}")
    check_class_names(info["class_names"], unique=False)
    if len(info["templates"]) != 1:
        raise PerlclipError(f"adapter file {path} is damaged: one template is needed, got {len(info['templates'])}")
    check_template(info["templates"][0])
    if "adaptive" in info:
        try:
            Thresholds.from_json(info["adaptive"])
        except PerlclipError as error:
            raise PerlclipError(f"adapter file {path} is damaged: {error}") from error
    return info


_FIELDS = {
    "base_model_name_or_path": str,
    "backbone_fingerprint": str,
    "method": str,
    "config": dict,
    "class_names": list,
    "templates": list,
    "training": dict,
    "metrics": dict,
    "weights_sha256": str,
}


def _read_weights(folder: Path, info: Mapping[str, Any]) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PerlclipError(f"{folder} is not a complete adapter: cannot read {WEIGHTS}: {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != info["weights_sha256"]:
        raise PerlclipError(f"adapter file {path} is damaged: its contents do not match the hash in {CONFIG}")
    try:
        return parse_tensors(content)
    except SafetensorError as error:
        raise PerlclipError(f"adapter file {path} is damaged: {error}") from error


def _read_head(
    class_names: tuple[str, ...], info: Mapping[str, Any], tensors: Mapping[str, Tensor], width: int, folder: Path
) -> Head:
    try:
        return Head.read(class_names, width, info["head"], tensors)
    except PerlclipError as error:
        raise PerlclipError(f"adapter {folder} is damaged: {error}") from error


def _put_weights(method: Method, tensors: Mapping[str, Tensor], folder: Path) -> None:
    expected = dict(method.named_parameters())
    if set(tensors) != set(expected):
        odd = sorted(set(tensors) ^ set(expected))[0]
        raise PerlclipError(f"adapter {folder} does not fit its own settings: tensor {odd!r} is missing or unexpected")
    for name, p in expected.items():
        if tensors[name].shape != p.shape:
            raise PerlclipError(
                f"adapter {folder}: tensor {name!r} has shape {tuple(tensors[name].shape)}, expected {tuple(p.shape)}"
            )
        if not torch.isfinite(tensors[name]).all():
            raise PerlclipError(f"adapter {folder}: tensor {name!r} holds numbers that are not finite")
        with torch.no_grad():
            p.copy_(tensors[name])
