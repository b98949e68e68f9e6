"""Lenses: what they do to pictures, and that all who look at images look through them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

import perlclip
from perlclip.backbone import LENSES, PLAIN, FrozenImages
from perlclip.backbone.lens import make_lens
from perlclip.inference.cache import EvalCache
from perlclip.inference.evaluation import evaluate
from perlclip.methods.zero_shot import ZeroShot
from perlclip.training.gradients import Gradients
from tests.common import CLOSE, loud, random_pixels
from tests.test_threads import pictures


def picture(backbone, seed: int = 0) -> Image.Image:
    side = backbone.preprocess.size
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (side, side, 3), np.uint8))


def shown(backbone, lens: str, image: Image.Image) -> np.ndarray:
    pixels = backbone.preprocess.test_view(image)[None]
    return np.asarray(backbone.preprocess.picture(backbone.frozen(pixels, lens).shown[0]), np.float32)


def test_a_negative_has_all_tones_turned_round(backbone):
    """Whatever mean and deviation the backbone's pixels are normalised by."""
    image = picture(backbone)
    assert np.array_equal(shown(backbone, "negative", image), 255 - np.asarray(image, np.float32))


def test_smoothing_takes_the_grain_and_leaves_the_rest(tiny):
    side = tiny.preprocess.size
    flat = np.full((side, side, 3), 128, np.float32)
    grain = flat + np.random.default_rng(0).normal(0, 30, flat.shape)
    noisy = Image.fromarray(grain.clip(0, 255).astype(np.uint8))
    seen = shown(tiny, "smooth", noisy)
    assert seen.std() < 0.35 * np.asarray(noisy, np.float32).std() and abs(seen.mean() - 128) < 1
    half = np.zeros((side, side, 3), np.uint8)
    half[:, side // 2 :] = 200
    seen = shown(tiny, "smooth", Image.fromarray(half))
    assert np.array_equal(seen[:, :-4][:, : side // 2 - 4], half[:, : side // 2 - 4]), "edges of the image, too"
    assert np.array_equal(seen[:, side // 2 + 4 :], half[:, side // 2 + 4 :])


def test_from_nearer_the_middle_is_larger_and_in_its_place(tiny):
    side = tiny.preprocess.size
    y, x = np.mgrid[:side, :side] - (side - 1) / 2
    spot = np.repeat(255 * np.exp(-(x**2 + y**2) / (2 * 6**2))[..., None], 3, 2)
    seen = shown(tiny, "near", Image.fromarray(spot.astype(np.uint8)))[..., 0]
    spread = [float(np.sqrt((image * x**2).sum() / image.sum())) for image in (spot[..., 0], seen)]
    assert spread[1] / spread[0] == pytest.approx(1.3, abs=0.05)
    for axis in (x, y):
        assert abs((seen * axis).sum() / seen.sum()) < 0.3


@pytest.mark.parametrize("lens", LENSES)
@pytest.mark.parametrize("name", ["zero-shot", "perl", "coop", "mma", "maple", "promptsrc", "mmrl"])
def test_a_method_through_a_lens_is_the_method_on_what_it_shows(backbone, name, lens):
    plain, looking = (loud(perlclip.create_method(name, backbone, lens=each)).eval() for each in (PLAIN, lens))
    pixels, prompts = random_pixels(backbone), ["a cat", "a dog", "old boats"]
    with torch.no_grad():
        want = plain.trajectory(backbone.frozen(pixels, lens).shown, plain.class_state(prompts))
        state = looking.class_state(prompts)
        torch.testing.assert_close(looking.trajectory(pixels, state), want, **CLOSE)
        # What somebody else has looked at is looked at again; what was seen through the same lens is not.
        looked_at = backbone.frozen(pixels)
        looked_at.pooled()
        torch.testing.assert_close(looking.trajectory(looked_at, state), want, **CLOSE)
        mine = looking.frozen(looked_at)
        assert looking.frozen(mine) is mine and mine.pixels is pixels
        assert (plain.trajectory(pixels, state) - want).abs().max() > 1e-2
    if looking.num_trainable:
        losses = [
            m.loss(x, torch.tensor([0, 1, 2]), s) for m, x, s in ((plain, mine.shown, state), (looking, pixels, state))
        ]
        torch.testing.assert_close(*losses, **CLOSE)


@pytest.mark.parametrize("lens", LENSES)
def test_pixels_have_gradients_through_a_lens_that_was_made_without(backbone, lens):
    """As `explain` asks for, after somebody who did not."""
    backbone.lenses.clear()
    pixels = random_pixels(backbone, 1).requires_grad_()
    with torch.inference_mode():
        backbone.frozen(pixels, lens).rows(0)
    frozen = backbone.frozen(pixels, lens)
    (gradient,) = torch.autograd.grad(frozen.rows(0).sum(), pixels)
    shown = frozen.shown.detach().requires_grad_()
    (other,) = torch.autograd.grad(backbone.frozen(shown).rows(0).sum(), shown)
    made = backbone.lens(lens)
    back = other if made.map_SS is None else made.map_SS.T @ other @ made.map_SS
    torch.testing.assert_close(gradient, made.gain * back, **CLOSE)


def test_white_is_black_whatever_numbers_stand_for_it(backbone):
    """Processors that do not divide by 255."""
    own = replace(backbone.preprocess, scale=1.0, mean=(127.5,) * 3, std=(127.5,) * 3)
    white = own.pixels(torch.full((1, 3, 4, 4), 255.0))
    torch.testing.assert_close(make_lens("negative", own, 8, white.device)(white), -white)


class Direct(ZeroShot):
    """As methods were written before there were lenses: pixels straight to the backbone."""

    def __init__(self, backbone, config) -> None:
        super().__init__(backbone, config)
        self.shift = torch.nn.Parameter(torch.zeros(backbone.embed_dim))

    def encode_image(self, images):
        return self.backbone.encode_image(images) + self.shift


def test_a_method_that_knows_nothing_of_lenses_looks_through_its_own(backbone):
    """In training, tests and answers alike."""
    method = Direct(backbone, Direct.config_class(lens="negative"))
    method.name = "direct"
    images = pictures(0, 4, ("cat", "dog"))
    state, pixels = method.class_state(images.classes), random_pixels(backbone, 4)
    plain = perlclip.create_method("zero-shot", backbone)
    want = F.cross_entropy(
        plain.logits(-pixels + backbone.lens("negative").offset_311, state), torch.tensor([0, 1, 0, 1])
    )
    loss, *_ = Gradients(method, images.classes)(pixels, torch.tensor([0, 1, 0, 1]))
    torch.testing.assert_close(loss, want.detach(), **CLOSE)
    adapter = perlclip.Adapter(method=method, class_names=images.class_names, template=images.template)
    tested = evaluate(adapter, images, progress=False).probabilities_BC.max(-1).values.tolist()
    assert [one.probability for one in perlclip.Classifier(adapter).predict(images.images)] == pytest.approx(tested)


def test_tests_of_the_same_images_keep_what_each_lens_shows_apart(backbone):
    images, cache = pictures(0, 6, ("cat", "dog")), EvalCache()
    methods = [perlclip.create_method("zero-shot", backbone, lens=lens) for lens in (PLAIN, "negative")]
    alone = [evaluate(method, images, progress=False).probabilities_BC for method in methods]
    for _ in range(2):
        for method, want in zip(methods, alone, strict=True):
            found = evaluate(method, images, progress=False, cache=cache.of("these"))
            assert torch.equal(found.probabilities_BC, want)
    kept = [batch for batches in cache._batches.values() for batch in batches.values()]
    assert {batch.lens_name for batch in kept} == {PLAIN, "negative"}
    assert all(isinstance(batch, FrozenImages) and batch.pooled_BD is not None for batch in kept)


def test_an_adapter_keeps_its_lens_and_what_was_saved_before_has_none(backbone, tmp_path):
    for lens in (PLAIN, "near"):
        method = loud(perlclip.create_method("perl", backbone, lens=lens))
        adapter = perlclip.Adapter(method=method, class_names=("cat", "dog"), template="a {}.")
        perlclip.save_adapter(adapter, tmp_path / lens)
        loaded = perlclip.load_adapter(tmp_path / lens, backbone=backbone)
        assert loaded.method.config.lens == lens and "lens" in loaded.method.given, "`fit` goes on with it"
        assert loaded.info["config"].get("lens") == (None if lens == PLAIN else lens), "as files of earlier versions"
        image = picture(backbone)
        assert perlclip.Classifier(loaded).predict(image).top == perlclip.Classifier(adapter).predict(image).top


def test_an_unknown_lens_is_refused(backbone):
    with pytest.raises(perlclip.PerlclipError, match="perl: unknown lens 'smoth'; did you mean 'smooth'"):
        perlclip.create_method("perl", backbone, lens="smoth")
