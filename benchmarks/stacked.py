"""Many PERLs trained at once over one frozen backbone, for studies of recipes.

The towers are frozen and a PERL is some thousand numbers, so that M of them, with other seeds, rates and losses, are
one batch: their images stand one after the other, and only the thoughts differ. One GPU trains a hundred in the time of
two or three. Exact: a stack of one takes the steps of `perlclip.fit` (`python -m benchmarks.strong check`).

Shapes: M members, S streams of images (a seed's shots in one kind of views), B images a step, C texts, K steps, D tower
width, E shared width, r rank.
"""

import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from random import Random

import torch
from torch import Tensor
from torch.nn import functional as F

import perlclip
from perlclip.backbone import Backbone, FrozenImages, Refinement
from perlclip.data.loading import epoch_order, fixed_views, random_views
from perlclip.data.sets import ImageSet
from perlclip.methods.perl import Perl, PerlState, Thinking
from perlclip.methods.promptsrc import teacher
from perlclip.methods.recipe import Recipe
from perlclip.methods.registry import find_recipe
from perlclip.text.templates import IMAGENET_60

BATCH = 4
SIDES = ("vision", "text")
OWN_BIASES = 3  # the last serves all later steps: without the LayerNorm's scale and shift, 6,402 numbers on ViT-B/16
WEIGHTS = (
    "loss_scale", "anchor", "text_anchor", "sentences", "word_anchor", "logit_anchor", "thought", "weight_decay",
    "center",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to train PERL. Weights of terms that are 0 cost a little time and nothing else."""

    lr: float = 1e-3
    schedule: str = "cosine"
    epochs: int = 10
    batches: int = 1  # of four images that make one step; an epoch must be whole steps
    loss_scale: float = 1.0  # share of CLIP's logit scale in the cross-entropy
    anchor: float = 1.0  # lambda, on the images' cosine
    text_anchor: float = 0.0  # the same for the texts of the classes trained on
    sentences: float = 0.0  # L1 distance of these texts from their means over sixty templates, as PromptSRC has it
    word_anchor: float = 0.0  # the anchor for words that are no class
    logit_anchor: float = 0.0  # KL of the answer from the zero-shot answer
    thought: float = 0.0  # squared length of thoughts against that of the frozen rows
    average: bool = False  # of the weights at the epochs' ends, in a Gaussian over the last third
    random_steps: bool = False  # the loss is taken after 1..K steps, drawn anew each time
    weight_decay: float = 0.01
    center: float = 0.0  # share of the shots' mean embedding that is taken off images in the loss, not in answers alone
    crop: float = 0.0  # smallest share of a picture's area in a view; 0: the backbone's own
    rank: int = 1
    affine: bool = True  # scale and shift of the projector's LayerNorm are trained
    step_biases: bool = False  # thoughts 1, 2 and 3 to K have output biases of their own
    vision_depth: int = 7  # J of each tower; members of one stack have the same
    text_depth: int = 7

    @property
    def recipe(self) -> Recipe:
        """For its rates and weight averages; batches are counted in fours."""
        average = (self.epochs * 5 / 6, self.epochs / 12) if self.average else None
        return Recipe(lr=self.lr, schedule=self.schedule, epochs=self.epochs, average=average)


@dataclass(frozen=True)
class Member:
    """One PERL of a stack."""

    setting: Setting
    seed: int


class StackedProjector:
    """phi of M members: parameters with a leading dimension, masks for what a member does not have."""

    def __init__(self, members: Sequence[Member], backbone: Backbone, side: str) -> None:
        rank, device = max(member.setting.rank for member in members), backbone.device
        parts: dict[str, list[Tensor]] = {}
        masks: dict[str, list[Tensor]] = {}
        for member in members:
            own = member.setting.rank
            perl = perlclip.create_method("perl", backbone, seed=member.seed, rank=own)
            for name, p in perl.projectors[side].named_parameters():
                more = rank - own
                pad = {"down.weight": (0, 0, 0, more), "down.bias": (0, more), "up.weight": (0, more)}.get(name, (0, 0))
                trained = float(member.setting.affine or not name.startswith("norm"))
                parts.setdefault(name, []).append(F.pad(p.detach(), pad))
                masks.setdefault(name, []).append(F.pad(torch.full_like(p, trained), pad))
            more_2D = torch.zeros(OWN_BIASES - 1, getattr(backbone, side).width)  # on top of the shared one
            parts.setdefault("steps.bias", []).append(more_2D)
            masks.setdefault("steps.bias", []).append(torch.full_like(more_2D, float(member.setting.step_biases)))
        self.parameters = {name: torch.stack(each).to(device).requires_grad_() for name, each in parts.items()}
        self.masks = {name: torch.stack(each).to(device) for name, each in masks.items()}

    def some(self, chosen: Sequence[int]) -> "StackedProjector":
        """Those of a few members."""
        part = copy(self)
        part.parameters = {name: p.detach()[list(chosen)] for name, p in self.parameters.items()}
        return part

    def __call__(self, k: int, h_mD: Tensor) -> Tensor:
        """The thought of step k + 1: (M·B, D) -> (M·B, D)."""
        p = self.parameters
        h_MBD = h_mD.float().unflatten(0, (len(p["down.weight"]), -1))
        x_MBD = F.layer_norm(h_MBD, h_MBD.shape[-1:]) * p["norm.weight"][:, None] + p["norm.bias"][:, None]
        inner_MBr = F.gelu(x_MBD @ p["down.weight"].mT + p["down.bias"][:, None])
        bias_MD = p["up.bias"] + p["steps.bias"][:, min(k, OWN_BIASES - 1) - 1] if k else p["up.bias"]
        return (inner_MBr @ p["up.weight"].mT + bias_MD[:, None]).flatten(0, 1)


class Stack:
    """M members over one backbone and one training task."""

    def __init__(self, backbone: Backbone, members: Sequence[Member], shots: dict[int, ImageSet], words: Sequence[str]):
        self.backbone, self.members, self.shots = backbone, members, shots
        (depths,) = {(member.setting.vision_depth, member.setting.text_depth) for member in members}
        self.depth = dict(zip(SIDES, depths, strict=True))
        self.perl = perlclip.create_method("perl", backbone, vision_depth=depths[0], text_depth=depths[1])
        assert isinstance(self.perl, Perl)
        self.steps = self.perl.config.steps
        self.projectors = {side: StackedProjector(members, backbone, side) for side in SIDES}
        self.named = {(side, n): p for side in SIDES for n, p in self.projectors[side].parameters.items()}
        self.masks = {(side, n): p for side in SIDES for n, p in self.projectors[side].masks.items()}
        self.first = {key: torch.zeros_like(p) for key, p in self.named.items()}
        self.second = {key: torch.zeros_like(p) for key, p in self.named.items()}
        self.gathered = {key: torch.zeros_like(p) for key, p in self.named.items()}
        self.averaged = {key: torch.zeros_like(p) for key, p in self.named.items()}
        self.streams = sorted({(member.seed, member.setting.crop) for member in members})
        place = [self.streams.index((member.seed, member.setting.crop)) for member in members]
        self.stream_M = torch.tensor(place, device=backbone.device)
        names = next(iter(shots.values()))
        self.classes = len(names.class_names)
        self.texts = self._texts([*names.prompts, *words])
        self.weights = {
            name: torch.tensor([float(getattr(m.setting, name)) for m in members], device=backbone.device)
            for name in WEIGHTS
        }
        self.words = len(words)
        asked = any(member.setting.sentences for member in members)
        self.mean_CE = teacher(backbone, names.classes, IMAGENET_60) if asked else None
        by_seed = {seed: self._center(images) for seed, images in shots.items()}
        self.center_ME = torch.stack([by_seed[member.seed] for member in members])

    @torch.no_grad()
    def _center(self, shots: ImageSet) -> Tensor:
        """The mean of the classes' mean embeddings, (E,)."""
        views = fixed_views(shots, self.backbone.preprocess, 32, self.backbone.device, 0)
        v_NE = torch.cat([self.backbone.encode_image(pixels).float() for pixels, _ in views])
        places = shots.by_class().values()
        return torch.stack([v_NE[list(where)].mean(0) for where in places]).mean(0)

    def _texts(self, prompts: Sequence[str]) -> tuple[list[tuple[Refinement, Tensor]], Tensor | None]:
        """Frozen parts of prompts, groups of about one length, each M times over."""
        with torch.no_grad():
            state = self.perl.class_state(list(prompts))
            assert isinstance(state, PerlState)
            groups = []
            for refinement, h0_CD in state.frozen.groups:
                again = torch.arange(len(h0_CD), device=h0_CD.device).repeat(len(self.members))
                groups.append((refinement.of(again), h0_CD[again]))
        return groups, state.frozen.place_C

    def _think(self, side: str, k: int, h_mD: Tensor) -> list[Tensor]:
        return [self.projectors[side](k, h_mD)]

    def _states(self, side: str, refinement: Refinement, h0_mD: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """h0, …, hK, and the thoughts."""
        thinking = Thinking(refinement, partial(self._think, side), (self.depth[side],), h0_mD)
        h = [h0_mD]
        for _ in range(self.steps):
            thinking = thinking.step()
            h.append(thinking.h_BD)
        return h, [step[0] for step in thinking.thoughts]

    def text_steps(self, texts: tuple[list[tuple[Refinement, Tensor]], Tensor | None]) -> tuple[Tensor, list[Tensor]]:
        """Unit embeddings of every step, (K+1, M, C, E), and the thoughts."""
        groups, place_C = texts
        M, project = len(self.members), self.backbone.text.project
        parts, thoughts = [], []
        for refinement, h0_mD in groups:
            h, z = self._states("text", refinement, h0_mD)
            parts.append(torch.stack([project(h_mD).unflatten(0, (M, -1)) for h_mD in h]))
            thoughts += z
        t_KMCE = torch.cat(parts, 2)
        return (t_KMCE if place_C is None else t_KMCE[:, :, place_C]), thoughts

    def image_steps(self, images: FrozenImages, place_m: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Unit embeddings of every step of chosen images, one after the other for each member: (K+1, M, B, E)."""
        vision = self.backbone.vision
        with torch.no_grad():
            x_BND = images.rows(self.depth["vision"])
            rows_B = torch.zeros(len(x_BND), dtype=torch.long, device=x_BND.device)
            refinement = Refinement(vision, x_BND, rows_B, self.depth["vision"])
            h0_BD = images.pooled(refinement.pool)
        h, thoughts = self._states("vision", refinement.of(place_m), h0_BD[place_m])
        return torch.stack([vision.project(h_mD).unflatten(0, (len(self.members), -1)) for h_mD in h]), thoughts

    def losses(self, pixels: Tensor, labels_SB: Tensor, k_M: Tensor) -> Tensor:
        """The loss of each member after k refinement steps of its own: (M,)."""
        S, B = labels_SB.shape
        place_m = (torch.arange(S * B, device=pixels.device).unflatten(0, (S, B))[self.stream_M]).flatten()
        v_KMBE, z_image = self.image_steps(self.backbone.frozen(pixels), place_m)
        t_KMCE, z_text = self.text_steps(self.texts)
        member = torch.arange(len(self.members), device=pixels.device)
        v0, vk, t0, tk = v_KMBE[0].float(), v_KMBE[k_M, member].float(), t_KMCE[0].float(), t_KMCE[k_M, member].float()
        labels_MB, w, tau = labels_SB[self.stream_M], self.weights, self.backbone.logit_scale
        cosines_MBC = (vk - w["center"][:, None, None] * self.center_ME[:, None]) @ tk[:, : self.classes].mT
        scaled = cosines_MBC * (tau * w["loss_scale"])[:, None, None]
        entropy_m = F.cross_entropy(scaled.flatten(0, 1), labels_MB.flatten(), reduction="none")
        entropy_M = entropy_m.unflatten(0, (-1, B)).mean(1)
        text_M = 1 - (t0 * tk).sum(-1)
        before = (tau * v0 @ t0[:, : self.classes].mT).log_softmax(-1)
        after = (tau * cosines_MBC).log_softmax(-1)
        loss_M = entropy_M + w["anchor"] * (1 - (v0 * vk).sum(-1)).mean(1)
        loss_M = loss_M + w["text_anchor"] * text_M[:, : self.classes].mean(1)
        if self.mean_CE is not None:
            loss_M = loss_M + w["sentences"] * (tk[:, : self.classes] - self.mean_CE).abs().mean((1, 2))
        if self.words:
            loss_M = loss_M + w["word_anchor"] * text_M[:, self.classes :].mean(1)
        loss_M = loss_M + w["logit_anchor"] * (before.exp() * (before - after)).sum(-1).mean(1)
        lengths = [z.float().square().mean(-1).unflatten(0, (len(self.members), -1)).mean(1) for z in z_image + z_text]
        return loss_M + w["thought"] * torch.stack(lengths).sum(0)

    def step(
        self,
        pixels: Tensor,
        labels_SB: Tensor,
        k_M: Tensor,
        rate_M: Tensor,
        apply_M: Tensor,
        t_M: Tensor,
        every_M: Tensor,
    ) -> Tensor:
        """One step of every member: AdamW, where `apply` says so, on the mean gradient of the steps before it."""
        loss_M = self.losses(pixels, labels_SB, k_M)
        gradients = torch.autograd.grad(loss_M.sum(), list(self.named.values()))
        with torch.no_grad():
            for (key, p), g in zip(self.named.items(), gradients, strict=True):
                of = lambda x_M, p=p: x_M.view(-1, *[1] * (p.ndim - 1))  # noqa: E731
                mine, m, v, total = of(apply_M) > 0, self.first[key], self.second[key], self.gathered[key]
                total.add_(g * self.masks[key] / of(every_M))
                m.copy_(torch.where(mine, 0.9 * m + 0.1 * total, m))
                v.copy_(torch.where(mine, 0.999 * v + 0.001 * total.square(), v))
                size = of(rate_M / (1 - 0.9**t_M))
                deviation = (v / of(1 - 0.999**t_M)).sqrt() + 1e-8
                decay = 1 - of(rate_M * self.weights["weight_decay"]) * self.masks[key]
                p.copy_(torch.where(mine, p * decay - size * m / deviation, p))
                total.copy_(torch.where(mine, torch.zeros_like(total), total))
        return loss_M.detach()

    def batches(self, workers: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Epoch, pixels of all streams and their labels, to the end of the longest setting."""
        loaders, own = [], find_recipe("perl", "fast", self.backbone.name)[0].crop_scale
        for seed, crop in self.streams:
            epochs = max(m.setting.epochs for m in self.members if (m.seed, m.setting.crop) == (seed, crop))
            images = self.shots[seed]
            order = [(e, b) for e in range(epochs) for b in epoch_order(len(images), BATCH, False, seed=seed, epoch=e)]
            scale = (crop, 1.0) if crop else own
            device = self.backbone.device
            views = random_views(images, self.backbone.preprocess, scale, order, device, seed=seed, workers=workers)
            loaders.append((order, views))
        last: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * len(loaders)
        longest = max((order for order, _ in loaders), key=len)
        for epoch, _ in longest:
            for s, (_, loader) in enumerate(loaders):
                last[s] = next(loader, last[s])  # a stream whose settings are done shows its last batch again
            yield epoch, torch.cat([each[0] for each in last]), torch.stack([each[1] for each in last])

    def train(self, workers: int = 0, record: bool = True) -> list[Tensor]:
        """All members to their ends; the losses of every step."""
        device, M = self.backbone.device, len(self.members)
        recipes = [member.setting.recipe for member in self.members]
        per_epoch = math.ceil(len(next(iter(self.shots.values()))) / BATCH)
        done = [0] * M
        losses: list[Tensor] = []
        static: list[Tensor] | None = None
        rng = Random(0)
        for step, (epoch, pixels, labels) in enumerate(self.batches(workers)):
            rates, applied = [], []
            for i, (member, recipe) in enumerate(zip(self.members, recipes, strict=True)):
                alive, ends = epoch < recipe.epochs, member.setting.batches
                place = step % per_epoch + 1
                applied.append(float(alive and (place % ends == 0 or place == per_epoch)))
                rates.append(recipe.rate(epoch) if alive else 0.0)
                done[i] += int(applied[-1])
            ks = [rng.randint(1, self.steps) if m.setting.random_steps else self.steps for m in self.members]
            every = [float(m.setting.batches) for m in self.members]
            numbers = torch.tensor([rates, applied, [max(1.0, d) for d in done], every])
            rate_M, apply_M, t_M, every_M = numbers.to(device)
            inputs = [pixels, labels, torch.tensor(ks, device=device), rate_M, apply_M, t_M, every_M]
            whole = labels.shape[1] == BATCH  # the last of an epoch may have fewer images
            if record and whole and device.type == "cuda" and step >= 3:
                if static is None:
                    static, graph = [x.clone() for x in inputs], torch.cuda.CUDAGraph()
                    kept = self._snapshot()
                    torch.cuda.synchronize()
                    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # loaders pin memory
                        out = self.step(*static)
                    self._restore(kept)
                for mine, given in zip(static, inputs, strict=True):
                    mine.copy_(given)
                graph.replay()
                losses.append(out.clone())
            else:
                losses.append(self.step(*inputs))
            if (step + 1) % per_epoch == 0:
                for i, recipe in enumerate(recipes):
                    if recipe.average and epoch < recipe.epochs:
                        for key, p in self.named.items():
                            self.averaged[key][i] += recipe.share(epoch) * p[i].detach()
        with torch.no_grad():
            for i, recipe in enumerate(recipes):
                for key, p in self.named.items() if recipe.average else ():
                    p[i] = self.averaged[key][i]
        return losses

    def _tensors(self) -> list[Tensor]:
        return [t for each in (self.named, self.first, self.second, self.gathered) for t in each.values()]

    def _snapshot(self) -> list[Tensor]:
        return [t.detach().clone() for t in self._tensors()]

    def _restore(self, kept: list[Tensor]) -> None:
        with torch.no_grad():
            for t, k in zip(self._tensors(), kept, strict=True):
                t.copy_(k)

    def some(self, chosen: Sequence[int]) -> "Stack":
        """A few of the members, to be looked through."""
        part = copy(self)
        part.members = [self.members[i] for i in chosen]
        part.projectors = {side: self.projectors[side].some(chosen) for side in SIDES}
        part.center_ME = self.center_ME[list(chosen)]
        return part

    @torch.no_grad()
    def look(self, images: ImageSet, batch: int = 32, workers: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Image embeddings of every step for all members, (K+1, M, B, E), and labels, batch after batch."""
        for pixels, labels in fixed_views(images, self.backbone.preprocess, batch, self.backbone.device, workers):
            place_m = torch.arange(len(labels), device=pixels.device).repeat(len(self.members))
            yield self.image_steps(self.backbone.frozen(pixels), place_m)[0], labels

    @torch.no_grad()
    def classes_of(self, images: ImageSet) -> Tensor:
        """Class embeddings of every step for all members, (K+1, M, C, E)."""
        return self.text_steps(self._texts(images.prompts))[0]


def state_of(stack: Stack, i: int) -> dict[str, Tensor]:
    """A member's parameters under the names of `Perl`."""
    rank = stack.members[i].setting.rank
    cut = {"down.weight": (slice(rank),), "down.bias": (slice(rank),), "up.weight": (slice(None), slice(rank))}
    return {
        f"projectors.{side}.{name}": p[i].detach().cpu()[cut.get(name, ())]
        for (side, name), p in stack.named.items()
        if name != "steps.bias" or stack.members[i].setting.step_biases
    }
