"""PERL: recurrent thoughts in a frozen CLIP (Parameter-Efficient Reasoning in CLIP Latent Space, 2026).

Each tower is split at depth J into a base B (blocks 1..J) and a refinement R (blocks J+1..L). With S = B(x),

    h0 = Pool(R(S))                            zero-shot pooled state             `Perl.begin`
    zk = phi(h(k-1))                           a thought                          `Projector.forward`
    hk = Pool(R(z1 ‖ … ‖ zk ‖ S))              refinement step k = 1..K           `Thinking.step`
    L  = CE(tau vK TKᵀ, y) + lambda (1 - cos(v0, vK))                              `Perl.loss`

phi is the only trained part: one per tower, shared by all steps, 5 d + 1 parameters at rank 1, 6,402 on ViT-B/16. The
answer is step K's, tau vK TKᵀ, or another readout of the steps 0..K (`READOUTS`), which needs no other training.

Variants (the paper's table of reasoning-loop configurations): `early` and `deep` move the thoughts, the others add
specific projectors, whose output is added to the shared one's. With several depths, thoughts enter at the first and
their rows are replaced at each later one. `vision_depth` and `text_depth` give a tower depths of its own.

    variant     depth J       projectors a tower      on ViT-B/16
    shared      7             1                             6,402
    early       0             1                             6,402
    deep        3, 7, 11      1                             6,402
    step        7             1 + K                        32,010
    layer       7, 9, 11      1 + depths                   25,608
    layerstep   7, 9, 11      1 + depths x K               83,226

What is not repeated: S, h0 and the first refinement block's Q, K, V of S are frozen, so they are computed without a
graph, for the classes once per class list (`FrozenTexts`) and for the images once per batch. Class texts of different
lengths are padded to the longest of a few groups, not to the longest of all. On CUDA a list of few classes is encoded
by a recorded graph that serves other lists and PERLs, too (`encode_texts`).

Shapes: B images or classes, N tokens, k thoughts, D tower width, E shared width, K steps.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from math import inf, log
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perlclip.backbone import (
    Backbone,
    FrozenImages,
    Images,
    Refinement,
    SharedText,
    TextGraphs,
    Tokens,
    Tower,
    can_think,
    cls_rows,
    think,
)
from perlclip.backbone.load import EMBEDDED
from perlclip.errors import PerlclipError, unknown_name
from perlclip.methods.base import ClassState, Method, cosine_distance, full_precision
from perlclip.methods.parts import CENTER, CenteredConfig, require_start
from perlclip.methods.recipe import Recipe, Rule
from perlclip.methods.registry import register
from perlclip.methods.settings import Config, later
from perlclip.text.classes import Classes
from perlclip.threads import apart

MODALITIES = {"both": ("vision", "text"), "vision": ("vision",), "text": ("text",)}
INITS = ("normal", "torch", "zero")
LOSS_CENTER = 0.5  # of `strong`: less than answers have, so that thoughts learn a part of it (docs/strong.md)
MOST_STEPS = 1000  # a typing error would think for ever


RECIPES = {
    # The paper, appendix A: AdamW, 1e-4, batch 4, one epoch of 16 shots. It names no decay or schedule.
    "fast": Recipe(),
    # Ours: on the real ViT-B/16, one epoch at 1e-4 hardly moves the vision side; this does, and keeps lambda = 1.
    # It was the default of 0.1.0, and stays for the run stores that name it.
    "extended": Recipe(lr=1e-3, epochs=5),
    # Ours, and the default: chosen on validation images of the toybox and of photographs (docs/strong.md).
    # Ten epochs of few images hardly move anything: they have as many as 480 steps take, the ten of 192 images.
    "strong": Recipe(lr=3e-3, epochs=10, schedule="cosine", least_steps=480, most_epochs=40),
}
# The embedded backbones' towers are six times narrower than ViT-B/16's, and the rate for its few weights is higher:
# chosen among eight by mean accuracy on the validation shots of the ten toybox targets, seed 1 (docs/toybox.md).
RULES = [
    *(Rule(recipes=("extended",), backbone=name, changes={"lr": 3e-3}) for name in EMBEDDED),
    Rule(
        recipes=("strong",),
        settings={"readout": "mean", "loss_scale": 0.25, "center": CENTER, "loss_center": LOSS_CENTER},
    ),
    *(Rule(recipes=("strong",), backbone=name, changes={"crop_scale": (0.8, 1.0)}) for name in EMBEDDED),
]


@dataclass(frozen=True)
class Variant:
    """Where the thoughts of a variant enter by default, and what has projectors of its own."""

    depth: int | tuple[int, ...] = 7
    per_layer: bool = False
    per_step: bool = False


VARIANTS = {
    "shared": Variant(),
    "early": Variant(depth=0),
    "deep": Variant(depth=(3, 7, 11)),
    "step": Variant(per_step=True),
    "layer": Variant(depth=(7, 9, 11), per_layer=True),
    "layerstep": Variant(depth=(7, 9, 11), per_layer=True, per_step=True),
}


@dataclass(frozen=True)
class Readout:
    """How the answers of steps 0..k become one: step k's alone, or a mean of the probabilities with these weights."""

    weight: Callable[[int], float] | None = None  # of a step

    @property
    def looks_back(self) -> bool:
        """Whether steps before k count."""
        return self.weight is not None

    def running(self, logp_KBC: Tensor) -> Tensor:
        """The logarithm of the mean over steps 0..k, for every k: as logits, whose softmax gives the mean back."""
        assert self.weight is not None
        weights = [self.weight(k) for k in range(len(logp_KBC))]
        weighted = (logp_BC + log(weight) for logp_BC, weight in zip(logp_KBC, weights, strict=True))
        sums = zip(accumulate(weighted, torch.logaddexp), accumulate(weights), strict=True)
        return torch.stack([sum_BC - log(total) for sum_BC, total in sums])


READOUTS = {
    "last": Readout(),  # the paper
    "mean": Readout(lambda k: 1.0),
    "rising": Readout(lambda k: k + 1.0),
}


@dataclass(frozen=True, kw_only=True)
class PerlConfig(CenteredConfig):
    """PERL's settings, with the paper's values."""

    adjustable: ClassVar[frozenset[str]] = frozenset({"readout", "loss_scale", "center", "loss_center"})

    rank: int = 1  # r, the projector's bottleneck
    steps: int = 4  # K, refinement steps
    depth: int | tuple[int, ...] | None = None  # J, blocks before the thoughts enter; if not given, the variant's own
    anchor: float = 1.0  # lambda, weight of the pull towards the zero-shot image embedding
    modalities: str = "both"  # which towers think: both, vision, text
    variant: str = "shared"  # see the table above
    init: str = "normal"  # weights N(0, 0.02), biases 0; "torch": PyTorch's default; "zero": up-projection 0
    readout: str = later("last")  # of steps 0..K: last, mean or rising, see READOUTS
    loss_scale: float = later(1.0)  # share of CLIP's logit scale in the cross-entropy; answers have all of it
    loss_center: float = later(0.0)  # `center` of the cross-entropy, for a method that has one for its answers
    vision_depth: int | tuple[int, ...] | None = later(None)  # J of the vision tower, where it is not `depth`
    text_depth: int | tuple[int, ...] | None = later(None)  # and of the text tower

    def __post_init__(self) -> None:
        super().__post_init__()
        known: dict[str, Collection[str]] = {
            "modalities": MODALITIES, "variant": VARIANTS, "init": INITS, "readout": READOUTS,
        }  # fmt: skip
        for key, names in known.items():
            if getattr(self, key) not in names:
                raise unknown_name(f"value of {key}", str(getattr(self, key)), names)
        if self.depth is None:
            object.__setattr__(self, "depth", VARIANTS[self.variant].depth)
        self.require(
            rank=(1, inf), steps=(0, MOST_STEPS), anchor=(0.0, inf), loss_scale=(0.001, inf), loss_center=(0.0, 2.0)
        )
        for key in DEPTHS:
            if getattr(self, key) == self.depth:  # said twice
                object.__setattr__(self, key, None)
        for key in ("depth", *DEPTHS):
            depths = _several(getattr(self, key))
            if min(depths) < 0 or list(depths) != sorted(set(depths)):
                raise PerlclipError(f"{key} must be 0 or more, several depths rising, got {getattr(self, key)}")

    def as_dict(self) -> dict[str, Any]:
        """As plain data; without a center there is nothing that the loss could take off."""
        return {key: value for key, value in super().as_dict().items() if key != "loss_center" or self.center}

    def depths(self, side: str) -> tuple[int, ...]:
        """Where thoughts enter a tower, as a tuple also where that is one place."""
        own = getattr(self, f"{side}_depth")
        return _several(self.depth if own is None else own)


DEPTHS = ("vision_depth", "text_depth")


def _several(depth: int | tuple[int, ...] | None) -> tuple[int, ...]:
    return depth if isinstance(depth, tuple) else (depth or 0,)


# think(k, h) gives the thought of step k + 1 at each depth, from the state after step k.
Think = Callable[[int, Tensor], list[Tensor]]


@dataclass(frozen=True)
class Shape:
    """What the thinking of one tower looks like: PERLs of the same shape can think in one batch (`RowThink`)."""

    depths: tuple[int, ...]
    rank: int
    layers: int  # with projectors of their own
    turns: int  # steps with projectors of their own
    specific: bool

    def thoughts(self, k: int, project: Callable[[int], Tensor]) -> list[Tensor]:
        """Those of step k + 1: phi(h), plus the specific projector's output where there is one.

        `project(i)` is the output of projector i; the shared one is 0.
        """
        z_BD, depths = project(0), range(len(self.depths))
        if not self.specific:
            return [z_BD for _ in depths]
        return [z_BD + project(1 + j % self.layers * self.turns + k % self.turns) for j in depths]


@dataclass(frozen=True)
class RowThink:
    """The thoughts of rows that belong to different PERLs of one shape: each has its own projectors' numbers.

    P numbers are a projector's (`Projector.numbers`), n projectors a PERL's.
    """

    shape: Shape
    w_BnP: Tensor

    def __call__(self, k: int, h_BD: Tensor) -> list[Tensor]:
        with torch.autocast(h_BD.device.type, enabled=False):
            return self.shape.thoughts(k, lambda i: self._project(self.w_BnP[:, i], h_BD.float()))

    def of(self, chosen_b: Tensor) -> "RowThink":
        """Those of some of the rows."""
        return replace(self, w_BnP=self.w_BnP[chosen_b])

    def _project(self, w_BP: Tensor, h_BD: Tensor) -> Tensor:
        """`Projector.forward` with other numbers for each row."""
        r, (B, D) = self.shape.rank, h_BD.shape
        gain_BD, bias_BD, down_BP, down_Br, up_BP, up_BD = torch.split(w_BP, [D, D, r * D, r, D * r, D], 1)
        y_BD = torch.addcmul(bias_BD, F.layer_norm(h_BD, (D,)), gain_BD)
        a_Br = F.gelu((down_BP.reshape(B, r, D) @ y_BD[..., None])[..., 0] + down_Br)
        z_BD: Tensor = (up_BP.reshape(B, D, r) @ a_Br[..., None])[..., 0] + up_BD
        return z_BD


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

    def numbers(self) -> Tensor:
        """All of its parameters in one row, in the order that `RowThink` splits."""
        return torch.cat([p.flatten() for p in self.parameters()])


@dataclass(frozen=True)
class OwnThink:
    """The thoughts of rows that are all one PERL's.

    Where a kernel makes them, parameters are put in one row once for all steps, whose gradients are then added at once.
    """

    method: "Perl"
    side: str
    rows: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, k: int, h_BD: Tensor) -> list[Tensor]:
        shape, projectors = self.method.shape(self.side), self.method.thinkers(self.side)
        if not can_think(h_BD, projectors[0].up.weight):
            return shape.thoughts(k, lambda i: projectors[i](h_BD))
        # Specific projectors' are added before they are rounded.
        dtype = torch.float32 if shape.specific else h_BD.dtype
        return shape.thoughts(k, lambda i: think(h_BD, self._row(i), shape.rank, projectors[i].norm.eps, dtype))

    def _row(self, i: int) -> Tensor:
        if i not in self.rows:
            self.rows[i] = self.method.thinkers(self.side)[i].numbers()
        return self.rows[i]


@dataclass(frozen=True)
class Thinking:
    """A batch between two refinement steps: its last state and, for each depth, all of its thoughts so far."""

    refinement: Refinement
    think: Think
    depths: tuple[int, ...]
    h_BD: Tensor
    thoughts: tuple[tuple[Tensor, ...], ...] = ()  # of each step, one for each depth

    def step(self) -> "Thinking":
        """Eq. 2 and 3: a thought comes from the last state, and each step re-includes all thoughts."""
        thoughts = (*self.thoughts, tuple(self.think(len(self.thoughts), self.h_BD)))
        first, *later = (torch.stack(mine, 1) for mine in zip(*thoughts, strict=True))
        h_BD = self.refinement.pool(first, dict(zip(self.depths[1:], later, strict=True)))
        return replace(self, h_BD=h_BD, thoughts=thoughts)

    def states(self, steps: int) -> list[Tensor]:
        """h0, …, hK from here on."""
        thinking, h = self, [self.h_BD]
        for _ in range(steps):
            thinking = thinking.step()
            h.append(thinking.h_BD)
        return h

    def of(self, chosen_b: Tensor) -> "Thinking":
        """The same for some of the batch: the others are done."""
        thoughts = tuple(tuple(z_BD[chosen_b] for z_BD in step) for step in self.thoughts)
        think = self.think.of(chosen_b) if isinstance(self.think, RowThink) else self.think
        refinement, h_bD = self.refinement.of(chosen_b), self.h_BD[chosen_b]
        return replace(self, refinement=refinement, think=think, h_BD=h_bD, thoughts=thoughts)


def begin_thinking(images: FrozenImages, depths: tuple[int, ...], steps: int, think: Think) -> Thinking:
    """Images at step 0, h0 = Pool(R(S)) with S = B(x); there is room for so many steps."""
    s_BND = images.rows(depths[0])
    # In training the graph has copies of S for each step; where it is only looked at, it needs none.
    room = 0 if torch.is_grad_enabled() else steps
    with images.with_graph():
        refinement = Refinement(images.tower, s_BND, cls_rows(s_BND), depths[0], room)
    return Thinking(refinement, think, depths, images.pooled(refinement.pool, depths[0]))


class FrozenTexts:
    """Class prompts run through the frozen base of the text tower, in groups of about one length, when first needed."""

    def __init__(self, text: Tower, depth: int, tokens: Tokens) -> None:
        self.text, self.depth, self.tokens = text, depth, tokens

    @cached_property
    def groups(self) -> list[tuple[Refinement, Tensor]]:
        """R over S, and h0."""
        with self._for_later():
            return [self._group(part) for part, _ in self._parts]

    @cached_property
    def place_C(self) -> Tensor | None:
        """Of each class in the groups one after the other; None where there is one group."""
        members = [members_b for _, members_b in self._parts]
        with self._for_later():
            return None if len(members) == 1 else torch.cat(members).argsort()

    @cached_property
    def _parts(self) -> list[tuple[Tokens, Tensor]]:
        with self._for_later():
            return self.tokens.by_length()

    @contextmanager
    def _for_later(self) -> Iterator[None]:
        """It is kept: whoever needs it first may look at it only, or under autocast, and training may come later."""
        with torch.inference_mode(False), torch.no_grad(), full_precision(self.tokens.eos_B.device):
            yield

    def _group(self, part: Tokens) -> tuple[Refinement, Tensor]:
        shared = SharedText.embed(self.text, part.ids_BN, part.eos_B).run(0, self.depth)
        refinement = Refinement(self.text, shared.whole(), part.eos_B, self.depth)
        return refinement, refinement.pool()


def encode_texts(text: Tower, shape: Shape, steps: int, ids_BN: Tensor, eos_B: Tensor, w_nP: Tensor) -> Tensor:
    """T^(0), …, T^(K), (K+1, B, E), from token ids and projectors' numbers, nothing kept: for `TextGraphs`."""
    refinement = Refinement(text, text.run(text.embed(ids_BN), 0, shape.depths[0]), eos_B, shape.depths[0])
    think = RowThink(shape, w_nP.expand(len(ids_BN), -1, -1))
    states = Thinking(refinement, think, shape.depths, refinement.pool()).states(steps)
    return torch.stack([text.project(h_BD) for h_BD in states])


@dataclass(kw_only=True)
class PerlState(ClassState):
    """The class prompts, and what is frozen of them."""

    frozen: FrozenTexts


@register(
    "perl",
    summary="shared thought projector, recurrent over K steps",
    where="a token before block 8 of both towers",
    venue="2026",
    recipes=RECIPES,
    rules=RULES,
)
class Perl(Method):
    """A frozen CLIP that thinks K times before it answers."""

    config_class = PerlConfig
    config: PerlConfig

    def __init__(self, backbone: Backbone, config: PerlConfig) -> None:
        super().__init__(backbone, config)
        for side in MODALITIES["both"]:
            require_start(self, "depth", config.depths(side)[-1], getattr(backbone, side))
        self.projectors = nn.ModuleDict({side: self._projector(side) for side in MODALITIES[config.modalities]})
        variant = VARIANTS[config.variant]
        self.layers = {side: len(config.depths(side)) if variant.per_layer else 1 for side in self.projectors}
        self.turns = config.steps if variant.per_step else 1
        own = {
            side: layers * self.turns for side, layers in self.layers.items() if variant.per_layer or variant.per_step
        }
        self.specific = nn.ModuleDict(
            {side: nn.ModuleList(self._projector(side) for _ in range(count)) for side, count in own.items() if count}
        )

    @classmethod
    def trains(cls, config: Config) -> bool:
        """Not without a step, which is zero-shot CLIP: the projectors reach nothing."""
        assert isinstance(config, PerlConfig)
        return config.steps > 0

    @property
    def image_steps(self) -> int:
        """K, or 0 if only the texts think."""
        return self._steps("vision")

    @property
    def image_depth(self) -> int:
        """J of the vision tower, the first if there are several."""
        return self.config.depths("vision")[0]

    def prepare(self, classes: Classes) -> PerlState:
        """S, h0 and the first refinement block's Q, K, V of every prompt, made when first needed."""
        return self.prepare_tokens(classes, self.backbone.tokenize(classes.prompts()))

    def prepare_tokens(self, classes: Classes, tokens: Tokens) -> PerlState:
        """The same of prompts that are token ids already."""
        frozen = FrozenTexts(self.backbone.text, self.config.depths("text")[0], tokens)
        return PerlState(classes=classes, frozen=frozen)

    def encode_text(self, state: ClassState) -> Tensor:
        """T^(K), (C, E)."""
        return self.backbone.text.project(self._text_states(state)[-1])

    def encode_image(self, images: Images) -> Tensor:
        """v^(K), (B, E)."""
        return self.backbone.vision.project(self._image_states(images)[-1])

    def loss(self, images: Images, labels: Tensor, state: ClassState) -> Tensor:
        """Cross-entropy of step K plus lambda times the cosine distance to the zero-shot image (Eq. 4)."""
        (v0_BE, vK_BE), t_CE = self._both_towers(images, state)
        classification = self.classify(self._off_center(vK_BE), t_CE, labels, self.config.loss_scale)
        return classification + self.config.anchor * cosine_distance(v0_BE, vK_BE)

    def _both_towers(self, images: Images, state: ClassState) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """v^(0) and v^(K), and T^(K), the towers at the same time where that is worth it."""

        def look() -> tuple[Tensor, Tensor]:
            h = self._image_states(images)
            return self.backbone.vision.project(h[0]), self.backbone.vision.project(h[-1])

        if self._towers_apart(images):
            works = lambda: torch.stack(look()), lambda: self.class_embeddings(state)
            v_2BE, t_CE = apart(works, list(self.parameters()))
            return (v_2BE[0], v_2BE[1]), t_CE
        with self.backbone.beside() as beside:
            found = look()
        t_CE = self.class_embeddings(state)
        beside.join()
        return found, t_CE

    def _towers_apart(self, images: Images) -> bool:
        """Whether each tower trains in a thread of its own: small ones, and nothing but their projectors is trained."""
        pixels = images if isinstance(images, Tensor) else images.pixels
        trained = all(p.requires_grad for p in self.parameters()) and not pixels.requires_grad
        think = self.config.modalities == "both" and self.config.steps > 0
        now = torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        return self.backbone.small and trained and think and now

    def _off_center(self, v_BE: Tensor) -> Tensor:
        """What meets texts in the loss, where a share of its own of the images' mean is taken off."""
        share = self.config.loss_center
        if not (self.center and share):
            return v_BE
        assert self.center_E is not None
        return v_BE.float() - share / self.center * self.center_E

    @property
    def readout(self) -> Readout:
        """How the steps become an answer."""
        return READOUTS[self.config.readout]

    def logits(self, images: Images, state: ClassState) -> Tensor:
        """The answer: the readout of steps 0..K, (B, C)."""
        return self.trajectory(images, state)[-1] if self.readout.looks_back else super().logits(images, state)

    def trajectory(self, images: Images, state: ClassState) -> Tensor:
        """What would be answered after each step k, the readout of steps 0..k: (K+1, B, C)."""
        t_KCE = self.class_embedding_steps(state)
        return self.read_out(self.encode_image_steps(images), t_KCE)

    def look(self, images: Images, state: ClassState) -> tuple[Tensor, Tensor]:
        """The trajectory, and the images' embeddings of every step."""
        with torch.no_grad():
            t_KCE = self.class_embedding_steps(state)
        v_KBE = self.encode_image_steps(images)
        return self.read_out(v_KBE, t_KCE), v_KBE

    def scores(self, logits_KBC: Tensor, v_KBE: Tensor, state: ClassState) -> Tensor:
        """Step K's, as a readout that looks back has the classes share a probability of 1."""
        return self.similarity(v_KBE[-1], self.class_embedding_steps(state)[-1])

    def step_logits(self, images: Images, state: ClassState) -> Tensor:
        """Logits of every step alone, whatever the readout: (K+1, B, C). A tower that does not think stays at 0."""
        t_KCE = self.class_embedding_steps(state)
        return self.similarity_steps(self.encode_image_steps(images), t_KCE)

    def read_out(self, v_KBE: Tensor, t_KCE: Tensor, norms_KB1: Tensor | None = None) -> Tensor:
        """The readout of steps 0..k for each k, both towers taken at the same step: (K+1, B, C).

        Probabilities are normed by `norms_KB1`, the logarithms of the softmax's sums, or by their own.
        """
        logits_KBC = self.similarity_steps(v_KBE, t_KCE)
        if not self.readout.looks_back:
            return logits_KBC
        return self.readout.running(
            logits_KBC - (logits_KBC.logsumexp(-1, keepdim=True) if norms_KB1 is None else norms_KB1)
        )

    def similarity_steps(self, v_KBE: Tensor, t_KCE: Tensor) -> Tensor:
        """`similarity` at each step, (K+1, B, C)."""
        return torch.stack([self.similarity(v_BE, t_CE) for v_BE, t_CE in zip(v_KBE, t_KCE, strict=True)])

    def encode_text_steps(self, state: ClassState) -> Tensor:
        """T^(0), …, T^(K), (K+1, C, E)."""
        assert isinstance(state, PerlState)
        text, tokens = self.backbone.text, state.frozen.tokens
        plain = torch.is_grad_enabled() or torch.is_autocast_enabled(self.backbone.device.type)
        if plain or not (state.replay and self._steps("text") and TextGraphs.takes(tokens)):
            return self._project_steps(text, self._text_states(state))
        key = self.shape("text"), self.config.steps
        graphs = self.backbone.text_graphs(key, partial(encode_texts, text, *key))
        return graphs(tokens, torch.stack([each.numbers() for each in self.thinkers("text")]))

    def encode_image_steps(self, images: Images) -> Tensor:
        """v^(0), …, v^(K), (K+1, B, E)."""
        return self._project_steps(self.backbone.vision, self._image_states(images))

    def _project_steps(self, tower: Tower, h: list[Tensor]) -> Tensor:
        """pi of each state; a tower that does not think gives its only one at every step."""
        embeddings = [tower.project(h_BD) for h_BD in h]
        return torch.stack([embeddings[min(k, len(h) - 1)] for k in range(self.config.steps + 1)])

    def begin(self, images: Images) -> Thinking:
        """Images at step 0, h0 = Pool(R(S)) with S = B(x), to be taken on step by step."""
        depths = self.config.depths("vision")
        return begin_thinking(self.frozen(images), depths, self.image_steps, OwnThink(self, "vision"))

    def _thinking(self, side: str, refinement: Refinement, h0_BD: Tensor) -> Thinking:
        return Thinking(refinement, OwnThink(self, side), self.config.depths(side), h0_BD)

    def _steps(self, side: str) -> int:
        return self.config.steps if side in self.projectors else 0

    def _image_states(self, images: Images) -> list[Tensor]:
        return self.begin(images).states(self.image_steps)

    def _text_states(self, state: ClassState) -> list[Tensor]:
        assert isinstance(state, PerlState)
        groups, others, place_C = [], [], state.frozen.place_C
        for refinement, h0_BD in state.frozen.groups:
            with self.backbone.beside() as other:
                groups.append(self._thinking("text", refinement, h0_BD).states(self._steps("text")))
            others.append(other)
        for other in others:
            other.join()
        if place_C is None:
            return groups[0]
        return [torch.cat(h)[place_C] for h in zip(*groups, strict=True)]

    def thinkers(self, side: str) -> list[Projector]:
        """The projectors of a tower: the shared one, then the specific ones."""
        own = list(cast(nn.ModuleList, self.specific[side])) if side in self.specific else []
        return [cast(Projector, each) for each in (self.projectors[side], *own)]

    def shape(self, side: str) -> Shape:
        """Who can think together."""
        config = self.config
        return Shape(config.depths(side), config.rank, self.layers[side], self.turns, side in self.specific)

    def _projector(self, side: str) -> Projector:
        return Projector(getattr(self.backbone, side).width, self.config.rank, self.config.init)
