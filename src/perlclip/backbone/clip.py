"""Load a frozen CLIP: towers, tokenizer, preprocessing, fingerprint.

`transformers` brings weights, tokenizer, image processor and hub access; `tower.py` the forward pass.
"""

import copyreg
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from perlclip.backbone.base import Backbone
from perlclip.backbone.preprocess import Preprocess
from perlclip.backbone.tower import build_towers
from perlclip.errors import PerlclipError, first_line, unknown_name

TINY = Path(__file__).parent / "tiny"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class BackboneNotFoundError(PerlclipError):
    """There is no backbone under the name, here or on the hub."""


def load_backbone(name: str, device: str | torch.device = "auto", dtype: str | torch.dtype = "float32") -> Backbone:
    """A frozen CLIP by hub name, from a Hugging Face folder, or the embedded `"tiny"`.

    `device` is anything torch knows, or "auto": CUDA, else Apple's MPS, else the CPU.
    """
    device, dtype = _device(device), _dtype(dtype)
    if name != "tiny" and Path(name).expanduser().is_dir():
        name = os.path.abspath(Path(name).expanduser())  # noqa: PTH100 (a link may be the name that lasts)
    model, tokenizer, processor = _load_parts(str(TINY) if name == "tiny" else name, shown=name)
    from transformers.activations import ACT2FN

    tokenizer(["a"], padding=False, truncation=False)  # so set once, it is never changed by threads that use it
    state = {key: value.detach() for key, value in model.state_dict().items()}
    towers = build_towers(state, model.config, lambda act: ACT2FN[act])
    for tower in towers.values():
        tower.place(device, dtype)
    return Backbone(
        name=name,
        vision=towers["vision"],
        text=towers["text"],
        logit_scale=state["logit_scale"].double().exp().item(),
        tokenizer=tokenizer,
        context_length=model.config.text_config.max_position_embeddings,
        preprocess=Preprocess.of(processor, model.config.vision_config.image_size),
        fingerprint=_fingerprint(state, model.config),
    )


def _pickled(backbone: Backbone) -> tuple[Any, ...]:
    """Pickled as where it is from, a few bytes: whoever opens the pickle loads it again, on the same device."""
    if not backbone.fingerprint:
        raise PerlclipError(f"backbone {backbone.name!r} was not loaded by its name, and cannot be pickled")
    dtype = str(backbone.dtype).removeprefix("torch.")
    return _reload, (backbone.name, str(backbone.device), dtype, backbone.fingerprint)


def _reload(name: str, device: str, dtype: str, fingerprint: str) -> Backbone:
    found = load_backbone(name, device=device, dtype=dtype)
    if found.fingerprint != fingerprint:
        raise PerlclipError(
            f"the pickle is of a backbone {name!r} with fingerprint {fingerprint[:12]}, "
            f"but what is there now has {found.fingerprint[:12]}"
        )
    return found


copyreg.pickle(Backbone, _pickled)


def vit_b16_shape() -> Backbone:
    """ViT-B/16 without weights: enough to count a method's parameters, instantly and offline."""
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(vision_config={"patch_size": 16})
    with torch.device("meta"):
        towers = build_towers(CLIPModel(config).state_dict(), config, lambda act: torch.sigmoid)
    mean_std = (0.5, 0.5, 0.5)
    return Backbone(
        name="ViT-B/16",
        vision=towers["vision"],
        text=towers["text"],
        logit_scale=100.0,
        tokenizer=None,
        context_length=config.text_config.max_position_embeddings,
        preprocess=Preprocess(processor=None, size=224, mean=mean_std, std=mean_std),
        fingerprint="",
    )


def _load_parts(source: str, shown: str) -> tuple[Any, Any, Any]:
    _check_source(source, shown)
    with _quiet_transformers():
        from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, CLIPModel

        try:
            config = AutoConfig.from_pretrained(source)
            if config.model_type != "clip":
                raise PerlclipError(f"backbone {shown!r} is a {config.model_type!r} model; perlclip needs a 'clip' one")
            # float32 whatever the file holds, so that the fingerprint does not depend on the dtype asked for.
            model, info = CLIPModel.from_pretrained(
                source, config=config, dtype=torch.float32, output_loading_info=True
            )
            # Pillow's resizing, whether or not torchvision is there: the same pixels everywhere.
            processor = AutoImageProcessor.from_pretrained(source, backend="pil")
            parts = model, AutoTokenizer.from_pretrained(source), processor
        except OSError as error:
            raise BackboneNotFoundError(f"cannot load backbone {shown!r}: {first_line(error).rstrip('.')}") from error
        except (ValueError, RuntimeError, KeyError) as error:
            raise PerlclipError(f"cannot load backbone {shown!r}: {first_line(error).rstrip('.')}") from error
        except Exception as error:  # safetensors raises its own class on a damaged file
            if type(error).__name__ != "SafetensorError":
                raise
            raise PerlclipError(f"cannot load backbone {shown!r}: damaged weights file ({error})") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise PerlclipError(f"backbone {shown!r} lacks {len(missing)} weights, the first being {missing[0]!r}")
    return parts


def _check_source(source: str, shown: str) -> None:
    folder = Path(source)
    looks_local = folder.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise PerlclipError(f"backbone folder {shown} has no config.json; expected a Hugging Face CLIP folder")
    elif looks_local:
        raise BackboneNotFoundError(
            f"no backbone {shown!r}: give a hub name such as 'openai/clip-vit-base-patch16', "
            "a Hugging Face folder, or 'tiny'"
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
        dtype = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    return DTYPES[dtype]


_SHAPING = ("hidden_act", "layer_norm_eps", "num_attention_heads")


def _fingerprint(state: Mapping[str, Tensor], config: Any) -> str:
    """SHA-256 over the float32 weights and the settings that change what they compute."""
    digest = hashlib.sha256()
    settings = {
        side: [getattr(getattr(config, f"{side}_config"), key) for key in _SHAPING] for side in ("text", "vision")
    }
    digest.update(json.dumps(settings, sort_keys=True).encode())
    for key in sorted(state):
        if not key.endswith("position_ids"):
            digest.update(f"{key}{tuple(state[key].shape)}".encode())
            digest.update(state[key].float().contiguous().numpy().data)
    return digest.hexdigest()
