"""How much of an evidence map's positive mass falls on the drawn object, at every step, and how much would by chance.

    python scripts/evidence_on_object.py ADAPTER --images 100

on un-shifted scenes of the toybox, for the logit of the true shape among all 24, with an adapter of backbone `tiny`.
"""

import argparse
from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

import perlclip
from perlclip.analysis.evidence import HOWS, evidence_maps
from perlclip.data.toybox import render, sample_scenes
from perlclip.data.toybox.render import paint
from perlclip.data.toybox.world import SHAPES
from perlclip.text.classes import Classes


def share_inside(map_GG: torch.Tensor, inside_HW: torch.Tensor) -> tuple[float, float]:
    """Share of a map's positive mass that falls on a region of the image, and the region's share of the area.

    The region, 0..1 a pixel, is averaged over each patch; by chance the two shares would be the same.
    """
    inside_GG = F.adaptive_avg_pool2d(inside_HW[None, None].to(map_GG.dtype), map_GG.shape[-1])[0, 0]
    positive_GG = map_GG.clamp(min=0)
    total = positive_GG.sum().item()
    return (positive_GG * inside_GG).sum().item() / total if total else 0.0, inside_GG.mean().item()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("adapter")
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--seed", type=int, default=11)
    arguments = parser.parse_args()

    adapter, count = perlclip.load_adapter(arguments.adapter), arguments.images
    scenes = sample_scenes(count, seed=arguments.seed)
    white = replace(scenes, paint_BC=torch.ones(count, 3), texture_B=torch.zeros_like(scenes.texture_B))
    inside_BHW = paint(torch.zeros(count, 3, 64, 64), white)[:, 0]  # a solid white object on black
    view = adapter.method.backbone.preprocess.test_view
    pixels = torch.stack([view(Image.fromarray(x)) for x in render(scenes).permute(0, 2, 3, 1).numpy()])
    state = adapter.method.class_state(Classes.spoken(SHAPES))
    print("how,step,on_object,by_chance,images_above_chance")
    for how in HOWS:
        found = evidence_maps(adapter.method, pixels, scenes.shape_B[:, None], state, how)
        for k, maps in enumerate(found.maps_KBMGG[:, :, 0]):
            shares = np.array([share_inside(one, mask) for one, mask in zip(maps, inside_BHW, strict=True)])
            on_object, by_chance = shares.mean(0)
            print(f"{how},{k},{on_object:.4f},{by_chance:.4f},{(shares[:, 0] > shares[:, 1]).mean():.2f}")


if __name__ == "__main__":
    main()
