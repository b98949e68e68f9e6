"""PERL: recurrent thoughts in a frozen CLIP (Parameter-Efficient Reasoning in CLIP Latent Space, 2026).

Each tower is split at depth J into a base B (blocks 1..J) and a refinement R (blocks J+1..L). With S = B(x),

    h0 = Pool(R(S))                            zero-shot pooled state             `Recurrence.__init__`
    zk = phi(h(k-1))                           a thought                          `Projector.forward`
    hk = Pool(R(z1 ‖ … ‖ zk ‖ S))              refinement step k = 1..K           `Recurrence.states`
    L  = CE(tau vK TKᵀ, y) + lambda (1 - cos(v0, vK))                              `Perl.loss`

phi is the only trained part: one per tower, shared by all steps, 5 d + 1 parameters at rank 1, 6,402 on ViT-B/16.

What is not repeated: S, h0 and the first refinement block's Q, K, V of S are frozen, so they are computed without a
graph, for the classes once per class list (`class_state`) and for the images once per batch.

Shapes: B images or classes, N tokens, k thoughts, D tower width, E shared width, K steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perlclip.backbone import Backbone, Refinement, Tower
from perlclip.errors import PerlclipError, unknown_name
from perlclip.methods.base import ClassState, Config, Method, register

MODALITIES = {"both": ("vision", "text"), "vision": ("vision",), "text": ("text",)}
INITS = ("normal", "torch", "zero")
VARIANTS = ("shared",)


@dataclass(frozen=True, kw_only=True)
class PerlConfig(Config):
    """PERL's settings, with the paper's values."""

    rank: int = 1  # r, the projector's bottleneck
    steps: int = 4  # K, refinement steps
    depth: int = 7  # J, blocks before the thoughts enter
    anchor: float = 1.0  # lambda, weight of the pull towards the zero-shot image embedding
    modalities: str = "both"  # which towers think: both, vision, text
    variant: str = "shared"  # one projector a tower, used at every step
    init: str = "normal"  # weights N(0, 0.02), biases 0; "torch": PyTorch's default; "zero": up-projection 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, least in (("rank", 1), ("steps", 0), ("depth", 0), ("anchor", 0.0)):
            if not least <= getattr(self, key) < float("inf"):
                raise PerlclipError(f"perl: {key} must be at least {least} and finite, got {getattr(self, key)}")
        for key, known in (("modalities", MODALITIES), ("variant", VARIANTS), ("init", INITS)):
            if getattr(self, key) not in known:
                raise unknown_name(f"value of perl's {key}", str(getattr(self, key)), known)


class Projector(nn.Module):
    """phi_m (Eq. 1): W2 GELU(W1 LN(h) + b1) + b2, in float32 whatever the tower computes in."""

    def __init__(self, width: int, rank: int, init: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.down = nn.Linear(width, rank)
        self.up = nn.Linear(rank, width)
        if init == "torch":
            return
        for linear in (self.down, self.up):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        if init == "zero":
            nn.init.zeros_(self.up.weight)

    def forward(self, h_BD: Tensor) -> Tensor:
        """Pooled state -> thought, both (B, D)."""
        with torch.autocast(h_BD.device.type, enabled=False):
            z_BD: Tensor = self.up(F.gelu(self.down(self.norm(h_BD.float()))))
            return z_BD


class Recurrence:
    """One tower's refinement R over a batch of frozen sequences S, with the zero-shot state h0."""

    def __init__(self, tower: Tower, x_BND: Tensor, rows_B: Tensor, depth: int) -> None:
        self.refinement = Refinement(tower, tower.run(x_BND, 0, depth), rows_B, depth)
        self.h0_BD = self.refinement.pool()

    def states(self, projector: Projector | None, steps: int) -> list[Tensor]:
        """h0, …, hK (Eq. 2 and 3): each thought comes from the last state, each step re-includes all thoughts."""
        h = [self.h0_BD]
        thoughts: list[Tensor] = []
        for _ in range(steps if projector else 0):
            thoughts.append(cast(Projector, projector)(h[-1]))
            h.append(self.refinement.pool(torch.stack(thoughts, 1)))
        return h


@dataclass(kw_only=True)
class PerlState(ClassState):
    """The class prompts run through the frozen base of the text tower."""

    recurrence: Recurrence


@register("perl", summary="shared thought projector, recurrent over K steps", venue="2026")
class Perl(Method):
    """A frozen CLIP that thinks K times before it answers."""

    config_class = PerlConfig
    config: PerlConfig

    def __init__(self, backbone: Backbone, config: PerlConfig) -> None:
        super().__init__(backbone, config)
        shallowest = min(backbone.vision.depth, backbone.text.depth)
        if config.depth >= shallowest:
            raise PerlclipError(f"perl: depth must be below the tower's {shallowest} blocks, got {config.depth}")
        self.projectors = nn.ModuleDict(
            {
                side: Projector(getattr(backbone, side).width, config.rank, config.init)
                for side in MODALITIES[config.modalities]
            }
        )

    @torch.no_grad()
    def class_state(self, prompts: Sequence[str]) -> PerlState:
        """S, h0 and the first refinement block's Q, K, V of every prompt."""
        tokens = self.backbone.tokenize(prompts)
        text = self.backbone.text
        return PerlState(
            prompts=tuple(prompts),
            recurrence=Recurrence(text, text.embed(tokens.ids_BN), tokens.eos_B, self.config.depth),
        )

    def encode_text(self, state: ClassState) -> Tensor:
        """T^(K), (C, E)."""
        return self.backbone.text.project(self._text_states(state)[-1])

    def encode_image(self, pixels: Tensor) -> Tensor:
        """v^(K), (B, E)."""
        return self.backbone.vision.project(self._image_states(pixels)[-1])

    def loss(self, pixels: Tensor, labels: Tensor, state: ClassState) -> Tensor:
        """Cross-entropy of the refined pair plus lambda times the cosine distance to the zero-shot image (Eq. 4)."""
        h = self._image_states(pixels)
        v0_BE, vK_BE = self.backbone.vision.project(h[0]), self.backbone.vision.project(h[-1])
        classification = F.cross_entropy(self.similarity(vK_BE, self.class_embeddings(state)), labels)
        anchor = 1 - (v0_BE * vK_BE).sum(-1).mean()
        return classification + self.config.anchor * anchor

    def trajectory(self, pixels: Tensor, state: ClassState) -> Tensor:
        """Logits of every step, both towers taken at step k: (K+1, B, C). A tower that does not think stays at 0."""
        t_KCE = self.keep(state, self.encode_text_steps)
        v = [self.backbone.vision.project(h) for h in self._image_states(pixels)]
        return torch.stack([self.similarity(v[min(k, len(v) - 1)], t_CE) for k, t_CE in enumerate(t_KCE)])

    def encode_text_steps(self, state: ClassState) -> Tensor:
        """T^(0), …, T^(K), (K+1, C, E)."""
        t = [self.backbone.text.project(h) for h in self._text_states(state)]
        return torch.stack([t[min(k, len(t) - 1)] for k in range(self.config.steps + 1)])

    def _text_states(self, state: ClassState) -> list[Tensor]:
        assert isinstance(state, PerlState)
        return state.recurrence.states(self._projector("text"), self.config.steps)

    def _image_states(self, pixels: Tensor) -> list[Tensor]:
        vision = self.backbone.vision
        # No graph below the thoughts, unless someone asks for gradients with respect to the pixels.
        with torch.set_grad_enabled(torch.is_grad_enabled() and pixels.requires_grad):
            x_BND = vision.embed(pixels)
            cls_B = torch.zeros(len(pixels), dtype=torch.long, device=pixels.device)
            recurrence = Recurrence(vision, x_BND, cls_B, self.config.depth)
        return recurrence.states(self._projector("vision"), self.config.steps)

    def _projector(self, side: str) -> Projector | None:
        return cast(Projector, self.projectors[side]) if side in self.projectors else None
