"""Adaptive thinking: each image takes as many refinement steps as it needs, and then leaves the batch.

The classes, which cost nothing per image, always think all K steps; it is the image that may answer early, with v_k
against T_K. Where the readout looks back on the steps before, they answer as one, and v_k meets T_k as in training.
With l_k the logits answered after step k, a its best class and j another, two numbers say how settled an image is:

    lead_k(j)    = l_k[a] - l_k[j]            log-odds of a against j: confidence
    closing_k(j) = lead_(k-1)(j) - lead_k(j)  how far j came nearer in the last step: change

An image is done after step 0 if its smallest lead is at least `first`, and after step k >= 1 if a would still lead
every class by `lead`, should two more steps move the log-odds as the last one did. docs/adaptive.md has the
measurements behind this rule.

Shapes: K stands for the steps 0..K, B images, b those that still think, C classes, E shared width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from perlclip.backbone import Images
from perlclip.backbone.accel.cuda_graphs import SMALL, Compiled, Work, graph_size
from perlclip.errors import PerlclipError
from perlclip.methods.base import ClassState, Method
from perlclip.methods.perl import Perl, Thinking
from perlclip.thinking.limits import Limit

Steps = int | Literal["adaptive"] | None
# What an adapter makes of a method's logits (B, C), knowing the images' embeddings of the steps 0..k that they took and
# what it adds to each class from their look at the start, (B, C), if anything.
Finish = Callable[[Tensor, Sequence[Tensor], Tensor | None], Tensor]
NEVER = 1e6  # a lead that no image has: logits are cosines times 100 or so
AHEAD = 2.0  # steps looked ahead
NO_THRESHOLDS = (
    "adaptive thinking needs thresholds, and there are none; set them with `perlclip set-thresholds ADAPTER DATA`, "
    "or from Python with perlclip.set_thresholds(adapter, train_set) and save_adapter"
)


@dataclass(frozen=True)
class Policy:
    """When an image is done: thresholds of its lead after step 0, and of the lead expected after later ones."""

    first: float
    lead: float

    def done(self, settled_B: Tensor, step: int) -> Tensor:
        """Whether images that are so settled after this step take no more."""
        return settled_B >= (self.lead if step else self.first)

    def stops(self, settled_KB: Tensor) -> Tensor:
        """The step after which each image is done; the last one if none before it: (B,)."""
        *early, last = (self.done(settled_B, k) for k, settled_B in enumerate(settled_KB))
        return torch.stack([*early, torch.ones_like(last)]).int().argmax(0)


ALL_STEPS = Policy(first=NEVER, lead=NEVER)


def settled(logits_BC: Tensor, before_BC: Tensor | None = None) -> Tensor:
    """The smallest lead two steps from now, or as it is where there is no step before: (B,)."""
    best_B1 = logits_BC.argmax(-1, keepdim=True)
    leads_BC = logits_BC.gather(1, best_B1) - logits_BC
    if before_BC is not None:
        closing_BC = before_BC.gather(1, best_B1) - before_BC - leads_BC
        leads_BC = leads_BC - AHEAD * closing_BC
    return leads_BC.scatter(1, best_B1, NEVER).amin(-1)


def settled_steps(logits_KBC: Tensor) -> Tensor:
    """The same of every step of a trajectory: (K+1, B)."""
    later = [settled(now_BC, before_BC) for before_BC, now_BC in pairwise(logits_KBC)]
    return torch.stack([settled(logits_KBC[0]), *later])


def simulate(policy: Policy, logits_KBC: Tensor) -> Tensor:
    """Where each image of a whole `image_trajectory` would have stopped: (B,)."""
    return policy.stops(settled_steps(logits_KBC))


def image_trajectory(
    method: Perl, v_KBE: Tensor, state: ClassState, finish: Finish | None = None, more_BC: Tensor | None = None
) -> Tensor:
    """What is answered if images with these embeddings stop after each step: (K+1, B, C)."""
    t_KCE, v = method.class_embedding_steps(state), list(v_KBE)
    return torch.stack([answered(method, v[: k + 1], t_KCE, finish, more_BC) for k in range(len(v))])


def answered(
    method: Perl, v: Sequence[Tensor], t_KCE: Tensor, finish: Finish | None = None, more_BC: Tensor | None = None
) -> Tensor:
    """The logits of images with these embeddings of the steps 0..k that they took: (B, C)."""
    logits_BC = _read_out(method, v, t_KCE)
    return logits_BC if finish is None else finish(logits_BC, v, more_BC)


def _read_out(method: Perl, v: Sequence[Tensor], t_KCE: Tensor) -> Tensor:
    if not method.readout.looks_back:
        return method.similarity(v[-1], t_KCE[-1])
    steps = len(v) if method.image_steps else len(t_KCE)  # where only texts think, images stay at step 0
    v_KBE = torch.stack([v[min(k, len(v) - 1)] for k in range(steps)])
    return method.read_out(v_KBE, t_KCE[:steps])[-1]


@dataclass(frozen=True)
class Answer:
    """The logits of each image after its last step, and how many refinement steps it took."""

    logits_BC: Tensor
    steps_B: Tensor


class Stages:
    """PERL's way through a batch cut between its steps, where images may leave; each stage a function of tensors alone.

    So that on CUDA the stages are recorded as graphs and replayed (`compile`), each for a few sizes. `finish` makes an
    adapter's answer of the method's, with what `more` makes of the images at the start. One batch at a time.
    """

    def __init__(
        self, method: Perl, state: ClassState, finish: Finish | None = None, compile: str = "off",
        more: Callable[[Images], Tensor | None] | None = None,
    ) -> None:  # fmt: skip
        self.method, self.state, self.finish, self.more = method, state, finish, more
        self._first = Compiled(self._begin, method.backbone.device, compile)
        self._next = Compiled(self._step, method.backbone.device, compile)
        self._like: Thinking | None = None  # of which those of other tensors are copies

    @property
    def seconds(self) -> float:
        """What recording has cost so far."""
        return self._first.seconds + self._next.seconds

    def forget(self) -> None:
        """What was recorded holds no longer."""
        self._first.forget()
        self._next.forget()

    def begin(self, images: Images) -> "Stage":
        """After step 0."""
        count = len(images)
        if not self._first.on or count > SMALL:
            return Stage(self, list(self._begin(images)), count)
        frozen = self.method.frozen(images)
        pixels = F.pad(frozen.pixels, (0, 0, 0, 0, 0, 0, 0, graph_size(count, coarse=True) - count))
        stage = Stage(self, list(self._first(pixels)), count)
        frozen.pooled_BD = stage.h_BD[:count].clone()
        return stage

    def work(self, count: int) -> Work:
        """A step of so many images, recorded or not."""
        return self._next if self._next.on and count <= SMALL else self._step

    def _begin(self, images: Images) -> list[Tensor]:
        images = self.method.frozen(images)
        more_BC = self.more(images) if self.more else None
        thinking, depths = self.method.begin(images), self.method.config.depths("vision")
        refined = thinking.refinement.tensors()
        none = [each[:0].clone() for each in refined]  # the batch itself is not kept
        self._like = replace(thinking, refinement=thinking.refinement.over(none), h_BD=thinking.h_BD[:0].clone())
        v_1BE = self.method.backbone.vision.project(thinking.h_BD)[None]
        z_0jBD = thinking.h_BD.new_empty(0, len(depths), *thinking.h_BD.shape, dtype=torch.float32)
        more_BC = v_1BE.new_empty(v_1BE.shape[1], 0) if more_BC is None else more_BC
        now_BC, settled_B = self._judge(v_1BE, None, more_BC)
        return [now_BC, settled_B, v_1BE, z_0jBD, thinking.h_BD, more_BC, *refined]

    def _step(
        self, before_BC: Tensor, v_kBE: Tensor, z_kjBD: Tensor, h_BD: Tensor, more_BC: Tensor, *refined: Tensor
    ) -> list[Tensor]:
        assert self._like is not None
        thoughts = tuple(tuple(z_jBD) for z_jBD in z_kjBD)
        refinement = self._like.refinement.over(refined)
        thinking = replace(self._like, refinement=refinement, h_BD=h_BD, thoughts=thoughts).step()
        v_kBE = torch.cat([v_kBE, self.method.backbone.vision.project(thinking.h_BD)[None]])
        now_BC, settled_B = self._judge(v_kBE, before_BC, more_BC)
        z_kjBD = torch.stack([torch.stack(step) for step in thinking.thoughts])
        return [now_BC, settled_B, v_kBE, z_kjBD, thinking.h_BD]

    def _judge(self, v_kBE: Tensor, before_BC: Tensor | None, more_BC: Tensor) -> tuple[Tensor, Tensor]:
        t_KCE = self.method.class_embedding_steps(self.state)
        now_BC = answered(self.method, list(v_kBE), t_KCE, self.finish, more_BC if more_BC.shape[1] else None)
        return now_BC, settled(now_BC, before_BC)


@dataclass
class Stage:
    """A batch after some step; of its rows, `count` are images. The next stage may overwrite it."""

    stages: Stages
    tensors: list[Tensor]  # what `_begin` gives
    count: int

    @property
    def h_BD(self) -> Tensor:
        """The last pooled state."""
        return self.tensors[4]

    def answers(self) -> tuple[Tensor, Tensor]:
        """Logits, and how settled each is: (b, C), (b,)."""
        return self.tensors[0][: self.count], self.tensors[1][: self.count]

    def step(self, going_b: Tensor) -> "Stage":
        """A step further, with these images alone."""
        now_BC, _, v_kBE, z_kjBD, h_BD, *refined = self.tensors
        count, work = len(going_b), self.stages.work(len(going_b))
        if isinstance(work, Compiled):
            going_b = F.pad(going_b, (0, graph_size(count, coarse=True) - count))  # with the first once more
        if len(going_b) < len(now_BC) or count < self.count:
            now_BC, h_BD, *refined = (each[going_b] for each in (now_BC, h_BD, *refined))
            v_kBE, z_kjBD = v_kBE[:, going_b], z_kjBD[:, :, going_b]
        made = work(now_BC, v_kBE, z_kjBD, h_BD, *refined)
        return Stage(self.stages, [*made, *refined], count)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How far images think: at most `steps` steps, until the policy has enough, or until a limit says no.

    A limit that allows fewer than want another step gives it to the least settled.
    """

    method: Perl
    steps: int
    policy: Policy = ALL_STEPS
    limits: Sequence[Limit] = ()

    def answer(self, images: Images, stages: Stages) -> Answer:
        """Answer a batch of images; what is done is no part of the next step."""
        for limit in self.limits:
            limit.begin(len(images))
        stage = stages.begin(images)
        now_bC, settled_b = stage.answers()
        logits_BC = now_bC.clone()
        place_b = torch.arange(len(images), device=images.device)
        steps_B = torch.zeros_like(place_b)
        for k in range(self.steps + 1):
            going_b = (~self.policy.done(settled_b, k)).nonzero()[:, 0]  # waits for the device
            for limit in self.limits:
                limit.made(len(now_bC), k)
            allowed = len(going_b) if k < self.steps else 0
            for limit in self.limits:
                allowed = limit.grant(allowed)
            if not allowed:
                break
            if allowed < len(going_b):
                going_b = going_b[settled_b[going_b].argsort(stable=True)[:allowed]]
            place_b, stage = place_b[going_b], stage.step(going_b)
            now_bC, settled_b = stage.answers()
            logits_BC[place_b], steps_B[place_b] = now_bC, k + 1
        return Answer(logits_BC, steps_B)


def require_steps(method: Method) -> Perl:
    """Only a method that thinks can think more or less."""
    if not isinstance(method, Perl):
        raise PerlclipError(f"only PERL takes refinement steps; this is {method.name!r}, which answers at once")
    return method


def refined_share(method: Perl) -> float:
    """The part of the image tower's blocks that a refinement step runs again."""
    vision = method.backbone.vision
    return (vision.depth - method.config.depths("vision")[0]) / vision.depth


def make_plan(method: Method, steps: Steps, policy: Policy | None, limits: Sequence[Limit] = ()) -> Plan:
    """What `steps` asks for: a number of steps for all, or `policy`; with limits alone it is "adaptive"."""
    method = require_steps(method)
    most = method.image_steps
    if steps is None and limits:
        steps = "adaptive"
    if steps == "adaptive":
        if policy is None and most:
            raise PerlclipError(NO_THRESHOLDS)
        return Plan(method=method, steps=most, policy=policy or ALL_STEPS, limits=limits)
    if type(steps) is not int or not 0 <= steps <= most:
        raise PerlclipError(
            f"steps must be 'adaptive' or a whole number from 0 to {most}, which images take here, got {steps!r}"
        )
    return Plan(method=method, steps=steps, limits=limits)
