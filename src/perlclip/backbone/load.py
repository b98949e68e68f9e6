"""Load a frozen backbone of any family: towers, tokenizer, preprocessing, fingerprint.

`transformers` brings weights, tokenizer, image processor and hub access; the family's file its towers.
"""

import copyreg
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from perlclip.backbone import openclip
from perlclip.backbone.base import DTYPES, Backbone, Family, place, require_format
from perlclip.backbone.clip import CLIP, TINY
from perlclip.backbone.metaclip_2 import METACLIP_2
from perlclip.backbone.preprocess import Preprocess, resized
from perlclip.backbone.siglip import SIGLIP, SIGLIP2
from perlclip.errors import PerlclipError, first_line, unknown_name

FAMILIES = {family.name: family for family in (CLIP, METACLIP_2, SIGLIP, SIGLIP2)}
EMBEDDED = {"tiny": TINY, "tiny-siglip": TINY.with_name("tiny-siglip")}  # made by scripts/pretrain_tiny.py
CONFIGS = ("config.json", openclip.CONFIG)  # one of which a folder has
LARGEST = 4096  # pixels a side
POSITIONS = "vision_model.embeddings.position_embedding.weight"


class BackboneNotFoundError(PerlclipError):
    """There is no backbone under the name, here or on the hub."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a backbone is made of, however it was stored."""

    family: Family
    state: Mapping[str, Tensor]
    config: Any
    tokenizer: Any
    processor: Any


def load_backbone(
    name: str,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "float32",
    *,
    image_size: int | None = None,
) -> Backbone:
    """A frozen backbone by hub name, from a folder in Hugging Face's or OpenCLIP's form, or an embedded one.

    Those are `"tiny"`, a CLIP, and `"tiny-siglip"`, a SigLIP.

    `device` is anything torch knows, or "auto": CUDA, else Apple's MPS, else the CPU. With another `image_size` than
    the weights are for, position embeddings are interpolated as `transformers` does it.
    """
    device, dtype = _device(device), _dtype(dtype)
    require_format(dtype, device)
    if name not in EMBEDDED and Path(name).expanduser().is_dir():
        name = os.path.abspath(Path(name).expanduser())  # noqa: PTH100 (a link may be the name that lasts)
    parts = _load_parts(str(EMBEDDED.get(name, name)), shown=name)
    family, state, config, tokenizer = parts.family, parts.state, parts.config, parts.tokenizer
    try:
        size, processor = family.size(config), family.processor(parts.processor, config)
        preprocess = Preprocess.of(processor, size)
        if image_size not in (None, size):
            state = _stretched(state, family, config, image_size)
            preprocess = Preprocess.of(resized(processor, size, image_size), image_size)
        towers = family.towers(state, config)
    except PerlclipError as error:
        raise PerlclipError(f"cannot load backbone {name!r}: {error}") from error
    ids: list[int] = tokenizer("a", padding=False, truncation=False)["input_ids"]  # set once, no thread changes it
    if not towers["text"].causal:
        towers["text"].starts = int(tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id)
    place(towers["vision"], towers["text"], device, dtype)
    bias = state.get("logit_bias")
    return Backbone(
        name=name,
        family=family.name,
        vision=towers["vision"],
        text=towers["text"],
        logit_scale=state["logit_scale"].double().exp().item(),
        logit_bias=None if bias is None else bias.double().item(),
        tokenizer=tokenizer,
        lowers=family.lowers,
        context_length=config.text_config.max_position_embeddings,
        preprocess=preprocess,
        fingerprint=_fingerprint(state, config, family),
        image_size=image_size if image_size != size else None,
    )


def _stretched(state: Mapping[str, Tensor], family: Family, config: Any, image_size: int | None) -> dict[str, Tensor]:
    """The weights for images of another size: positions of the patches interpolated, CLS's kept."""
    patch = config.vision_config.patch_size
    if type(image_size) is not int or not patch <= image_size <= LARGEST:
        raise PerlclipError(
            f"image_size must be a whole number from {patch}, a patch, to {LARGEST}, not {image_size!r}"
        )
    position_ND = state[POSITIONS]
    old, new = int(len(position_ND) ** 0.5), image_size // patch
    starts = len(position_ND) - old**2
    grid_1Dgg = position_ND[starts:].T.reshape(1, -1, old, old)
    wide_PD = F.interpolate(grid_1Dgg, size=(new, new), **family.positions).flatten(2)[0].T
    return {**state, POSITIONS: torch.cat([position_ND[:starts], wide_PD])}


def _pickled(backbone: Backbone) -> tuple[Any, ...]:
    """Pickled as where it is from, a few bytes: whoever opens the pickle loads it again, on the same device."""
    if not backbone.fingerprint:
        raise PerlclipError(f"backbone {backbone.name!r} was not loaded by its name, and cannot be pickled")
    return _reload, (
        backbone.name,
        str(backbone.device),
        backbone.dtype_name,
        backbone.fingerprint,
        backbone.image_size,
    )


def _reload(name: str, device: str, dtype: str, fingerprint: str, image_size: int | None) -> Backbone:
    found = load_backbone(name, device=device, dtype=dtype, image_size=image_size)
    if found.fingerprint != fingerprint:
        raise PerlclipError(
            f"the pickle is of a backbone {name!r} with fingerprint {fingerprint[:12]}, "
            f"but what is there now has {found.fingerprint[:12]}"
        )
    return found


copyreg.pickle(Backbone, _pickled)


def _load_parts(source: str, shown: str) -> Parts:
    _check_source(source, shown)
    with _quiet_transformers():
        try:
            try:
                return _of_transformers(source)
            except (OSError, ValueError):  # no config, no weights, or an unknown type
                found = _of_openclip(source)
                if found is None:
                    raise
                return found
        except OSError as error:
            raise BackboneNotFoundError(f"cannot load backbone {shown!r}: {first_line(error).rstrip('.')}") from error
        except PerlclipError as error:
            raise PerlclipError(f"cannot load backbone {shown!r}: {error}") from error
        except (ValueError, RuntimeError, KeyError, ImportError) as error:
            raise PerlclipError(f"cannot load backbone {shown!r}: {first_line(error).rstrip('.')}") from error
        except Exception as error:  # safetensors raises its own class on a damaged file
            if type(error).__name__ != "SafetensorError":
                raise
            raise PerlclipError(f"cannot load backbone {shown!r}: damaged weights file ({error})") from error


def _of_transformers(source: str) -> Parts:
    import transformers
    from transformers import AutoConfig

    # By its own module: under the package's name some versions have it only with torchvision, which is not needed.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    here = _only_here(source)
    config = AutoConfig.from_pretrained(source, **here)
    family = FAMILIES.get(config.model_type)
    if family is None:
        known = ", ".join(repr(name) for name in FAMILIES)
        raise PerlclipError(f"it is a {config.model_type!r} model; perlclip knows {known} and OpenCLIP's checkpoints")
    # float32 whatever the file holds, so that the fingerprint does not depend on the dtype asked for.
    model, info = getattr(transformers, family.model).from_pretrained(
        source, config=config, dtype=torch.float32, output_loading_info=True, **here
    )
    _require_weights(info["missing_keys"])
    # Pillow's resizing, whether or not torchvision is there: the same pixels everywhere.
    processor = AutoImageProcessor.from_pretrained(source, backend="pil", **here)
    state = {key: value.detach() for key, value in model.state_dict().items()}
    return Parts(family=family, state=state, config=config, tokenizer=_tokenizer(source), processor=processor)


def _of_openclip(source: str) -> Parts | None:
    """A checkpoint of OpenCLIP; None where there is none."""
    from transformers import CLIPModel

    config, weights = (_find(source, name) for name in (openclip.CONFIG, openclip.WEIGHTS))
    if config is None:
        return None
    if weights is None:
        raise PerlclipError(
            f"it has OpenCLIP's {openclip.CONFIG}, but not {openclip.WEIGHTS}, and what is pickled is not opened: "
            f"convert {openclip.PICKLED} with `safetensors`"
        )
    found = openclip.convert(config, weights)
    with torch.device("meta"):
        wanted = CLIPModel(found.config).state_dict()
    _require_weights(key for key in wanted if key not in found.state and not key.endswith("position_ids"))
    for key, tensor in found.state.items():
        if key == "logit_bias":  # which a CLIP may have been trained with, but has no place for
            continue
        if key not in wanted:
            raise PerlclipError(f"its weights have {key!r}, for which its config has no place")
        if tensor.shape != wanted[key].shape:
            shapes = tuple(tensor.shape), tuple(wanted[key].shape)
            raise PerlclipError(
                f"its config and weights do not fit: {key!r} of shape {shapes[0]} should have {shapes[1]}"
            )
    state = {key: tensor.float() for key, tensor in found.state.items()}
    own = any(_find(source, name) for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json"))
    tokenizer = _tokenizer(source if own else found.tokenizer)
    if tokenizer.eos_token_id != found.config.text_config.vocab_size - 1:
        raise PerlclipError("its texts are read at the largest token, and that is not the tokenizer's end of text")
    return Parts(family=CLIP, state=state, config=found.config, tokenizer=tokenizer, processor=found.processor)


def _require_weights(missing: Iterable[str]) -> None:
    """Weights that are not there would be random ones."""
    if lacks := sorted(missing):
        raise PerlclipError(f"it lacks {len(lacks)} weights, the first being {lacks[0]!r}")


def _tokenizer(source: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, **_only_here(source))
    except ImportError as error:
        raise PerlclipError(
            f"its tokenizer needs a library that is not here; pip install 'perlclip[siglip]' ({first_line(error)})"
        ) from error


def _only_here(source: str) -> dict[str, bool]:
    """A folder is all there is: where no hub can be reached, some versions would wait for it."""
    return {"local_files_only": True} if Path(source).is_dir() else {}


def _find(source: str, name: str) -> Path | None:
    """A file of a folder or of a repository of the hub."""
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source, name))
    except (OSError, ValueError):  # not there, or no hub
        return None


def _check_source(source: str, shown: str) -> None:
    folder = Path(source)
    looks_local = folder.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1
    if folder.is_dir():
        if not any((folder / name).is_file() for name in CONFIGS):
            raise PerlclipError(
                f"backbone folder {shown} has no config.json; expected a folder of Hugging Face's, or OpenCLIP's with "
                f"{openclip.CONFIG}"
            )
    elif looks_local:
        raise BackboneNotFoundError(
            f"no backbone {shown!r}: give a hub name such as 'openai/clip-vit-base-patch16', "
            "a Hugging Face folder, 'tiny' or 'tiny-siglip'"
        )


_quiet_lock = Lock()
_quiet_before: list[tuple[int, bool]] = []  # what the first of several threads found, once for each of them


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No loading bars and no advice on stderr; what matters is checked and raised by us.

    The settings are the process's own: of threads that load at the same time the last one puts them back.
    """
    from transformers.utils import logging as hf_logging

    with _quiet_lock:
        now = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
        _quiet_before.append(_quiet_before[0] if _quiet_before else now)
        hf_logging.set_verbosity(logging.CRITICAL)
        hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        with _quiet_lock:
            verbosity, bars = _quiet_before.pop()
            if not _quiet_before:
                hf_logging.set_verbosity(verbosity)
                if bars:
                    hf_logging.enable_progress_bar()


def _device(device: str | torch.device) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        if torch.empty(0, device=device).is_meta:
            raise RuntimeError("it computes nothing")
    except (RuntimeError, AssertionError) as error:
        raise PerlclipError(f"device {str(device)!r} is not available here: {str(error).splitlines()[0]}") from error
    return torch.device(device)


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        dtype = next((name for name, known in DTYPES.items() if known == dtype), str(dtype).removeprefix("torch."))
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    return DTYPES[dtype]


_SHAPING = ("hidden_act", "layer_norm_eps", "num_attention_heads")


def _fingerprint(state: Mapping[str, Tensor], config: Any, family: Family) -> str:
    """SHA-256 over the float32 weights and the settings that change what they compute."""
    digest = hashlib.sha256()
    settings: dict[str, Any] = {
        side: [getattr(getattr(config, f"{side}_config"), key) for key in _SHAPING] for side in ("text", "vision")
    }
    if family is not CLIP:  # of which adapters were saved before there were others
        settings["family"] = family.name
    digest.update(json.dumps(settings, sort_keys=True).encode())
    for key in sorted(state):
        if not key.endswith("position_ids"):
            digest.update(f"{key}{tuple(state[key].shape)}".encode())
            digest.update(state[key].float().contiguous().numpy().data)
    return digest.hexdigest()
