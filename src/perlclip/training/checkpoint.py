"""A training in progress as one safetensors file: parameters, optimiser state, averages, losses, position."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.optim import Optimizer

from perlclip.errors import PerlclipError
from perlclip.files import write_files
from perlclip.methods.base import Method

VERSION = "2"


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
    metadata = {"perlclip_checkpoint": VERSION, "position": json.dumps(position)}
    plain = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
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
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        if metadata.get("perlclip_checkpoint") != VERSION:
            raise PerlclipError(f"cannot resume from {path}: it is not a checkpoint of this version of perlclip")
        return Checkpoint(path, json.loads(metadata["position"]), tensors)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise PerlclipError(f"cannot resume from {path}: {error}") from error
