"""Products of 8 bits: how near they are, who makes them, and where they are refused."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import perlclip
from perlclip import PerlclipError
from perlclip.backbone.accel.eight import FLOAT8, INT8, LARGEST, Linear8, Rows8, multiply, rounded, rounded_between
from perlclip.backbone.accel.processor import FrozenLinear
from perlclip.backbone.base import require_format
from tests.common import random_pixels


@pytest.mark.parametrize(
    ("form", "round_rows", "near"),
    [
        (INT8, rounded_between, 0.012),
        (INT8, partial(rounded, form=INT8), 0.015),
        (FLOAT8, partial(rounded, form=FLOAT8), 0.04),
    ],
)
def test_rows_and_products_are_near(form, round_rows, near):
    torch.manual_seed(0)
    linear = nn.Linear(96, 48).requires_grad_(False)
    eight = Linear8(linear, form)
    x = torch.randn(3, 7, 96) * torch.logspace(-3, 3, 7)[:, None]  # each row by its own scale
    x[0, 0] = 0
    rows = round_rows(x)
    assert rows.values.dtype == form and rows.shape == x.shape
    assert ((rows.wide() - x).norm(dim=-1) <= near * x.norm(dim=-1)).all()
    found, wanted = multiply(rows, eight), linear(x)
    assert ((found - wanted).norm(dim=-1) <= 2 * near * (wanted - linear.bias).norm(dim=-1) + 1e-6).all()
    exact = F.linear(rows.wide(), eight.weight8.wide(), linear.bias)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


def test_a_row_of_one_sign_has_all_its_steps():
    x = torch.rand(5, 256) + torch.tensor([0.0, 3, -1, -9, 0])[:, None]  # above 0, far above, around, far below
    rows = rounded_between(x)
    span = torch.maximum(x.amax(-1), torch.zeros(5)) - torch.minimum(x.amin(-1), torch.zeros(5))
    assert ((rows.wide() - x).abs().amax(-1) <= 0.51 * span / 255).all()
    assert rounded_between(torch.zeros(2, 4)).wide().eq(0).all(), "and 0 is 0"


def test_no_output_is_above_the_bound():
    linear = Linear8(nn.Linear(64, 256).requires_grad_(False), FLOAT8)
    worst = linear.weight8.wide()[linear.weight8.wide().norm(dim=-1).argmax()]  # the row that comes nearest
    x = torch.stack([worst, -worst, torch.randn(64)])
    by_weight, by_bias = linear.bound
    assert (multiply(rounded(x, FLOAT8), linear).abs().amax(-1) <= x.norm(dim=-1) * by_weight + by_bias).all()


def test_columns_whose_largest_number_is_known_need_no_scale(tiny):
    """Attention's rows: no mean of values is above what the norm's length and the weights allow, however it is fed."""
    block = tiny.vision.blocks[2]
    most_D = block._largest_values()
    D = len(most_D)
    wv_DD = block.qkv.weight[2 * D :] * block.norm1.weight
    x = torch.cat([wv_DD - wv_DD.mean(1, keepdim=True), torch.randn(9, D)])  # rows that reach furthest into a column
    values = block.qkv(block.norm1(torch.cat([x, -x])))[:, 2 * D :]
    assert (values.abs() <= most_D * 1.0001).all() and (values.abs().amax(0) > most_D / 2).any()
    linear = Linear8(block.out, FLOAT8, most_D)
    rows = Rows8((values * linear.into_K).to(FLOAT8), torch.ones(len(values)))
    assert rows.values.float().abs().max() < LARGEST[FLOAT8]
    found, wanted = multiply(rows, linear), block.out(values)
    assert ((found - wanted).norm(dim=-1) <= 0.08 * (wanted - block.out.bias).norm(dim=-1)).all()


@pytest.fixture(scope="module")
def eight():
    return perlclip.load_backbone("tiny", dtype="int8")


def test_int8_answers_as_float32_does(tiny, eight):
    assert (eight.dtype, eight.dtype_name, tiny.dtype_name) == (torch.int8, "int8", "float32")
    assert eight.fingerprint == tiny.fingerprint
    kinds = [[type(getattr(block, name)) for name in ("qkv", "out", "fc1", "fc2")] for block in eight.vision.blocks]
    assert kinds[:-1] == [[Linear8] * 3 + [FrozenLinear]] * 11
    assert kinds[-1] == [FrozenLinear] * 4, "the last block is read at one row"
    assert not any(isinstance(module, Linear8) for module in eight.text.modules())
    pixels = random_pixels(tiny, 3)
    with torch.no_grad():
        cosines = F.cosine_similarity(tiny.encode_image(pixels), eight.encode_image(pixels))
    assert cosines.min() > 0.995
    assert torch.equal(eight.to("cpu").encode_image(pixels), eight.encode_image(pixels))


def test_training_does_not_round(eight):
    block = eight.vision.blocks[3]
    plain = nn.Linear(block.fc1.in_features, block.fc1.out_features, dtype=torch.bfloat16)
    plain.weight, plain.bias = block.fc1.weight, block.fc1.bias
    x = torch.randn(2, block.fc1.in_features, dtype=torch.bfloat16, requires_grad=True)
    assert torch.equal(block.fc1(x), plain(x))
    with torch.no_grad():
        assert not torch.equal(block.fc1(x), plain(x))


def test_formats_are_for_their_devices():
    with pytest.raises(PerlclipError, match="'float8' needs an NVIDIA card from Hopper on"):
        perlclip.load_backbone("tiny", device="cpu", dtype="float8")
    with pytest.raises(PerlclipError, match="'int8' is for the CPU, not cuda"):
        require_format(INT8, torch.device("cuda"))
