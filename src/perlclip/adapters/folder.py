"""The adapter folder: `adapter_config.json`, `adapter_model.safetensors`, `README.md`.

It names its backbone by a fingerprint of the weights and is refused on another; the config carries a hash of the tensor
file and one of itself, so a truncated, damaged or mixed-up folder is found out before anything is used. No pickle.

An adapter is replaced by renaming its config: until then the old one is there, from then on the new one. Its tensors
take their name right after; if that moment is a kill's, they are found under the name that they were staged by.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

import perlclip
from perlclip.adapters.card import model_card, title_of
from perlclip.adapters.hub import HubName, download, upload
from perlclip.backbone import Backbone, load_backbone
from perlclip.backbone.load import CONFIGS, EMBEDDED, BackboneNotFoundError
from perlclip.errors import PerlclipError, first_line
from perlclip.files import MIB, held_folder, parse_json, read_file, staged, sweep, write_files
from perlclip.heads.head import Head
from perlclip.methods.base import Method, config_dict
from perlclip.methods.registry import create_method
from perlclip.text.classes import check_class_names
from perlclip.text.templates import check_template
from perlclip.thinking.thresholds import Thresholds
from perlclip.trust.record import Trust

# 2 has a linear head, 3 one of Gaussians, 4 one that also reads the image tower's middle, 5 one with a centered part of
# zero-shot's answer, 6 one that asks trained texts whether a class is new: earlier versions of perlclip would answer
# without them.
FORMAT_VERSIONS = (1, 2, 3, 4, 5, 6)
CONFIG, WEIGHTS, CARD = "adapter_config.json", "adapter_model.safetensors", "README.md"
OWN_HASH = "config_sha256"  # of all other fields; adapters of 0.1.0 have none
LARGEST = {CONFIG: 64 * MIB, WEIGHTS: 1024 * MIB, CARD: 16 * MIB}
HUB = "hub"  # field of the config: the repository and the commit that the adapter was taken from
MESSAGE = "Push an adapter of perlclip"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LOCK_SECONDS = 10.0  # a save takes milliseconds
_saving = Lock()  # of this process; others are kept out by a lock on the folder


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A trained method with the classes it was trained for, how it was trained and how good it is.

    `thresholds` are those of adaptive thinking, `head` what is added to the text classifier, `trust` what images held
    out say about its probabilities, where there are any; `info` is the whole of `adapter_config.json`, if it was loaded
    from a folder.
    """

    method: Method
    class_names: tuple[str, ...]
    template: str
    training: Mapping[str, Any] = field(default_factory=dict, repr=False)
    metrics: Mapping[str, Any] = field(default_factory=dict, repr=False)
    thresholds: Thresholds | None = field(default=None, repr=False)
    head: Head | None = field(default=None, repr=False)
    trust: Trust | None = field(default=None, repr=False)
    info: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the trained tensors and the head, as the adapter's config has it."""
        return hashlib.sha256(_tensor_bytes(self)).hexdigest()

    @property
    def num_learned(self) -> int:
        """Numbers that were learned: the method's, and those of the head."""
        return self.method.num_learned + (self.head.numbers if self.head else 0)

    def save(self, folder: str | Path) -> Path:
        """Write the adapter folder, as `save_adapter`."""
        return save_adapter(self, folder)

    def push_to_hub(
        self, repo: str, *, private: bool = False, message: str = MESSAGE, dataset: str | None = None
    ) -> str:
        """Put the adapter on the Hugging Face hub, as `push_adapter`."""
        with TemporaryDirectory() as folder:
            return push_adapter(self.save(folder), repo, private=private, message=message, dataset=dataset)


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
    trust: Trust | None = None,
) -> Path:
    """Write an adapter folder: of what `fit` gave or `load_adapter` loaded, or of a method, its classes and template.

    An older adapter there is replaced only once the new files are wholly on disk: whatever happens meanwhile, the old
    one or the new one loads. What `load_adapter` would refuse, such as weights that are not finite, is not written.
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
        trust=trust,
    )
    adapter = replace(trained, **{key: value for key, value in given.items() if value is not None})
    folder, method = Path(folder), adapter.method
    check_class_names(adapter.class_names, unique=False)
    check_template(adapter.template)
    if adapter.head:  # its columns are those of these classes, under whatever names
        adapter = replace(adapter, head=replace(adapter.head, class_names=adapter.class_names))
    weights = _tensor_bytes(adapter)
    info: dict[str, Any] = {
        "format_version": _format(adapter.head),
        "perlclip_version": perlclip.__version__,
        "peft_type": method.name.upper(),
        "base_model_name_or_path": method.backbone.name,
        "backbone_fingerprint": method.backbone.fingerprint,
        "backbone_family": method.backbone.family,
        **({"image_size": method.backbone.image_size} if method.backbone.image_size else {}),
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
        **({"trust": adapter.trust.as_json()} if adapter.trust else {}),
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
    }
    try:
        info = json.loads(json.dumps(info, allow_nan=False))
        info[OWN_HASH] = _own_hash(info)
        content = _config_bytes(info)
        _check_info(parse_json(content), folder / CONFIG)
    except (TypeError, ValueError, RecursionError) as error:
        raise PerlclipError(f"the adapter's training record or metrics are not plain, finite data: {error}") from error
    return _write(folder, content, _card(info, folder), weights)


def _config_bytes(info: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(info, indent=2, ensure_ascii=False)}\n".encode(errors="surrogatepass")


def _write(folder: Path, content: bytes, card: bytes, weights: bytes) -> Path:
    """Put the three files there, or leave what is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _saving, held_folder(folder, LOCK_SECONDS) as alone:
            if not alone:
                raise PerlclipError(f"another process is writing to {folder}: save the adapter elsewhere, or later")
            _finish_save(folder)
            # The config comes first: from then on it is the new adapter, with its tensors under their staged name. They
            # come last, so that they say whether the rest is done.
            write_files({folder / CONFIG: content, folder / CARD: card, folder / WEIGHTS: weights})
    except OSError as error:
        raise PerlclipError(f"cannot write to {folder}: {error.strerror or error}") from error
    return folder


def _finish_save(folder: Path) -> None:
    """What a save that was killed has left: tensors that belong to the config get their name, the rest is removed."""
    found = staged(folder / WEIGHTS)
    try:
        info = read_info(folder) if found else {}
    except PerlclipError:  # there was no adapter before, or a damaged one
        info = {}
    if info and not _has_hash(folder / WEIGHTS, info["weights_sha256"]):
        for path in found:
            if _has_hash(path, info["weights_sha256"]):
                write_files({folder / CARD: _card(info, folder)})
                path.replace(folder / WEIGHTS)
                break
    for name in (CONFIG, WEIGHTS, CARD):
        sweep(folder / name)


def _card(info: Mapping[str, Any], folder: Path) -> bytes:
    return _card_bytes(info, folder.resolve().name)


def _card_bytes(info: Mapping[str, Any], title: str, dataset: str | None = None) -> bytes:
    return model_card(info, title, dataset=dataset).encode(errors="backslashreplace")


def _has_hash(path: Path, wanted: str) -> bool:
    try:
        return hashlib.sha256(read_file(path, LARGEST[WEIGHTS])).hexdigest() == wanted
    except OSError:
        return False


def _own_hash(info: Mapping[str, Any]) -> str:
    """SHA-256 of all fields but the hash, however they are laid out."""
    fields = {key: value for key, value in info.items() if key != OWN_HASH}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _tensor_bytes(adapter: Adapter) -> bytes:
    """The tensor file's contents."""
    tensors = {name: p.detach().cpu().contiguous() for name, p in adapter.method.learned().items()}
    tensors |= adapter.head.tensors() if adapter.head else {}
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise PerlclipError(f"tensor {name!r} of the adapter holds numbers that are not finite; it is of no use")
    return tensors_to_bytes(tensors, {"format": "pt"})


def load_adapter(
    folder: str | Path,
    *,
    backbone: Backbone | str | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "float32",
    revision: str | None = None,
) -> Adapter:
    """Load an adapter on its backbone: the one it names, or the one given, which must be the same weights.

    Where there is no such folder, the text `user/repo` or `user/repo@revision` is one of the Hugging Face hub;
    `info["hub"]` says which commit it was. A `Path` is always a folder.
    """
    folder, hub = _find_adapter(folder, revision)
    info, tensors = _read(folder)
    info |= {HUB: hub} if hub else {}
    if not isinstance(backbone, Backbone):
        backbone = _find_backbone(backbone, info, folder, device, dtype)
    if backbone.fingerprint != info["backbone_fingerprint"]:
        size = info.get("image_size")
        at = f" for images of {size} pixels" if size else ""
        trained_on = ", ".join([info["backbone_fingerprint"][:12], *filter(None, [info.get("backbone_family")])])
        raise PerlclipError(
            f"adapter {folder} was trained on backbone {info['base_model_name_or_path']!r}{at} ({trained_on}); it "
            f"does not fit {backbone.name!r} ({backbone.fingerprint[:12]}, {backbone.family})"
        )
    try:
        method = create_method(info["method"], backbone, **info["config"])
    except (RuntimeError, MemoryError, OverflowError, TypeError, ValueError) as error:  # torch's, of absurd sizes
        raise PerlclipError(f"adapter {folder} has settings that cannot be: {first_line(error)}") from error
    method.as_written = not info.get("plain_names")
    method.given |= {"lens"}  # what it was trained with, also where that was none
    class_names = tuple(info["class_names"])
    head = _read_head(class_names, info, tensors, backbone, folder) if "head" in info else None
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
        trust=Trust.from_json(info["trust"]) if "trust" in info else None,
        info=info,
    )


def _find_adapter(place: str | Path, revision: str | None = None) -> tuple[Path, dict[str, str]]:
    """A folder here, which goes first, or one of the hub, downloaded; and what to record of the latter."""
    # A Path is one of this machine: a service that looks below its folder for a name from outside never asks the hub.
    name = HubName.parse(place, revision) if isinstance(place, str) else None
    if Path(place).exists() or name is None:
        if revision is not None:
            raise PerlclipError(f"a revision is one of the hub's, and {place} is a folder here")
        return Path(place), {}
    try:
        found = download(name, LARGEST, optional=CARD)
    except PerlclipError as error:
        raise PerlclipError(f"no adapter folder {place} here, and {error}") from error
    return found.folder, found.record()


def pull_adapter(repo: str, folder: str | Path, *, revision: str | None = None) -> Path:
    """Take an adapter from the Hugging Face hub into a folder, checked; its config then says which commit it was.

    `repo` is `user/repo` or `user/repo@revision`. Nothing else that the repository holds is downloaded.
    """
    found = download(HubName.of(repo, revision), LARGEST, optional=CARD)
    info, _ = _read(found.folder)
    info[HUB] = found.record()
    info |= {OWN_HASH: _own_hash(info)} if OWN_HASH in info else {}
    kept = found.folder / CARD
    card = read_file(kept, LARGEST[CARD]) if kept.is_file() else _card(info, Path(folder))
    return _write(Path(folder), _config_bytes(info), card, read_file(found.folder / WEIGHTS, LARGEST[WEIGHTS]))


def push_adapter(
    folder: str | Path, repo: str, *, private: bool = False, message: str = MESSAGE, dataset: str | None = None
) -> str:
    """Put an adapter folder on the Hugging Face hub, its three files and no other; the commit that it is then.

    The repository is made if there is none, `private` or not. The card that `save_adapter` wrote is written anew for
    there; one that was edited is left as it is. `dataset` is what the hub calls the data that it was trained on.
    """
    folder, name = Path(folder), HubName.of(repo)
    info, _ = _read(folder)
    try:
        card = read_file(folder / CARD, LARGEST[CARD]) if (folder / CARD).is_file() else b""
        config, weights = (read_file(folder / file, LARGEST[file]) for file in (CONFIG, WEIGHTS))
    except OSError as error:
        raise PerlclipError(f"cannot read {folder}: {error.strerror}") from error
    title = title_of(card)
    ours = not card or (title is not None and card == _card_bytes(info, title))
    backbone = Path(info["base_model_name_or_path"])
    if backbone.is_absolute():  # a path of this machine is nobody's affair, and no use to others
        info["base_model_name_or_path"] = backbone.name
        info |= {OWN_HASH: _own_hash(info)} if OWN_HASH in info else {}
        config = _config_bytes(info)
    card = _card_bytes(info, name.repo, dataset=dataset) if ours else card
    return upload(name, {CONFIG: config, WEIGHTS: weights, CARD: card}, private=private, message=message)


def _find_backbone(
    name: str | None, info: Mapping[str, Any], folder: Path, device: str | torch.device, dtype: str | torch.dtype
) -> Backbone:
    """The backbone by the name given, or by the adapter's own: a folder may have moved with the adapter beside it."""
    own = info["base_model_name_or_path"]
    if name is None and own not in EMBEDDED and not Path(own).is_dir():
        beside = (folder.parent / own, folder.parent / Path(own).name)
        name = next((str(path) for path in beside if any((path / file).is_file() for file in CONFIGS)), None)
    try:
        return load_backbone(name or own, device=device, dtype=dtype, image_size=info.get("image_size"))
    except BackboneNotFoundError as error:
        raise PerlclipError(
            f"adapter {folder} needs the backbone {own!r}, whose weights have the fingerprint "
            f"{info['backbone_fingerprint'][:12]}: say where it is with --backbone (in Python backbone=…); {error}"
        ) from error


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of one and the same adapter, also while another one is saved over it."""
    info, same = read_info(folder), 0
    while True:
        try:
            tensors = _read_weights(folder, info)
            break
        except PerlclipError:
            before, info = info, read_info(folder)
            same = same + 1 if info == before else 0
            if same == 2:  # once, its weights may have taken their name between two looks
                raise
    left = any(staged(folder / name) for name in (CONFIG, WEIGHTS, CARD))
    if left and _saving.acquire(blocking=False):
        try:
            with held_folder(folder) as alone:
                if alone:
                    _finish_save(folder)
        except (OSError, PerlclipError):  # others may read what only its owner writes
            pass
        finally:
            _saving.release()
    return info, tensors


def read_info(folder: str | Path) -> dict[str, Any]:
    """The checked contents of `adapter_config.json`."""
    path = Path(folder) / CONFIG
    if not path.parent.is_dir():
        raise PerlclipError(f"no adapter folder {folder}")
    try:
        info = parse_json(read_file(path, LARGEST[CONFIG]))
    except OSError as error:
        raise PerlclipError(f"{folder} is not an adapter: cannot read {CONFIG}: {error.strerror}") from error
    except ValueError as error:
        raise PerlclipError(f"adapter file {path} is damaged: {error}") from error
    return _check_info(info, path)


def _check_info(info: Any, path: Path) -> dict[str, Any]:
    """A config whose fields are there and can be used; `path` is where it is from."""
    if not isinstance(info, dict) or "format_version" not in info:
        raise PerlclipError(f"{path} is not a perlclip adapter (no format_version)")
    if info["format_version"] not in FORMAT_VERSIONS:
        raise PerlclipError(
            f"adapter {path.parent} has format version {info['format_version']!r}; "
            f"this perlclip reads versions {', '.join(map(str, FORMAT_VERSIONS))}"
        )
    if ("head" in info) != (info["format_version"] > 1):
        raise PerlclipError(f"adapter file {path} is damaged: versions 2 to 4 have a head, version 1 has none")
    for key, kind in _FIELDS.items():
        if not isinstance(info.get(key), kind):
            raise PerlclipError(f"adapter file {path} is damaged: field {key!r} is missing or not a {kind.__name__}")
    check_class_names(info["class_names"], unique=False)
    if len(info["templates"]) != 1:
        raise PerlclipError(f"adapter file {path} is damaged: one template is needed, got {len(info['templates'])}")
    check_template(info["templates"][0])
    for key, type_ in (("backbone_family", str), ("image_size", int)):  # not in adapters of 0.1.0
        if key in info and type(info[key]) is not type_:
            raise PerlclipError(f"adapter file {path} is damaged: field {key!r} is not a {type_.__name__}")
    parts: dict[str, Callable[[Any], object]] = {"adaptive": Thresholds.from_json, "trust": Trust.from_json}
    for key in parts.keys() & info.keys():
        try:
            parts[key](info[key])
        except PerlclipError as error:
            raise PerlclipError(f"adapter file {path} is damaged: {error}") from error
    if OWN_HASH in info and info[OWN_HASH] != _own_hash(info):
        raise PerlclipError(
            f"adapter file {path} was damaged or edited since it was saved (its fields do not match their hash): take "
            f"it from where it came or, if you meant the edit, remove the field {OWN_HASH!r}"
        )
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
    content, failure = b"", ""
    for place in (path, *staged(path)):
        try:
            content = read_file(place, LARGEST[WEIGHTS])
        except OSError as error:
            failure = failure or f"{folder} is not a complete adapter: cannot read {WEIGHTS}: {error.strerror}"
            continue
        if hashlib.sha256(content).hexdigest() == info["weights_sha256"]:
            break
    else:
        raise PerlclipError(
            failure or f"adapter file {path} is damaged: its contents do not match the hash in {CONFIG}"
        )
    try:
        tensors = parse_tensors(content)
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:  # formats that torch has not
        raise PerlclipError(f"adapter file {path} is damaged: {first_line(error)}") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise PerlclipError(f"adapter {folder}: tensor {name!r} is of type {tensor.dtype}, which no adapter has")
    return tensors


def _format(head: Head | None) -> int:
    if head is None:
        return 1
    if head.unseen is not None and head.unseen.gained:
        return 6
    if head.centered:
        return 5
    if head.middle is not None:
        return 4
    return 2 if head.gaussians is None or not head.numbers else 3


def _read_head(
    class_names: tuple[str, ...], info: Mapping[str, Any], tensors: Mapping[str, Tensor], backbone: Backbone,
    folder: Path,
) -> Head:  # fmt: skip
    try:
        head = Head.read(class_names, backbone.embed_dim, info["head"], tensors)
        if head.middle:
            head.middle.require(backbone.vision)
        return head
    except PerlclipError as error:
        raise PerlclipError(f"adapter {folder} is damaged: {error}") from error


def _put_weights(method: Method, tensors: Mapping[str, Tensor], folder: Path) -> None:
    expected = method.learned()
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
