"""PERL against the paper and against a plain implementation that saves nothing."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from transformers import CLIPModel

import perlclip
from perlclip.backbone.accel import cuda_graphs
from perlclip.backbone.clip import vit_b16_shape
from perlclip.methods.perl import Perl, encode_texts
from perlclip.methods.settings import parse_setting
from perlclip.reference.perl import PlainPerl, PlainPerlVariants
from tests.common import CLOSE, loud, random_pixels

PROMPTS = ["a photo of a cat.", "a photo of a very long named striped animal.", "ox", "a photo of a green tree frog."]


def plain_of(method: Perl, form: type[PlainPerl] = PlainPerl) -> PlainPerl:
    clip = CLIPModel.from_pretrained(method.backbone.name, attn_implementation="eager")
    return form(clip, method.backbone.tokenizer, method)


@pytest.mark.parametrize("modalities", ["both", "vision", "text"])
@pytest.mark.parametrize("depth", [0, 3, 7])
def test_equals_plain_in_logits_loss_and_gradients(any_backbone, modalities, depth):
    method = loud(perlclip.create_method("perl", any_backbone, modalities=modalities, depth=depth, rank=2))
    plain, pixels, labels = plain_of(method), random_pixels(any_backbone), torch.tensor([0, 2, 1])
    state = method.class_state(PROMPTS)

    with torch.no_grad():
        torch.testing.assert_close(method.trajectory(pixels, state), plain.trajectory(pixels, PROMPTS, "{}"), **CLOSE)

    ours, theirs = method.loss(pixels, labels, state), plain.loss(pixels, labels, PROMPTS, "{}")
    torch.testing.assert_close(ours, theirs, **CLOSE)
    gradients = torch.autograd.grad(ours, list(method.parameters()))
    expected = torch.autograd.grad(theirs, list(method.parameters()))
    for got, want in zip(gradients, expected, strict=True):
        error, size = (got - want).abs().max(), want.abs().max()
        assert error <= 1e-5 and error <= 1e-3 * size, "small gradients must agree relative to their size, too"


def test_thoughts_in_the_last_block_only(backbone):
    """J = L - 1: the first refinement block is also the last one, which is read at one row."""
    method = loud(perlclip.create_method("perl", backbone, depth=backbone.vision.depth - 1))
    plain, pixels = plain_of(method), random_pixels(backbone)
    with torch.no_grad():
        got = method.trajectory(pixels, method.class_state(PROMPTS))
        torch.testing.assert_close(got, plain.trajectory(pixels, PROMPTS, "{}"), **CLOSE)


def test_no_steps_is_zero_shot_clip(any_backbone):
    method = perlclip.create_method("perl", any_backbone, steps=0)
    zero_shot = perlclip.create_method("zero-shot", any_backbone)
    pixels = random_pixels(any_backbone)
    with torch.no_grad():
        got = method.logits(pixels, method.class_state(PROMPTS))
        torch.testing.assert_close(got, zero_shot.logits(pixels, zero_shot.class_state(PROMPTS)), **CLOSE)


def test_trajectory_begins_at_zero_shot_and_ends_at_the_logits(backbone):
    method, pixels = loud(perlclip.create_method("perl", backbone)), random_pixels(backbone)
    zero_shot = perlclip.create_method("zero-shot", backbone)
    with torch.no_grad():
        state = method.class_state(PROMPTS)
        steps = method.trajectory(pixels, state)
        assert steps.shape == (5, 3, len(PROMPTS))
        torch.testing.assert_close(steps[0], zero_shot.logits(pixels, zero_shot.class_state(PROMPTS)), **CLOSE)
        torch.testing.assert_close(steps[-1], method.logits(pixels, state), **CLOSE)
        assert all((steps[k] - steps[k - 1]).abs().max() > 1e-3 for k in range(1, 5))


def test_every_step_re_includes_all_earlier_thoughts(backbone, monkeypatch):
    """z_k enters step k behind z_1..z_(k-1), which are the same tensors as before."""
    method = loud(perlclip.create_method("perl", backbone, modalities="vision"))
    seen = []
    pool = perlclip.backbone.Refinement.pool

    def spy(self, front_BkD=None, later=None):
        if front_BkD is not None:
            seen.append(front_BkD.detach().clone())
        return pool(self, front_BkD, later)

    monkeypatch.setattr(perlclip.backbone.Refinement, "pool", spy)
    with torch.no_grad():
        method.encode_image(random_pixels(backbone))
    assert [front.shape[1] for front in seen] == [1, 2, 3, 4]
    for earlier, later in pairwise(seen):
        assert torch.equal(later[:, :-1], earlier)
        assert not torch.allclose(later[:, -1], later[:, -2], atol=1e-4)


def test_readout_is_always_the_original_row(backbone, monkeypatch):
    """CLS and EOS move back by one with every thought; the row read moves with them."""
    method, read = perlclip.create_method("perl", backbone), perlclip.backbone.Tower.read
    rows = []

    def spy(self, x_BND, rows_B, context=None):
        rows.append(rows_B.tolist())
        return read(self, x_BND, rows_B, context)

    monkeypatch.setattr(perlclip.backbone.Tower, "read", spy)
    with torch.no_grad():
        method.logits(random_pixels(backbone, 2), method.class_state(["ox", "a cat"]))
    eos = [3, 5]  # one token a letter: SOS o x EOS
    assert sorted(rows) == sorted([[0 + k, 0 + k] for k in range(5)] + [[eos[0] + k, eos[1] + k] for k in range(5)])


def test_gradient_never_reaches_the_frozen_part(backbone):
    method = perlclip.create_method("perl", backbone)
    before = {
        side: {k: v.clone() for k, v in getattr(backbone, side).state_dict().items()} for side in ("vision", "text")
    }
    state = method.class_state(PROMPTS)
    assert not any(h0_BD.requires_grad for _, h0_BD in state.frozen.groups)
    assert not any(refinement.x_BND.requires_grad for refinement, _ in state.frozen.groups)
    method.loss(random_pixels(backbone), torch.tensor([0, 1, 2]), state).backward()
    for side, weights in before.items():
        for name, p in getattr(backbone, side).named_parameters():
            assert p.grad is None and not p.requires_grad
            assert torch.equal(p, weights[name])


def test_pixels_can_ask_for_gradients(backbone):
    method, pixels = perlclip.create_method("perl", backbone), random_pixels(backbone).requires_grad_()
    method.logits(pixels, method.class_state(PROMPTS)).sum().backward()
    assert pixels.grad is not None and pixels.grad.abs().max() > 0


@pytest.mark.parametrize(("modalities", "count"), [("both", 6402), ("vision", 3841), ("text", 2561)])
def test_parameter_count_on_vit_b16(modalities, count):
    backbone = vit_b16_shape()
    assert (backbone.vision.width, backbone.text.width) == (768, 512)
    assert Perl(backbone, Perl.config_class(modalities=modalities)).num_trainable == count


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        (dict(variant="early"), 6_402),
        (dict(variant="deep"), 6_402),
        (dict(variant="step"), 32_010),
        (dict(variant="layer"), 25_608),
        (dict(variant="layerstep"), 83_226),
        (dict(variant="step", steps=2), 3 * 6_402),
        (dict(variant="layer", depth=(1, 2)), 3 * 6_402),
        (dict(variant="layerstep", modalities="text", steps=1), 4 * 2_561),
        (dict(rank=4), 2 * 768 + 768 * 4 * 2 + 4 + 768 + 2 * 512 + 512 * 4 * 2 + 4 + 512),
    ],
)
def test_parameter_count_of_variants_on_vit_b16(settings, count):
    assert Perl(vit_b16_shape(), Perl.config_class(**settings)).num_trainable == count


VARIANTS = [
    dict(variant="early"),
    dict(variant="deep", depth=[3, 7, 9]),
    dict(variant="step"),
    dict(variant="layer", depth=[5, 6, 9], steps=2),
    dict(variant="layerstep", depth=[0, 4], steps=3),
    dict(variant="layerstep", depth=[9], modalities="vision"),
    dict(vision_depth=9, text_depth=2),
    dict(variant="layer", depth=[5, 6, 9], vision_depth=[3, 8], steps=2),
]


@pytest.mark.parametrize("settings", VARIANTS)
def test_variants_equal_the_plain_form(any_backbone, settings):
    """Thoughts of every depth and step where they belong; depth 9 is the last block of one of these towers."""
    method = loud(perlclip.create_method("perl", any_backbone, **settings))
    plain, pixels, labels = plain_of(method, PlainPerlVariants), random_pixels(any_backbone), torch.tensor([0, 2, 1])
    state = method.class_state(PROMPTS)
    with torch.no_grad():
        torch.testing.assert_close(method.trajectory(pixels, state), plain.trajectory(pixels, PROMPTS, "{}"), **CLOSE)
        padded = method.encode_text_steps(replace(state, replay=True))
        torch.testing.assert_close(padded, method.encode_text_steps(state), **CLOSE)
    assert bool(any_backbone.recorded) == ("text" in method.projectors), "as a graph would have it"
    any_backbone.recorded.clear()
    ours, theirs = method.loss(pixels, labels, state), plain.loss(pixels, labels, PROMPTS, "{}")
    parameters = list(method.parameters())
    for got, want in zip(*(torch.autograd.grad(loss, parameters) for loss in (ours, theirs)), strict=True):
        assert (got - want).abs().max() <= max(1e-5, 1e-3 * want.abs().max())
        assert want.abs().max() > 0


def test_a_towers_own_depth_is_kept_in_files_and_read_from_words(backbone, tmp_path):
    config = Perl.config_class
    assert parse_setting(config, "vision_depth", "9") == 9 and parse_setting(config, "text_depth", "3,7") == (3, 7)
    assert config(vision_depth=7) == config() and "vision_depth" not in config(text_depth=3).as_dict()
    method = loud(perlclip.create_method("perl", backbone, vision_depth=9, text_depth=(3, 7)))
    perlclip.save_adapter(method, tmp_path, class_names=PROMPTS, template="{}")
    again = perlclip.load_adapter(tmp_path, backbone=backbone).method
    assert again.config == method.config and again.config.depths("text") == (3, 7)
    pixels = random_pixels(backbone)
    with torch.no_grad():
        logits = [one.logits(pixels, one.class_state(PROMPTS)) for one in (method, again)]
    assert torch.equal(*logits)


def test_a_variant_brings_its_own_depth(backbone):
    depths = {
        name: perlclip.create_method("perl", backbone, variant=name).config.depth
        for name in ("shared", "early", "deep", "step", "layer", "layerstep")
    }
    assert depths == dict(shared=7, early=0, deep=(3, 7, 11), step=7, layer=(7, 9, 11), layerstep=(7, 9, 11))


def test_projector_is_equation_one(backbone):
    projector = loud(perlclip.create_method("perl", backbone, rank=3)).projectors["text"]
    h = torch.randn(5, backbone.text.width)
    normed = (h - h.mean(-1, keepdim=True)) / (h.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    normed = normed * projector.norm.weight + projector.norm.bias
    inner = normed @ projector.down.weight.T + projector.down.bias
    gelu = 0.5 * inner * (1 + torch.erf(inner / 2**0.5))
    want = gelu @ projector.up.weight.T + projector.up.bias
    torch.testing.assert_close(projector(h), want, **CLOSE)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(rank=0), "rank must be at least 1"),
        (dict(steps=-1), "steps must be in 0..1000"),
        (dict(depth=12), "depth must be below the tower's 12 blocks"),
        (dict(vision_depth=12), "depth must be below the tower's 12 blocks"),
        (dict(text_depth=[7, 3]), "text_depth must be 0 or more, several depths rising"),
        (dict(modalities="txt"), "did you mean 'text'"),
        (dict(anchor=float("nan")), "anchor must be at least 0.0"),
        (dict(ranks=2), "did you mean 'rank'"),
        (dict(steps="four"), "'steps' must be of type int, got 'four'"),
        (dict(depth="7"), "'depth' must be of type int or list of int"),
        (dict(depth=[7, 3]), "several depths rising"),
        (dict(depth=[]), "must be of type int or list of int"),
        (dict(variant="layr"), "did you mean 'layer'"),
        (dict(anchor=float("inf")), "and finite"),
    ],
)
def test_bad_settings_are_named(backbone, settings, words):
    with pytest.raises(perlclip.PerlclipError, match=words):
        perlclip.create_method("perl", backbone, **settings)


def test_class_texts_in_groups_by_length_equal_those_in_one(backbone, monkeypatch):
    names = [f"x{i}" for i in range(30)] + [f"an animal with quite a long name, number {i}" for i in range(3)] + ["y"]
    method = perlclip.create_method("perl", backbone)
    grouped = method.class_state(names)
    assert len(grouped.frozen.groups) == 2
    monkeypatch.setattr("perlclip.backbone.tokens.ROWS_A_GROUP", {False: 10**6, True: 10**6})
    together = method.class_state(names)
    assert len(together.frozen.groups) == 1
    rows = sum(refinement.x_BND[..., 0].numel() for refinement, _ in grouped.frozen.groups)
    assert rows < 0.5 * together.frozen.groups[0][0].x_BND[..., 0].numel()
    a, b = (method.encode_text(state) for state in (grouped, together))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    parameters = list(method.projectors["text"].parameters())
    for x, y in zip(*(torch.autograd.grad(t[:, 0].sum(), parameters) for t in (a, b)), strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["tiny", "tiny-siglip"])
def test_what_one_class_list_had_recorded_encodes_those_of_other_perls(name, tape, monkeypatch):
    """Without a card: what stands in for a graph runs the work, into one place as a graph does."""
    backbone = replace(perlclip.load_backbone(name))
    a, b = (loud(perlclip.create_method("perl", backbone, steps=2, depth=3)) for _ in range(2))
    torch.nn.init.normal_(b.projectors["text"].up.weight)
    shape = a.shape("text")
    backbone.text_graphs((shape, 2), partial(encode_texts, backbone.text, shape, 2)).compiled.on = True
    lists = [PROMPTS, PROMPTS[:3], ["a photo of a dog."], [f"a photo of the number {i}." for i in range(17)]]
    states = [(method, method.class_state(prompts)) for prompts in lists for method in (a, b)]
    with torch.no_grad():
        got = [method.encode_text_steps(replace(state, replay=True)) for method, state in states]
        want = [method.encode_text_steps(state) for method, state in states]
    torch.testing.assert_close(got, want, **CLOSE)
    assert (got[0] - got[1]).abs().max() > 0.01, "two PERLs"
    sizes = {"tiny": 3, "tiny-siglip": 2}[name]  # 16 texts of two lengths, or of the only one, and 32
    assert (tape.made, tape.played) == (sizes, len(states) - sizes)
    assert not replace(backbone).recorded, "graphs are a backbone's own"
    monkeypatch.setattr(cuda_graphs, "_recording", [1])
    with torch.no_grad():
        a.encode_text_steps(replace(states[0][1], replay=True))
    assert tape.played == len(states) - sizes, "no graph is replayed while another is recorded"
    monkeypatch.undo()
    for steps in range(1, 9):
        backbone.text_graphs((shape, steps), partial(encode_texts, backbone.text, shape, steps))
    assert [steps for _, steps in backbone.recorded] == [5, 6, 7, 8], "the last few kinds"
