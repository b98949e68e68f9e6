"""Pixels as the backbone's own processor makes them, whatever its settings."""

import random
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessorPil

import perlclip

SETTINGS = {
    "bilinear": dict(resample=Image.Resampling.BILINEAR),
    "square": dict(size={"height": 32, "width": 32}, do_center_crop=False),
    "larger": dict(size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32}),
    "statistics": dict(image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.3, 0.4]),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_test_view_is_the_processors(clip_folder, tmp_path, settings):
    """`resample` and square sizes used to be ignored: pixels off by up to 1.74."""
    folder = shutil.copytree(clip_folder, tmp_path / "clip")
    usual = dict(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = CLIPImageProcessorPil(**{**usual, **settings})
    processor.save_pretrained(folder)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 81, 3), dtype=np.uint8))
    loaded = perlclip.load_backbone(str(folder)).preprocess
    want = processor(image, return_tensors="pt")["pixel_values"][0]
    assert torch.equal(loaded.test_view(image), want) and want.shape == (3, 32, 32)
    assert loaded.resample == settings.get("resample", Image.Resampling.BICUBIC)


def test_training_views_are_on_the_same_scale(clip_folder, tmp_path):
    folder = shutil.copytree(clip_folder, tmp_path / "clip")
    usual = dict(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPImageProcessorPil(**usual, do_normalize=False).save_pretrained(folder)
    views, grey = perlclip.load_backbone(str(folder)).preprocess, Image.new("RGB", (40, 40), (51, 51, 51))
    assert views.test_view(grey).unique().tolist() == pytest.approx([0.2])
    assert views.train_view(grey, random.Random(0), (0.5, 1.0)).unique().tolist() == pytest.approx([0.2])
    CLIPImageProcessorPil(size={"shortest_edge": 32}, do_center_crop=False).save_pretrained(folder)
    with pytest.raises(perlclip.PerlclipError, match="makes images of any shape but the image tower takes 32x32"):
        perlclip.load_backbone(str(folder))


def test_a_processor_of_another_size_is_refused(clip_folder, tmp_path):
    folder = shutil.copytree(clip_folder, tmp_path / "clip")
    CLIPImageProcessorPil(size={"shortest_edge": 48}, crop_size={"height": 48, "width": 48}).save_pretrained(folder)
    with pytest.raises(perlclip.PerlclipError, match="makes images of 48x48 but the image tower takes 32x32 pixels"):
        perlclip.load_backbone(str(folder))


def test_gray_and_palette_images_are_seen_in_their_colours(tiny):
    colour = Image.effect_noise((90, 70), 60).convert("RGB")
    for mode in ("L", "P", "RGBA"):
        image = colour.convert(mode)
        assert torch.equal(tiny.preprocess.test_view(image), tiny.preprocess.test_view(image.convert("RGB")))
