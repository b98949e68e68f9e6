"""What tests of several folders need: a vocabulary without merges, padded prompts, loud parameters, pixels, heads."""

import torch
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from perlclip.backbone import Backbone
from perlclip.heads.answering import Answering
from perlclip.heads.discriminant import Discriminant
from perlclip.heads.head import Head, make_head
from perlclip.heads.middle import Middle
from perlclip.heads.unseen import NewClasses, Unseen
from perlclip.thinking.policy import Plan, Policy

CLOSE = dict(atol=1e-5, rtol=1e-5)


def byte_vocabulary() -> dict[str, int]:
    """CLIP's vocabulary without merges: one token per letter."""
    letters = sorted(ByteLevel.alphabet())
    tokens = letters + [letter + "</w>" for letter in letters] + ["<|startoftext|>", "<|endoftext|>"]
    return {token: i for i, token in enumerate(tokens)}


def padded(backbone: Backbone, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """Ids padded to the whole context with EOS, and the first EOS position."""
    encoded = backbone.tokenizer(prompts, padding="max_length", max_length=backbone.context_length, return_tensors="pt")
    ids = encoded["input_ids"]
    return ids, (ids == backbone.tokenizer.eos_token_id).int().argmax(-1)


def loud(method):
    """Parameters large enough that a wrong position, order or mask shows far above 1e-5."""
    torch.manual_seed(3)
    with torch.no_grad():
        for p in method.parameters():
            p.add_(torch.randn_like(p) * (p.shape[-1] ** -0.5 if p.ndim > 1 else 0.3))
    return method


def random_pixels(backbone: Backbone, batch: int = 3) -> Tensor:
    size = backbone.preprocess.size
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


UNSEEN = Unseen(
    alone=NewClasses(text=0.5, scale=0.25, strength=0.8, gain=0.7, handed=1.0),
    among=NewClasses(text=0.25, scale=0.5, strength=0.6, handed=3.0),
    offset=0.75,
)


def random_middle(backbone, names, seed: int = 0, depth: int | None = None, among: float = 0.0) -> Middle:
    """What a head reads half way up."""
    draw, tower = torch.Generator().manual_seed(seed), backbone.vision
    solution = torch.randn(len(names), tower.middle_width, generator=draw), torch.randn(len(names), generator=draw)
    return Middle.of(tower.middle if depth is None else depth, solution, 2.0, among=among)


def gaussian_head(backbone, names, seed: int = 0, shots: int = 5, **numbers) -> Head:
    """A head of Gaussians round random shots, that has something to say about new classes."""
    draw = torch.Generator().manual_seed(seed)
    labels_N = torch.arange(shots * len(names)) % len(names)
    means_CE = torch.randn(len(names), backbone.embed_dim, generator=draw)
    x_NE = means_CE[labels_N] + 2 * torch.randn(len(labels_N), backbone.embed_dim, generator=draw)
    found = Discriminant.of(torch.nn.functional.normalize(x_NE, dim=-1), labels_N, len(names))
    return make_head(tuple(names), found.kept(), **{"strength": 0.5, "scale": 0.1, "unseen": UNSEEN} | numbers)


def check_early_stops(asked: Answering, images: Tensor) -> None:
    """Images that stop after step 0 or 1 have what is answered there."""
    every_KBC = asked.image_trajectory(asked.method.encode_image_steps(images), asked.middle(images))
    torch.testing.assert_close(every_KBC[-1], asked.logits(images), atol=1e-4, rtol=1e-4)
    leads = every_KBC[0].topk(2).values
    policy = Policy(first=(leads[:, 0] - leads[:, 1]).median().item(), lead=-1e5)
    found = asked.answer(Plan(method=asked.method, steps=4, policy=policy), images)
    assert set(found.steps_B.tolist()) == {0, 1}
    expected = every_KBC[found.steps_B, torch.arange(len(images))]
    torch.testing.assert_close(found.logits_BC, expected, atol=1e-4, rtol=1e-4)
