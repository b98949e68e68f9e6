"""Images that are there twice, by content, by look, and in groups; and images of no class."""

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

import perlclip
from perlclip.labels.duplicates import duplicate_groups
from perlclip.labels.looking import look
from perlclip.labels.outliers import outliers, strangeness


def picture(seed: int) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((64, 64), Image.Resampling.BICUBIC)


def test_scaled_and_mirrored_copies_are_one_group(tiny):
    first = picture(0)
    images = [first, picture(1), first.resize((160, 160)), picture(2), first.transpose(Image.Transpose.FLIP_LEFT_RIGHT)]
    labelled = perlclip.ImageSet(images=images, labels=[0] * 5, class_names=("toy",))
    seen = look(perlclip.create_method("zero-shot", tiny), labelled, progress=False)
    assert duplicate_groups(seen.frozen_NE, seen.small_N3SS) == [(0, 2, 4)]


def test_one_look_alike_is_not_enough():
    """The same embedding with another picture, or the same picture with another embedding: two images."""
    make = torch.Generator().manual_seed(0)
    v_NE = F.normalize(torch.randn(4, 32, generator=make), dim=-1)
    small_N3SS = torch.randn(4, 3, 16, 16, generator=make)
    v_NE[1], small_N3SS[3] = v_NE[0], small_N3SS[2]
    assert duplicate_groups(v_NE, small_N3SS) == []
    v_NE[3] = v_NE[2]
    assert duplicate_groups(v_NE, small_N3SS) == [(2, 3)]


def test_the_same_file_is_the_same_whatever_it_shows():
    """Flat pictures show nothing to compare; by their contents, 0 = 2 and, over them, the group of 1."""
    v_NE, flat = F.normalize(torch.ones(4, 8), dim=-1), torch.zeros(4, 3, 16, 16)
    assert duplicate_groups(v_NE, flat) == []
    assert duplicate_groups(v_NE, flat, [b"a", b"b", b"a", b"b"]) == [(0, 2), (1, 3)]


def test_an_outlier_is_one_that_neither_images_nor_texts_vouch_for():
    make = torch.Generator().manual_seed(0)
    vouched_N, nearest_N = 0.6 + 0.1 * torch.randn(200, generator=make), 0.3 + 0.02 * torch.randn(200, generator=make)
    vouched_N[7], nearest_N[7] = 0.2, 0.22
    strange_N = strangeness(vouched_N, nearest_N)
    assert outliers(strange_N)[0] == 7 and len(outliers(strange_N)) <= 4
    assert outliers(strangeness(torch.ones(50), torch.ones(50))) == []
