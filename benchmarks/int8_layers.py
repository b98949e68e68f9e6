"""Which products of an image tower lose what in 8 bits: rounding imitated in torch, on photographs.

    python -m benchmarks.int8_layers --backbone CLIP_FOLDER --images DATA/dtd/test --count 740 --device cuda

The tower is `transformers`' own in float32, one pass (zero-shot), with Linear layers of some kinds or blocks rounded:
weights to -127..127 by column; what comes in by `row`, around zero, or with a row's own least number (`between`), or
all rows of a batch together (`batch`), or 64 numbers of a row (`block`). `smooth` divides every channel that comes in
by a number and multiplies the weights with it, so that no channel is much larger than others: the root of its largest
number by its weights'. `shifted` takes the channel's mean off before, which the bias gives back. Both have seen 32
other photographs, or as many `drawn` pictures. `float8` has weights and rows in e4m3, each row by its largest, in
all blocks but the last; `bfloat16` is the whole model. Printed: how far logits move, how many answers stay, how many
are right.
"""

import argparse
import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import CLIPVisionModelWithProjection

import perlclip
from benchmarks.common import RESULTS, Table
from perlclip.data.images import read_image
from perlclip.text.classes import Classes

ALL = ("qkv", "out", "fc1", "fc2")
KINDS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "out_proj": "out", "fc1": "fc1", "fc2": "fc2"}


def rounded(x: Tensor, dims: tuple[int, ...], levels: float = 127) -> Tensor:
    step = x.abs().amax(dims, keepdim=True).clamp(min=1e-12) / levels
    return (x / step).round() * step


def rounded_between(x: Tensor) -> Tensor:
    """By row, 256 steps from its least to its largest number."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    step = ((high - low) / 255).clamp(min=1e-12)
    return (x / step).round() * step


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda x: rounded(x, (-1,)),
    "batch": lambda x: rounded(x, tuple(range(x.ndim))),
    "between": rounded_between,
    "block": lambda x: rounded(x.unflatten(-1, (-1, 64)), (-1,)).flatten(-2),
    "none": lambda x: x,
}


def rounded_float8(x: Tensor) -> Tensor:
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x / step).to(torch.float8_e4m3fn).to(x.dtype) * step


ROWS["float8"] = rounded_float8
Channels = tuple[Tensor, Tensor]  # of each what is taken off, and what it is divided by


class Rounded(nn.Module):
    """A Linear in imitated whole numbers."""

    def __init__(self, linear: nn.Linear, rows: str, channels: Channels | None, *, weights: bool = True) -> None:
        super().__init__()
        self.shift, self.scale = channels or (torch.zeros_like(linear.weight[0]), torch.ones_like(linear.weight[0]))
        weight = linear.weight * self.scale
        whole = rounded_float8 if rows == "float8" else partial(rounded, dims=(1,))
        self.weight = whole(weight) if weights else weight
        self.bias = linear.bias + linear.weight @ self.shift
        self.rows = ROWS[rows]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.rows((x - self.shift) / self.scale), self.weight, self.bias)


def linears(model: nn.Module) -> list[tuple[str, int, str]]:
    """(name, block, kind) of every Linear in a block."""
    found = []
    for name, module in model.named_modules():
        parts = name.split(".")
        if isinstance(module, nn.Linear) and "layers" in parts:
            found.append((name, int(parts[parts.index("layers") + 1]), KINDS[parts[-1]]))
    return found


def changed(
    model: nn.Module, chosen: Callable[[int, str], bool], rows: str = "row",
    channels: dict[str, Channels] | None = None, **more: bool,
) -> nn.Module:  # fmt: skip
    made = copy.deepcopy(model)
    for name, block, kind in linears(model):
        if chosen(block, kind):
            parent, _, last = name.rpartition(".")
            own = channels[name] if channels else None
            setattr(made.get_submodule(parent), last, Rounded(made.get_submodule(name), rows, own, **more))
    return made


@torch.no_grad()
def channels_of(model: nn.Module, batches: list[Tensor], *, shift: bool, power: float = 0.5) -> dict[str, Channels]:
    """Of every channel that enters a Linear its mean, and its largest number by that of the weights that it meets."""
    seen: dict[str, list[Tensor]] = {name: [] for name, _, _ in linears(model)}

    def note(name: str) -> Callable:
        def hook(_module: nn.Module, given: tuple) -> None:
            x = given[0].flatten(0, -2)
            seen[name].append(torch.stack([x.mean(0), x.amin(0), x.amax(0)]))

        return hook

    hooks = [model.get_submodule(name).register_forward_pre_hook(note(name)) for name in seen]
    for batch in batches:
        model(pixel_values=batch)
    for hook in hooks:
        hook.remove()
    made = {}
    for name, parts in seen.items():
        means, lows, highs = torch.stack(parts, 1)
        mean = means.mean(0) * shift
        most = torch.maximum(highs.amax(0) - mean, mean - lows.amin(0)).clamp(min=1e-5)
        weights = model.get_submodule(name).weight.abs().amax(0).clamp(min=1e-5)
        made[name] = mean, most**power / weights ** (1 - power) if power else torch.ones_like(mean)
    return made


def drawn(count: int, size: int) -> Tensor:
    """Pictures of nothing: noise of all sizes of grain, normalised as photographs are."""
    rng = torch.Generator().manual_seed(1)
    made = torch.zeros(count, 3, size, size)
    for grain in (1, 2, 4, 8, 16, 32):
        noise = torch.randn(count, 3, grain, grain, generator=rng)
        made += nn.functional.interpolate(noise, size=(size, size), mode="bicubic") * grain**-0.5
    return made.clamp(-2, 2)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", required=True, help="a folder of a CLIP")
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--count", type=int, default=740)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--out", type=Path, default=RESULTS / "int8-layers.csv")
    args = parser.parse_args()
    folders = sorted(path for path in args.images.iterdir() if path.is_dir())
    backbone = perlclip.load_backbone(args.backbone, device="cpu")
    zero = perlclip.create_method("zero-shot", backbone)
    names = tuple(path.name for path in folders)
    t_CE = zero.encode_text(zero.class_state(Classes(names, "a photo of a {}."))).to(args.device)
    paths = [path for several in zip(*(sorted(f.glob("*.jpg")) for f in folders), strict=False) for path in several]
    other = [path for folder in folders for path in sorted(folder.glob("*.jpg"))[-1:]][:32]

    def views(some: list[Path]) -> list[Tensor]:
        made = [backbone.preprocess.test_view(read_image(path)) for path in some]
        return [torch.stack(made[i : i + 8]).to(args.device) for i in range(0, len(made), 8)]

    batches = views(paths[: args.count])
    model = CLIPVisionModelWithProjection.from_pretrained(args.backbone).to(args.device).eval()
    last = max(block for _, block, _ in linears(model))

    def logits(made: nn.Module) -> Tensor:
        dtype = next(made.parameters()).dtype
        v = torch.cat([made(pixel_values=batch.to(dtype)).image_embeds.float() for batch in batches])
        return backbone.logit_scale * nn.functional.normalize(v, dim=-1) @ t_CE.T

    wanted = logits(model)
    pictures = {"": views(other), ", drawn": [drawn(32, backbone.preprocess.size).to(args.device)]}
    labels = torch.tensor([names.index(path.parent.name) for path in paths[: args.count]], device=args.device)
    everything: Callable[[int, str], bool] = lambda block, kind: True  # noqa: E731
    tries: dict[str, Callable[[], nn.Module]] = {}
    for rows in [rows for rows in ROWS if rows != "float8"]:
        tries[f"all, by {rows}" if rows != "none" else "weights alone"] = partial(changed, model, everything, rows)
    tries["rows alone"] = partial(changed, model, everything, "row", weights=False)
    for kind in ALL:
        tries[f"between, without {kind}"] = partial(changed, model, lambda _, each, kind=kind: each != kind, "between")
        tries[f"between, {kind} alone"] = partial(changed, model, lambda _, each, kind=kind: each == kind, "between")
    tries["between, fc1 and fc2 alone"] = partial(changed, model, lambda _, kind: kind in ("fc1", "fc2"), "between")
    for several in ({0}, {last}, {0, last}, {0, 1, 2}, {last - 2, last - 1, last}, set(range(last // 2 + 1))):
        tries[f"between, without blocks {sorted(several)}"] = partial(
            changed, model, lambda block, _, some=several: block not in some, "between"
        )
    for which, seen in pictures.items():
        for shift, power in ((False, 0.5), (True, 0.0), (True, 0.5), (True, 0.7), (True, 0.9)):
            what = f"smooth{', shifted' if shift else ''} {power}{which}, between"
            tries[what] = lambda seen=seen, shift=shift, power=power: changed(
                model, everything, "between", channels_of(model, seen, shift=shift, power=power)
            )
    upper: Callable[[int, str], bool] = lambda block, kind: block < last  # noqa: E731
    tries["bfloat16"] = lambda: copy.deepcopy(model).bfloat16()
    tries["float8"] = partial(changed, model, upper, "float8")
    tries["float8, rows alone"] = partial(changed, model, upper, "float8", weights=False)
    for kind in ALL:
        tries[f"float8, {kind} alone"] = partial(
            changed, model, lambda block, each, kind=kind: block < last and each == kind, "float8"
        )
    table = Table(args.out)
    for name, made in {"float32": lambda: model, **tries}.items():
        if args.only and not any(word in name for word in args.only):
            continue
        found = logits(made())
        same = 100 * float((found.argmax(-1) == wanted.argmax(-1)).float().mean())
        difference = (found - wanted).abs()
        table.add({
            "what": name, "photographs": len(found), "same_answers_percent": same,
            "right_percent": 100 * float((found.argmax(-1) == labels).float().mean()),
            "mean_difference_of_logits": f"{difference.mean():.3f}", "largest": f"{difference.max():.2f}",
        })  # fmt: skip


if __name__ == "__main__":
    main()
