"""The towers against `transformers.CLIPModel`, and each shortcut against the plain form."""

import pytest
import torch
from transformers import CLIPModel

from perlclip.backbone import Refinement
from perlclip.backbone.tokens import length_groups
from perlclip.backbone.tower import Rows
from tests.common import CLOSE, padded

CLASS_LISTS = {"alike": ["cat", "dog"], "mixed": ["ox", "a photo of a bird of paradise.", "eel"], "single": ["a"]}


@pytest.fixture
def clip(any_backbone) -> CLIPModel:
    return CLIPModel.from_pretrained(any_backbone.name).eval()


def features(output) -> torch.Tensor:
    return torch.nn.functional.normalize(output.pooler_output if hasattr(output, "pooler_output") else output, dim=-1)


@pytest.mark.parametrize("names", CLASS_LISTS.values(), ids=CLASS_LISTS)
def test_text_equals_clip_model(any_backbone, clip, names):
    ids, eos = padded(any_backbone, names)
    tokens, text = any_backbone.tokenize(names), any_backbone.text
    assert tokens.ids_BN.shape[1] == eos.max() + 1 < any_backbone.context_length
    with torch.no_grad():
        got = text.project(text.pool(text.embed(tokens.ids_BN), tokens.eos_B))
        want = features(clip.get_text_features(input_ids=ids, attention_mask=torch.ones_like(ids)))
    torch.testing.assert_close(got, want, **CLOSE)


def test_image_equals_clip_model(any_backbone, clip):
    size, vision = any_backbone.preprocess.size, any_backbone.vision
    pixels = torch.randn(3, 3, size, size)
    with torch.no_grad():
        x = vision.embed(pixels)
        got = vision.project(vision.pool(x, torch.zeros(3, dtype=torch.long)))
        torch.testing.assert_close(got, features(clip.get_image_features(pixel_values=pixels)), **CLOSE)


def test_every_intermediate_state_equals_clip_model(any_backbone, clip):
    ids, _ = padded(any_backbone, ["a photo of a cat."])
    with torch.no_grad():
        hidden = clip.text_model(input_ids=ids, output_hidden_states=True).hidden_states
        x = any_backbone.text.embed(ids)
        for i in range(any_backbone.text.depth):
            torch.testing.assert_close(x, hidden[i], **CLOSE)
            x = any_backbone.text.block(i, x)


@pytest.mark.parametrize("side", ["vision", "text"])
def test_reading_one_row_equals_the_whole_block(any_backbone, side):
    tower = getattr(any_backbone, side)
    x_BND = torch.randn(4, 9, tower.width)
    rows_B = torch.tensor([0, 8, 3, 5])
    with torch.no_grad():
        want = tower.block(tower.depth - 1, x_BND)[torch.arange(4), rows_B]
        torch.testing.assert_close(tower.read(x_BND, rows_B), want, **CLOSE)


@pytest.mark.parametrize("side", ["vision", "text"])
@pytest.mark.parametrize("thoughts", [0, 1, 3])
def test_refinement_equals_running_the_longer_sequence(any_backbone, side, thoughts):
    tower, start = getattr(any_backbone, side), 5
    x_BND, front_BkD = torch.randn(4, 9, tower.width), torch.randn(4, thoughts, tower.width)
    rows_B = torch.tensor([0, 8, 3, 5])
    with torch.no_grad():
        refinement = Refinement(tower, x_BND, rows_B, start)
        got = refinement.pool(front_BkD if thoughts else None)
        longer = torch.cat([front_BkD, x_BND], 1)
        want = tower.run(longer, start, tower.depth)[torch.arange(4), rows_B + thoughts]
        torch.testing.assert_close(got, want, **CLOSE)
        assert refinement.qkv_BME is not None, "the frozen sequence's Q, K, V are kept"


def test_frozen_sequence_is_projected_once(backbone, monkeypatch):
    """K+1 passes: Q, K, V of the frozen rows once, then only of the thoughts."""
    tower, counted = backbone.vision, []
    first = tower.blocks[7]
    original = first.qkv.forward
    monkeypatch.setattr(first.qkv, "forward", lambda y: (counted.append(y.shape[1]), original(y))[1])
    refinement = Refinement(tower, torch.randn(2, 9, tower.width), torch.zeros(2, dtype=torch.long), 7)
    for k in range(5):
        refinement.pool(torch.randn(2, k, tower.width) if k else None)
    assert counted == [9, 1, 2, 3, 4]


def test_what_follows_eos_cannot_matter(any_backbone):
    text, tokens = any_backbone.text, any_backbone.tokenize(["ox", "a photo of a bird."])
    other = tokens.ids_BN.clone()
    other[0, tokens.eos_B[0] + 1 :] = 7
    with torch.no_grad():
        a = text.pool(text.embed(tokens.ids_BN), tokens.eos_B)
        b = text.pool(text.embed(other), tokens.eos_B)
    torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(clip_folder, backbone, dtype):
    import perlclip

    half = perlclip.load_backbone(str(clip_folder), dtype=dtype)
    assert half.dtype == getattr(torch, dtype) and half.fingerprint == backbone.fingerprint
    pixels = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        embeddings = [perlclip.create_method("perl", b).encode_image(pixels) for b in (backbone, half)]
    assert embeddings[1].dtype == torch.float32
    assert (embeddings[0] * embeddings[1]).sum(-1).min() > 0.99


@pytest.mark.parametrize("side", ["vision", "text"])
def test_reading_behind_context_rows(any_backbone, side):
    """One context for all, one for each, one for each half: the rows behind it as if it stood before them."""
    tower = getattr(any_backbone, side)
    x_BND = torch.randn(4, 9, tower.width)
    rows_BR = torch.tensor([[0, 3], [8, 0], [3, 3], [5, 1]])
    for contexts in (1, 2, 4):
        context_AkD = torch.randn(contexts, 3, tower.width)
        longer = torch.cat([context_AkD.repeat_interleave(4 // contexts, 0), x_BND], 1)
        with torch.no_grad():
            want = tower.block(tower.depth - 1, longer)[torch.arange(4)[:, None], rows_BR + 3]
            torch.testing.assert_close(tower.read(x_BND, rows_BR, context_AkD), want, **CLOSE)


@pytest.mark.parametrize("names", CLASS_LISTS.values(), ids=CLASS_LISTS)
def test_texts_that_begin_alike_equal_clip_model(any_backbone, clip, names):
    ids, eos = padded(any_backbone, [f"a photo of a {name}." for name in names])
    want = features(clip.get_text_features(input_ids=ids, attention_mask=torch.ones_like(ids)))
    with torch.no_grad():
        torch.testing.assert_close(any_backbone.encode_text([f"a photo of a {name}." for name in names]), want, **CLOSE)
        text = any_backbone.shared_text([f"a photo of a {name}." for name in names])
    assert len(text.prefix_1PD) == 1 and text.prefix_1PD.shape[1] + int(text.eos_C.max()) == int(eos.max())


def test_shared_prefix_and_own_rows_in_one_go(any_backbone):
    tower = any_backbone.text
    for prefixes in (1, 2):
        prefix_APD, own_BND = torch.randn(prefixes, 5, tower.width), torch.randn(4, 3, tower.width)
        with torch.no_grad():
            front, behind = tower.both(2, prefix_APD, own_BND)
            torch.testing.assert_close(front, tower.block(2, prefix_APD), **CLOSE)
            longer = torch.cat([prefix_APD.repeat_interleave(4 // prefixes, 0), own_BND], 1)
            torch.testing.assert_close(behind, tower.block(2, longer)[:, 5:], **CLOSE)


@pytest.mark.parametrize("side", ["vision", "text"])
@pytest.mark.parametrize("start", [5, -1])
def test_room_before_the_frozen_rows_changes_nothing(any_backbone, side, start):
    tower = getattr(any_backbone, side)
    start = start % tower.depth
    x_BND, front_BkD = torch.randn(4, 9, tower.width), torch.randn(4, 3, tower.width)
    rows_B, chosen_b = torch.tensor([0, 8, 3, 5]), torch.tensor([3, 1])
    with torch.no_grad():
        plain, roomy = (Refinement(tower, x_BND, rows_B, start, room) for room in (0, 2))
        for k in (0, 2, 1, 3, 2):  # more than there is room for, and less than before
            front = front_BkD[:, :k] if k else None
            torch.testing.assert_close(roomy.pool(front), plain.pool(front), **CLOSE)
        part = roomy.of(chosen_b)
        torch.testing.assert_close(part.pool(front_BkD[chosen_b]), plain.pool(front_BkD)[chosen_b], **CLOSE)
        assert torch.equal(roomy.x_BND, x_BND), "the frozen sequence is as it was"


def test_rows_stay_in_float32_in_half_precision_on_the_cpu(clip_folder):
    import perlclip

    half = perlclip.load_backbone(str(clip_folder), dtype="bfloat16")
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        x_BND = half.vision.run(half.vision.embed(pixels), 0, 3)
        assert x_BND.dtype == torch.float32
        qkv_BNE = half.vision.blocks[3].project_qkv(Rows(x_BND))
    assert qkv_BNE.dtype == torch.bfloat16, "but products are in half"


def test_length_groups_save_rows():
    lengths = [8] * 300 + [30] * 2 + [9] * 200
    groups = length_groups(lengths, price=512)
    assert sorted(i for group in groups for i in group) == list(range(502))
    assert [max(lengths[i] for i in group) for group in groups] == [9, 30]
    assert length_groups([5], 1) == [[0]]
    assert length_groups([4, 9, 4], 6) == [[0, 2], [1]] and length_groups([4, 9, 4], 16) == [[0, 1, 2]]
    assert length_groups([3, 40] * 200, 512) == [list(range(0, 400, 2)), list(range(1, 400, 2))]
