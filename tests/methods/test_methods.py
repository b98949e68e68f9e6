"""The contract, as a matrix: every registered method on every architecture. A new method is a new row by itself."""

import random
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

import perlclip
from perlclip.backbone.clip import vit_b16_shape
from perlclip.data.toybox import load_toybox
from perlclip.methods import method_class
from perlclip.text.classes import Classes, are_novel
from perlclip.training.optimizer import build_optimizer

CLASSES = Classes(("cat", "striped horse", "ox"), "a photo of a {}.")
OTHER = Classes(("tree", "house"), "a drawing of a {}.")
METHODS = perlclip.list_methods()
TRAINED = [
    name for name in METHODS if perlclip.method_class(name).recipes and not perlclip.method_class(name).head_alone
]
LABELS = torch.tensor([0, 1, 2, 0])


# What needs a class token, which not every family has.
REFUSING = {"siglip": {"mmrl", "mmrl++"}}


def create(name, backbone):
    """The method on this backbone; a family that its definition does not carry over to is no case."""
    if name in REFUSING.get(backbone.family, ()):
        pytest.skip("refuses, as a test of its own says")
    return perlclip.create_method(name, backbone)


@pytest.fixture(params=METHODS)
def method(request, every_backbone):
    return create(request.param, every_backbone)


def test_what_does_not_carry_over_says_why(family_backbone):
    for family, names in REFUSING.items():
        for name in names:
            with pytest.raises(perlclip.PerlclipError, match=r"beside the class token.*but a pooling head$"):
                perlclip.create_method(name, family_backbone(family))


@pytest.fixture
def pixels(every_backbone):
    size = every_backbone.preprocess.size
    return torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(0))


def fast(name):
    return perlclip.method_class(name).recipes["fast"]


def shaken(method, size=0.05):
    torch.manual_seed(1)
    with torch.no_grad():
        for p in method.parameters():
            p.add_(torch.randn_like(p) * size)
    return method


def test_embeddings_are_unit_vectors_and_logits_their_scaled_cosine(method, pixels):
    """Of one image and novel classes; CoCoOp's classes depend on the image, and are checked against its plain form."""
    state = method.class_state(CLASSES, novel=True)
    with torch.no_grad():
        v, t = method.encode_image(pixels), method.encode_text(state)
        assert v.shape == (4, method.backbone.embed_dim) and t.shape == (3, method.backbone.embed_dim)
        for embedding in (v, t):
            torch.testing.assert_close(embedding.norm(dim=-1), torch.ones(len(embedding)))
        if method.name != "cocoop":
            torch.testing.assert_close(method.logits(pixels, state), method.backbone.logit_scale * v @ t.T)
        assert method.trajectory(pixels, state)[-1].allclose(method.logits(pixels, state), atol=1e-4)


def test_parameters_are_the_methods_own(method):
    own = {id(p) for p in method.parameters()}
    frozen = {id(p) for tower in (method.backbone.vision, method.backbone.text) for p in tower.parameters()}
    assert not own & frozen
    assert method.num_trainable == sum(p.numel() for p in method.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", TRAINED)
def test_every_parameter_gets_a_gradient_and_nothing_else_does(name, every_backbone, pixels):
    method = shaken(create(name, every_backbone))
    for _ in range(2):  # CoCoOp has a single unit here, which may be off; with all signs turned it is on
        method.loss(pixels, LABELS, method.class_state(CLASSES)).backward()
        with torch.no_grad():
            for p in method.parameters():
                p.neg_()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in method.parameters())
    assert all(p.grad is None for tower in (every_backbone.vision, every_backbone.text) for p in tower.parameters())


@pytest.mark.parametrize("name", TRAINED)
def test_the_frozen_weights_are_untouched_by_a_step(name, every_backbone, pixels):
    method = create(name, every_backbone)
    towers = {"vision": every_backbone.vision, "text": every_backbone.text}
    before = {side: {k: v.clone() for k, v in tower.state_dict().items()} for side, tower in towers.items()}
    optimizer = build_optimizer(fast(name), method.parameters())
    method.loss(pixels, LABELS, method.class_state(CLASSES)).backward()
    optimizer.step()
    for side, tower in towers.items():
        assert all(torch.equal(value, before[side][key]) for key, value in tower.state_dict().items())


@pytest.mark.parametrize("name", TRAINED)
def test_one_seed_one_method(name, every_backbone, pixels):
    create(name, every_backbone)
    first, second, other = (perlclip.create_method(name, every_backbone, seed=seed) for seed in (1, 1, 2))
    losses = [m.loss(pixels, LABELS, m.class_state(CLASSES)) for m in (first, second)]
    assert torch.equal(*losses)
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True)]
    assert not all(same) or name in ("coop", "kgcoop"), "these two start as words, whatever the seed"


@pytest.mark.parametrize("name", TRAINED)
def test_the_loss_falls_on_a_small_task(name, tiny):
    """Four classes of toys in negative colours, the method's own optimiser and rate."""
    pool = load_toybox("negative_toys").train.base()
    few = pool.select([i for i, label in enumerate(pool.labels) if label < 4][:32])
    shots = replace(few, class_names=few.class_names[:4])
    method = perlclip.create_method(name, tiny)
    recipe = replace(fast(name), epochs=6, batch_size=8, crop_scale=(0.9, 1.0))
    if name == "perl":
        recipe = replace(recipe, lr=1e-3)
    losses = perlclip.fit(method, shots, recipe=recipe, lens="plain", thresholds=False, head=False).losses
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4]), losses


def test_class_lists_can_be_swapped(method, pixels):
    shaken(method)
    with torch.no_grad():
        method.logits(pixels, method.class_state(CLASSES))
        swapped = method.logits(pixels, method.class_state(OTHER))
        fresh = shaken(perlclip.create_method(method.name, method.backbone))
        torch.testing.assert_close(swapped, fresh.logits(pixels, fresh.class_state(OTHER)))


def test_the_result_does_not_depend_on_the_batch(method, pixels):
    state = method.class_state(CLASSES)
    with torch.no_grad():
        whole = method.logits(pixels, state)
        parts = torch.cat([method.logits(pixels[i : i + 1], state) for i in range(4)])
    torch.testing.assert_close(whole, parts, atol=1e-4, rtol=1e-4)


def test_a_class_does_not_depend_on_its_neighbours(method):
    """Prompts are cut after the longest EOS of the list; a longer neighbour must not change a shorter prompt."""
    with torch.no_grad():
        alone = method.encode_text(method.class_state(Classes(("ox",))))
        beside = method.encode_text(method.class_state(Classes(("ox", "very long name"))))[:1]
    torch.testing.assert_close(alone, beside, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_save_and_load_give_the_same_answers(name, every_backbone, pixels, tmp_path):
    method = shaken(create(name, every_backbone))
    perlclip.save_adapter(method, tmp_path / "a", class_names=["cat", "horse"], template="a {}.")
    loaded = perlclip.load_adapter(tmp_path / "a").method
    with torch.no_grad():
        want = method.logits(pixels, method.class_state(CLASSES))
        assert torch.equal(loaded.logits(pixels, loaded.class_state(CLASSES)), want)


HALVES = {"bfloat16": 100, "float16": 25}  # images to answer: a CPU takes ten times as long for those of the latter


@pytest.fixture(scope="module")
def halves() -> dict[str, perlclip.Backbone]:
    return {dtype: perlclip.load_backbone("tiny", device="cpu", dtype=dtype) for dtype in HALVES}


@pytest.mark.parametrize("name", METHODS)
def test_half_precision_is_close(name, tiny, halves):
    """On the trained tiny CLIP, where closeness means something: the same answers on nearly all images."""
    test = load_toybox("faint_toys").test
    some = test.select(random.Random(0).sample(range(len(test)), 100))
    full = perlclip.evaluate(perlclip.create_method(name, tiny), some).predictions_KB[-1]
    for dtype, count in HALVES.items():
        method = perlclip.create_method(name, halves[dtype])
        rough = perlclip.evaluate(method, some.select(range(count))).predictions_KB[-1]
        assert (full[:count] == rough).double().mean().item() >= 0.97, dtype


@pytest.mark.parametrize("name", TRAINED)
def test_half_precision_trains(name, tiny, halves):
    """Towers in half precision, the method's own weights in float32: nearly the same first loss."""
    shots = load_toybox("negative_toys").train.base().select(range(8))
    recipe = replace(fast(name), crop_scale=(0.9, 1.0))
    methods = [perlclip.create_method(name, b) for b in (tiny, *halves.values())]
    full, *rough = (perlclip.fit(m, shots, recipe=recipe, thresholds=False, head=False).losses for m in methods)
    assert all(p.dtype == torch.float32 for method in methods for p in method.parameters())
    assert [losses[0] for losses in rough] == pytest.approx([full[0]] * len(rough), rel=0.1, abs=0.1)


def test_class_texts_are_encoded_once_per_evaluation(every_backbone, pixels, monkeypatch):
    """By every method whose texts do not depend on the image; again after any change of a parameter."""
    for name in METHODS:
        if name == "cocoop" or name in REFUSING.get(every_backbone.family, ()):
            continue
        method, calls = shaken(create(name, every_backbone)), []
        original = method.encode_text_steps

        def counted(state, original=original, calls=calls):
            calls.append(1)
            return original(state)

        monkeypatch.setattr(method, "encode_text_steps", counted)
        state = method.class_state(CLASSES)
        with torch.no_grad():
            before = [method.trajectory(pixels, state) for _ in range(3)][-1]
            assert len(calls) == 1, name
            shaken(method)
            after = method.trajectory(pixels, state)
        if name in TRAINED:
            assert len(calls) == 2 and not torch.equal(before, after), name


COUNTS = {
    "zero-shot": 0,
    "ridge": 0,
    "gaussian": 0,
    "perl": 6_402,
    "coop": 2_048,
    "cocoop": 35_360,
    "kgcoop": 2_048,
    "maple": 3_555_072,
    "promptsrc": 46_080,
    "provp": 147_456,
    "tcp": 331_904,
    "mma": 674_560,
    "mmrl": 4_992_256,
    "mmrl++": 813_312,
}


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_parameters_on_vit_b16(name, count):
    cls = method_class(name)
    assert cls(vit_b16_shape(), cls.config_class()).num_trainable == count


@pytest.mark.parametrize(
    ("name", "settings", "count"),
    [
        ("coop", dict(tokens=16, init=""), 8_192),
        ("provp", dict(tokens=50), 460_800),
        ("maple", dict(depth=3), 1_185_024),
        ("promptsrc", dict(depth=3), 15_360),
        ("mma", dict(start=8), 337_280),
        ("mmrl", dict(dim=2048), 18_762_496),
    ],
)
def test_parameters_of_other_settings_on_vit_b16(name, settings, count):
    cls = method_class(name)
    assert cls(vit_b16_shape(), cls.config_class(**settings)).num_trainable == count


def test_names():
    assert perlclip.list_methods("p*") == ["perl", "promptsrc", "provp"]
    assert perlclip.list_methods() == list(COUNTS)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("tcp", dict(layer=12), "layer must be below the text tower's 12 blocks"),
        ("maple", dict(depth=13), "depth must be at most the tower's 12 blocks"),
        ("mma", dict(start=12), "start must be below"),
        ("mmrl++", dict(start=12), "mmrl\\+\\+: start must be below"),
        ("provp", dict(alpha=1.5), "alpha must be in 0.0..1.0"),
        ("coop", dict(tokens=99), "has 9 tokens; 99 are needed"),
        ("promptsrc", dict(templates=["a {}", "no name"]), "must contain one {}"),
        ("promptsrc", dict(templates="a {}"), "must be of type list of str"),
        ("zero-shot", dict(ensemble=1), "must be of type bool"),
        ("mmrl", dict(dim=True), "must be of type int"),
    ],
)
def test_bad_settings_are_named(backbone, name, settings, words):
    with pytest.raises(perlclip.PerlclipError, match=words):
        perlclip.create_method(name, backbone, **settings)


def test_a_sentence_without_room_for_the_learned_words_is_refused(backbone):
    method = perlclip.create_method("maple", backbone, template="")
    with pytest.raises(perlclip.PerlclipError, match="0 tokens; 2 are needed"):
        method.class_state(Classes(("banded",), "{} texture."))


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("fused", [False, True])
def test_kept_texts_do_not_outlive_a_step(backbone, optimizer, fused):
    """Also a fused optimiser's, which PyTorch's counters do not see; nor another config or autocast."""
    method = shaken(perlclip.create_method("mmrl++", backbone))
    pixels, state = torch.randn(4, 3, 32, 32), method.class_state(CLASSES)
    stepper = optimizer(method.parameters(), lr=0.1, fused=fused)
    with torch.no_grad():
        method.logits(pixels, state)
    method.loss(pixels, LABELS, state).backward()
    stepper.step()
    with torch.no_grad():
        assert torch.equal(method.class_embeddings(state), method.encode_text(state))
        method.config = replace(method.config, beta=0.1)
        assert torch.equal(method.class_embeddings(state), method.encode_text(state))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            method.class_embeddings(state)
        assert torch.equal(method.class_embeddings(state), method.encode_text(state))


def test_kept_texts_outlive_no_way_of_training(backbone):
    """Own loops, whatever the order of steps and looks, and parameters that are put in another's place."""
    method = shaken(perlclip.create_method("coop", backbone))
    pixels, state = torch.randn(4, 3, 32, 32), method.class_state(CLASSES)
    fused = torch.optim.SGD(method.parameters(), lr=0.1, fused=True)

    @torch.no_grad()
    def check():
        for _ in range(2):
            assert torch.equal(method.class_embeddings(state), method.encode_text(state))

    for look in (False, True):
        check()
        method.similarity(torch.ones(1, 24), method.encode_text(state)).sum().backward()
        if look:
            check()
        fused.step()
        check()
        fused.zero_grad()
        check()
    method.context = torch.nn.Parameter(method.context.detach() * 2)
    check()
    method.load_state_dict({"context": method.context.detach() * 2}, assign=True)
    check()
    calls, encode = [], method.encode_text
    method.encode_text = lambda state: (calls.append(1), encode(state))[1]
    method.logits(pixels, state)  # with gradients on, as is torch's default, but nothing comes of it
    check()
    assert len(calls) == 1 + 2, "kept meanwhile"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_stay_in_float32(backbone, dtype):
    with pytest.raises(perlclip.PerlclipError, match="stay in float32"):
        perlclip.create_method("coop", backbone).to(dtype)


@pytest.mark.parametrize("name", ["kgcoop", "tcp", "mmrl", "mmrl++", "promptsrc", "perl"])
def test_a_state_first_used_in_inference_mode_can_be_trained_with(name, tiny, monkeypatch):
    monkeypatch.setattr("perlclip.backbone.tokens.ROWS_A_GROUP", {False: 0, True: 0})  # texts in groups by length
    method = perlclip.create_method(name, tiny)
    pixels, state = torch.randn(4, 3, 64, 64), method.class_state(CLASSES)
    with torch.inference_mode():
        method.loss(pixels, LABELS, state)
    method.loss(pixels, LABELS, state).backward()


def test_frozen_texts_first_needed_under_autocast_are_those_made_without(tiny):
    method, pixels = perlclip.create_method("perl", tiny), torch.randn(2, 3, 64, 64)
    early, late = (method.class_state(CLASSES) for _ in range(2))
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            method.logits(pixels, early)
        assert torch.equal(method.logits(pixels, early), method.logits(pixels, late))


def test_spelling_does_not_make_a_class_novel():
    assert not are_novel(["green_grass", "Blue"], ["blue", "green grass", "red"])
    assert are_novel(["green"], ["green grass"])


def test_cocoop_answers_in_float32_under_autocast(tiny):
    method, pixels = perlclip.create_method("cocoop", tiny), torch.randn(4, 3, 64, 64)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert method.logits(pixels, method.class_state(CLASSES)).dtype == torch.float32


def test_a_copy_shares_the_frozen_backbone(tiny):
    method = perlclip.create_method("coop", tiny)
    assert deepcopy(method).backbone is tiny and deepcopy(method).context is not method.context
