"""Forward and backward pass of a method, recorded as CUDA graphs where there is CUDA: for one training, or for several.

A graph reads the parameters where they lie. Whoever trains one method again and again, each time from other numbers in
the same tensors, as the studio does, keeps the graphs and saves what recording costs, half a second for every size of
batch; they go for one list of classes and one set of settings.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perlclip.backbone.accel.cuda_graphs import Compiled
from perlclip.errors import PerlclipError
from perlclip.methods.base import ClassState, Method
from perlclip.text.classes import Classes

AHEAD = ("cuda",)  # devices that work while the host goes on
RECORD_AFTER = 4  # steps of one shape, that is; a short last batch comes once an epoch


class Gradients:
    """The loss of a batch, and its gradient with respect to each parameter; `keep` for trainings to come."""

    def __init__(
        self, method: Method, classes: Classes, compile: str = "auto", state: ClassState | None = None, *,
        keep: bool = True,
    ) -> None:  # fmt: skip
        self.method, self.classes, self.keep = method, classes, keep
        self.state = state or method.class_state(classes)
        device = method.backbone.device
        scaled = method.backbone.dtype == torch.float16
        if compile == "on" and scaled:
            raise PerlclipError("compile='on' does not go with float16, whose loss scale is adapted step by step")
        # A loss scale is adapted on the host, step by step, and fused SGD does not get over a first step left out.
        self.ahead = device.type in AHEAD and not scaled
        self.scaler = _scaler(device, scaled)
        self._compiled = Compiled(self._compute, device, compile, after=RECORD_AFTER)
        self._compiled.on &= self.ahead
        self._config = method.config

    @property
    def seconds(self) -> float:
        """What recording has cost so far."""
        return self._compiled.seconds

    def __call__(self, pixels: Tensor, labels: Tensor) -> Sequence[Tensor]:
        """Loss and gradients; the next call overwrites them."""
        if self._config != self.method.config:  # a graph has the settings it was recorded with
            self._compiled.forget()
            self._config = self.method.config
        return self._compiled(pixels, labels)

    def end(self) -> None:
        """A training is over: let go of what was recorded, gigabytes with many classes, unless it is kept."""
        for p in self.method.parameters():
            p.grad = None
        self.scaler = _scaler(self.method.backbone.device, self.scaler.is_enabled())  # the next one begins anew
        if not self.keep or self._compiled.failed:
            self._compiled.forget()

    def _compute(self, pixels: Tensor, labels: Tensor) -> list[Any]:
        loss = self.method.loss(self.method.frozen(pixels), labels, self.state)
        if not loss.requires_grad:
            raise PerlclipError(f"with these settings nothing that {self.method.name} trains reaches the loss")
        gradients = torch.autograd.grad(self.scaler.scale(loss), list(self.method.parameters()), allow_unused=True)
        # Fused optimisers want them laid out as the parameters are.
        return [loss.detach(), *(None if g is None else g.contiguous() for g in gradients)]


def _scaler(device: torch.device, on: bool) -> torch.amp.GradScaler:
    """With a scale that does not overflow from the start, as the usual 65,536 does: skipped steps are lost ones."""
    return torch.amp.GradScaler(device.type, init_scale=256.0, enabled=on)
