"""A training in progress as one safetensors file: parameters, optimiser state, averages, losses, position.

The file carries a hash of all of it, as a damaged one would be gone on from without anybody noticing.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.optim import Optimizer

from perlclip.errors import PerlclipError, first_line
from perlclip.files import MIB, parse_json, read_file, write_files
from perlclip.methods.base import Method

VERSION = "2"
LARGEST = 8192 * MIB


def save_checkpoint(
    path: Path,
    method: Method,
    optimizer: Optimizer,
    averages: dict[str, Tensor],
    losses: list[float],
    position: dict[str, Any],
) -> None:
    """Write the state after a complete step, whole or not at all."""
    tensors = {f"method.{name}": p.detach() for name, p in method.named_parameters()}
    for name, p in method.named_parameters():
        for key, value in optimizer.state[p].items():
            tensors[f"optimizer.{name}.{key}"] = torch.as_tensor(value)
    tensors |= {f"average.{name}": average for name, average in averages.items()}
    tensors["losses"] = torch.tensor(losses, dtype=torch.float64)
    plain = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    where = json.dumps(position)
    metadata = {"perlclip_checkpoint": VERSION, "position": where, "sha256": _digest(plain, where)}
    write_files({path: save(plain, metadata)})


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file holds."""

    path: Path
    position: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def losses(self) -> list[float]:
        """Loss of each step so far."""
        losses: list[float] = self.tensors["losses"].tolist()
        return losses

    def restore(self, method: Method, optimizer: Optimizer, averages: dict[str, Tensor]) -> None:
        """Put parameters, optimiser state and averages where they were."""
        for name, average in averages.items():
            average.copy_(self.tensors[f"average.{name}"])
        for name, p in method.named_parameters():
            with torch.no_grad():
                p.copy_(self.tensors[f"method.{name}"])
            prefix = f"optimizer.{name}."
            for key in [key for key in self.tensors if key.startswith(prefix)]:
                short = key.removeprefix(prefix)
                # Optimisers keep their step counter on the CPU, unless they are fused.
                fused = bool(optimizer.defaults.get("fused"))
                here = p.device if fused or short != "step" else torch.device("cpu")
                optimizer.state[p][short] = self.tensors[key].to(here)


def read_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint file, checked to be whole and of this version."""
    try:
        content = read_file(path, LARGEST)
        tensors = load(content)
        metadata = parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__", {})
        if metadata.get("perlclip_checkpoint") != VERSION:
            raise PerlclipError(f"cannot resume from {path}: it is not a checkpoint of this version of perlclip")
        position = parse_json(metadata["position"].encode())
        whole = metadata.get("sha256") in (None, _digest(tensors, metadata["position"]))  # 0.1.0 had no hash
    except OSError as error:
        raise PerlclipError(f"cannot resume from {path}: {error.strerror}") from error
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise PerlclipError(f"cannot resume from {path}: it is damaged ({first_line(error)})") from error
    if not whole or not isinstance(position, dict) or not isinstance(position.get("settings"), dict):
        raise PerlclipError(f"cannot resume from {path}: it is damaged (its contents do not match their hash)")
    return Checkpoint(path, position, tensors)


def _digest(tensors: Mapping[str, Tensor], position: str) -> str:
    digest = hashlib.sha256(position.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
