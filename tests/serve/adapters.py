"""Adapters of every kind on one small backbone, with random weights: nothing is trained."""

from dataclasses import replace

import torch

import perlclip
from perlclip.adapters.folder import Adapter
from perlclip.heads.head import Head
from perlclip.thinking.policy import Policy
from perlclip.thinking.thresholds import Point, Thresholds
from perlclip.trust.record import Trust
from tests.common import gaussian_head, random_middle

NAMES = ("red", "green grass", "blue", "cat", "striped horse", "ox", "tree", "old house", "boat")
KINDS = {
    "plain": ("perl", {}),
    "rising": ("perl", {"readout": "rising", "steps": 3}),
    "mean": ("perl", {"readout": "mean", "steps": 2, "rank": 1}),
    "rank": ("perl", {"rank": 3, "readout": "rising"}),
    "steps": ("perl", {"variant": "step", "steps": 2}),
    "layers": ("perl", {"variant": "layer", "steps": 2}),
    "both": ("perl", {"variant": "layerstep", "steps": 2}),
    "deep": ("perl", {"variant": "deep"}),
    "early": ("perl", {"variant": "early", "steps": 1}),
    "vision": ("perl", {"modalities": "vision", "readout": "rising"}),
    "text": ("perl", {"modalities": "text"}),
    "text-back": ("perl", {"modalities": "text", "readout": "rising"}),
    "none": ("perl", {"steps": 0}),
    "zero-shot": ("zero-shot", {}),
    "ridge": ("ridge", {}),
    "gaussian": ("gaussian", {}),
    "coop": ("coop", {}),
    "cocoop": ("cocoop", {}),
    "mma": ("mma", {}),
    "mmrl": ("mmrl", {}),
    "smooth": ("perl", {"lens": "smooth", "readout": "rising"}),
    "negative": ("zero-shot", {"lens": "negative"}),
    "near": ("mma", {"lens": "near"}),
    "centered": ("perl", {"center": 0.75, "readout": "rising"}),
    "centered-last": ("perl", {"center": 0.5, "steps": 2}),
    "centered-gaussian": ("gaussian", {"center": 0.75}),
}
ALONE = {"text-back", "cocoop", "mma", "mmrl", "near"}  # whose rows cannot be mixed
FEATURES = ("first", "last", "mean", "all")


def random_adapter(backbone, kind: str, seed: int, *, trained: int | None = None, head: bool | None = None) -> Adapter:
    """Classes, head, temperature and thresholds by the seed; the head knows the first `trained` classes."""
    name, settings = KINDS[kind]
    draw = torch.Generator().manual_seed(seed)
    method = create(backbone, name, settings, seed)
    names = tuple(NAMES[i] for i in torch.randperm(len(NAMES), generator=draw)[: 2 + seed % 6].tolist())
    made = None
    if seed % 2 if head is None else head:
        features = FEATURES[seed // 2 % 4] if method.image_steps else "first"
        pieces = (method.image_steps or 0) + 1 if features == "all" else 1
        weight = torch.randn(len(names), pieces * backbone.embed_dim, generator=draw).half().float()
        made = gaussian_head(backbone, names, seed, share=0.6) if seed // 3 % 2 == 0 else Head(
            class_names=names, weight_CE=weight, bias_C=torch.randn(len(names), generator=draw), text=0.7, scale=3.0,
            share=(1.0, 0.4)[seed % 4 // 2], offset=0.3, features=features,
        )  # fmt: skip
    if made and method.center:
        made = replace(made, centered=seed % 3 != 0)
    if made and made.unseen and seed % 4 > 1:
        made = replace(made, unseen=replace(made.unseen, gained=(0.0, 0.9, 0.4)[: seed % 3 + 1]))
    if made and seed % 3:
        made = replace(made, middle=random_middle(backbone, names, seed, among=seed % 2))
    count = 60
    logits, labels = torch.randn(count, len(names), generator=draw), torch.arange(count) % len(names)
    v, means = torch.randn(2, count, backbone.embed_dim, generator=draw)
    trust = Trust.of("own images", logits, logits, labels, v, None, means[: len(names)], v[:, 0], (logits, logits / 2))
    points = (Point(0.0, 0.5, Policy(0.0, 0.0)), Point(2.0, 0.9, Policy(12.0, 4.0)))
    return Adapter(
        method=method, class_names=names, template="a photo of a {}.", head=made, trust=trust,
        thresholds=Thresholds(chosen=points[1], frontier=points, views=1) if method.image_steps is not None else None,
    )  # fmt: skip


def create(backbone, name, settings, seed):
    torch.manual_seed(seed)
    method = perlclip.create_method(name, backbone, **settings)
    with torch.no_grad():
        for p in method.parameters():
            p.add_(torch.randn_like(p) * (p.shape[-1] ** -0.5 if p.ndim > 1 else 0.3))
    if method.center:
        method.take_center(torch.randn(backbone.embed_dim) * backbone.embed_dim**-0.5)
    return method.eval()
