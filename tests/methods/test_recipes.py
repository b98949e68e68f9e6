"""The recipes against the published numbers, and the averaging of weights over epochs."""

import os
import signal
from dataclasses import replace

import pytest
import torch

import perlclip
from perlclip import Recipe
from perlclip.methods.registry import default_recipe, find_recipe, method_class
from perlclip.text.classes import Classes
from perlclip.training.loop import Interrupted, _resolve
from perlclip.training.optimizer import build_optimizer
from tests.training.test_train import same, train_set, weights  # noqa: F401 (a fixture)

RATES = {
    ("maple", "original"): [1e-5, 3.5e-3, 3.166e-3, 2.291e-3, 1.209e-3],
    ("maple", "original-cross"): [1e-5, 2.6e-3],
    ("mma", "original"): [1.5e-3, 1.357e-3, 9.818e-4, 5.182e-4, 1.432e-4],
    ("mmrl", "original"): [1e-5, 1e-3, 9.755e-4, 9.045e-4, 7.939e-4, 6.545e-4, 5e-4, 3.455e-4, 2.061e-4, 9.549e-5],
    ("mmrl++", "original-cross"): [1e-3],
}
LAST = {
    ("cocoop", "original"): 1.91e-4,
    ("tcp", "original"): 7.89e-6,
    ("tcp", "original-cross"): 3.14e-5,
    ("kgcoop", "original"): 1.97e-6,
    ("coop", "original"): 4.93e-7,
    ("promptsrc", "original"): 6.118e-5,
}


def recipe(*where, **more):
    return find_recipe(*where, **more)[0]


@pytest.mark.parametrize(("method", "name"), RATES)
def test_rates_of_every_epoch(method, name):
    chosen = recipe(method, name)
    got = [chosen.rate(epoch) for epoch in range(chosen.epochs)]
    assert got == pytest.approx(RATES[method, name], rel=1e-3)


@pytest.mark.parametrize(("method", "name"), LAST)
def test_the_last_rate_is_not_zero(method, name):
    chosen = recipe(method, name)
    assert chosen.rate(0) == 1e-5 and chosen.rate(1) == chosen.lr
    assert chosen.rate(chosen.epochs - 1) == pytest.approx(LAST[method, name], rel=2e-3)


def test_few_shots_have_the_authors_epochs():
    name, shots = "original-few-shot", (1, 2, 4, 8, 16)
    for method in ("coop", "provp"):
        assert [recipe(method, name, shots=n).epochs for n in shots] == [50, 100, 100, 200, 200]
        assert recipe(method, name).epochs == 200
    assert [recipe("coop", name, dataset="imagenet", shots=n).epochs for n in shots] == [50] * 5
    weights = [find_recipe("provp", name, shots=n)[1].get("weight", 1.0) for n in shots]
    assert weights == [0, 0, 0, 1, 1]
    assert recipe("provp", "original", shots=1).epochs == 100


def test_fit_trains_by_the_number_of_shots(train_set):  # noqa: F811
    tiny = perlclip.load_backbone("tiny")
    few = replace(train_set, shots=2)
    made = perlclip.create_method("provp", tiny, recipe="original-few-shot")
    with pytest.raises(perlclip.PerlclipError, match="shots=2 goes with a recipe"):
        perlclip.create_method("provp", tiny, shots=2)
    name, found = _resolve(made, None, "", few)
    assert (name, found.epochs, made.config.weight, made.config.tokens) == ("original-few-shot", 100, 0.0, 50)
    assert perlclip.create_method("provp", tiny, recipe="original-few-shot", shots=2).config == made.config


def test_on_other_sets_tcp_and_provp_say_what_their_authors_say_there(tiny):
    """Trained on ImageNet, tested on DTD: its texts; a set that is none of the fifteen has its own template."""
    dtd = Classes(("banded", "dotted"), "{} texture.", dataset="dtd")
    cars = replace(dtd, template="a photo of a {}.", dataset="stanford_cars")
    own = {"recipe": "original", "dataset": "imagenet"}
    provp = perlclip.create_method("provp", tiny, **own)
    tcp = perlclip.create_method("tcp", tiny, **own | {"recipe": "original-cross"})

    def text(template, classes=dtd):
        return tiny.encode_text(classes.prompts(template))

    with torch.no_grad():
        assert torch.equal(provp.class_state(dtd).t_CE, text("a texture of {}."))
        assert torch.equal(provp.class_state(replace(dtd, dataset="")).t_CE, text("{} texture."))
        assert torch.equal(perlclip.create_method("provp", tiny).class_state(dtd).t_CE, text("{} texture."))
        state = tcp.class_state(dtd)
        torch.testing.assert_close(state.t0_CE, text("a photo of a {}, a type of texture."))
        told = perlclip.create_method("tcp", tiny, tail="{}, a type of car")
        assert torch.equal(tcp.encode_text(tcp.class_state(cars)), told.encode_text(told.class_state(cars)))


def test_few_images_are_looked_at_more_often(backbone, tree):
    """By `strong`: as many epochs as 480 batches of four take, ten to forty; a recipe of one's own is left as it is."""
    images = [0, 1, 20, 80, 96, 188, 192, 1000]
    assert [recipe("perl", "strong", images=n).epochs for n in images] == [10, 40, 40, 24, 20, 11, 10, 10]
    assert recipe("perl", "fast", images=1).epochs == recipe("perl", "extended", images=1).epochs - 4 == 1
    few = perlclip.load_images(tree).select(range(0, 24, 8))
    how = {"lens": "plain", "head": False, "thresholds": False, "progress": False}
    for given, epochs in ((None, 40), ("strong", 40), (replace(recipe("perl", "strong"), epochs=3), 3)):
        method = perlclip.create_method("perl", backbone, steps=1, depth=11)
        found = perlclip.fit(method, few, recipe=given, **how)
        assert found.training["recipe"]["epochs"] == epochs == found.steps


def test_imagenet_runs_of_mmrl_have_five_epochs():
    chosen = recipe("mmrl", "original", dataset="imagenet")
    assert chosen.batch_size == 32
    rates = [chosen.rate(epoch) for epoch in range(chosen.epochs)]
    assert rates == pytest.approx([1e-5, 1e-3, 9.045e-4, 6.545e-4, 3.455e-4], rel=1e-3)


def test_everyone_is_fast_in_one_epoch_of_the_same_steps():
    trained = {name: method_class(name).recipes for name in perlclip.list_methods() if method_class(name).recipes}
    for method, named in trained.items():
        fast = named["fast"]
        assert (fast.epochs, fast.batch_size, fast.rate(0)) == (1, 4, fast.lr), method
        assert method in ("perl", "ridge", "gaussian") or (fast.optimizer, fast.lr) == (
            named["original"].optimizer,
            named["original"].lr,
        )
    assert set(trained) | {"zero-shot"} == set(perlclip.list_methods())
    assert {name: default_recipe(name) for name in ("perl", "coop")} == {"perl": "strong", "coop": "original"}


@pytest.mark.parametrize(
    ("method", "name", "dataset", "expected"),
    [
        ("mmrl", "original", "stanford_cars", {"weight": 7.0}),
        ("mmrl", "original", "eurosat", {"weight": 0.01, "dim": 2048}),
        ("mmrl", "fast", "eurosat", {"weight": 0.01}),
        ("mmrl", "original-cross", "imagenet", {"weight": 0.2}),
        ("mmrl++", "original", "food101", {"weight": 1.0, "beta": 0.1}),
        ("mmrl++", "original-cross", "imagenet", {"weight": 0.1, "beta": 0.9}),
        ("maple", "original-cross", "imagenet", {"depth": 3}),
        ("tcp", "fast", "ucf101", {"tail": "person doing {}."}),
        ("perl", "extended", "eurosat", {}),
        ("perl", "strong", "eurosat", {"readout": "mean", "loss_scale": 0.25, "center": 0.75, "loss_center": 0.5}),
    ],
)
def test_settings_of_data_sets(method, name, dataset, expected):
    assert find_recipe(method, name, dataset=dataset)[1] == expected


def test_every_rule_is_about_settings_and_recipes_that_there_are():
    for name in perlclip.list_methods():
        cls = method_class(name)
        for rule in cls.rules:
            cls.config_class(**rule.settings)
            assert set(rule.recipes) <= set(cls.recipes) | {"original-few-shot"}, (name, rule)
            for recipe_name in rule.recipes or cls.recipes:
                replace(cls.recipes.get(recipe_name, cls.recipes["fast"]), **rule.changes)
    sets = [{rule.dataset for rule in method_class(name).rules} - {""} for name in ("mmrl", "mmrl++")]
    assert sets[0] == sets[1] and len(sets[0]) == 11


def test_a_recipe_is_trained_with_the_settings_it_wants(backbone, train_set):  # noqa: F811
    """Python's `fit(recipe="original")` used to train MMRL with 0.5 / 512 on EuroSAT, silently."""
    for where in (dict(recipe="original", dataset="eurosat"), dict(recipe="original-cross")):
        method = perlclip.create_method("mmrl", backbone)
        with pytest.raises(perlclip.PerlclipError, match=r"wants weight=.*create_method\('mmrl', backbone, recipe="):
            perlclip.fit(method, train_set, **where)
    made = perlclip.create_method("mmrl", backbone, recipe="original", dataset="eurosat", dim=16)
    assert (made.config.weight, made.config.dim) == (0.01, 16), "what is said expressly counts"
    made = perlclip.create_method("maple", backbone, recipe="original-cross")
    result = perlclip.fit(made, train_set)
    assert result.training["recipe_name"] == "original-cross" and result.settings["recipe"]["lr"] == 0.0026


def test_settings_of_another_recipe_are_not_trained_with(backbone, train_set):  # noqa: F811
    for name, made, wanted in (
        ("coop", dict(recipe="original-few-shot"), "original"),
        ("mmrl", dict(recipe="original", dataset="eurosat"), "fast"),
    ):
        method = perlclip.create_method(name, backbone, **made)
        with pytest.raises(perlclip.PerlclipError, match=f"recipe '{wanted}' wants"):
            perlclip.fit(method, train_set, recipe=wanted, dataset="")
    for unknown, words in (
        (dict(recipe="original", dataset="eurosta"), "did you mean 'eurosat'"),
        (dict(dataset="eurosat"), "goes with a recipe"),
    ):
        with pytest.raises(perlclip.PerlclipError, match=words):
            perlclip.create_method("mmrl", backbone, **unknown)


def test_settings_that_no_parameter_depends_on_are_made_by_fit(backbone, train_set):  # noqa: F811
    """Five lines of Python name no recipe; what they train is `strong` all the same."""
    few = train_set.select(range(2))

    def settings(recipe=None, **given):
        method = perlclip.create_method("perl", backbone, steps=1, **given)
        result = perlclip.fit(method, few, recipe=recipe, head=False, thresholds=False, progress=False)
        assert result.settings["config"] == method.config.as_dict()
        return method.config.readout, method.config.loss_scale

    assert settings() == ("mean", 0.25)
    assert settings(readout="last") == ("last", 0.25), "what is said expressly counts"
    assert settings("fast") == ("last", 1.0)
    made = perlclip.create_method("perl", backbone, steps=1, recipe="strong")
    perlclip.fit(made, few, recipe="fast", head=False, thresholds=False, progress=False)
    assert (made.config.readout, made.config.loss_scale) == ("last", 1.0)


def test_a_folder_named_as_a_data_set_changes_nothing(backbone, train_set):  # noqa: F811
    """It used to raise ProVP's rate from 0.1 to 5."""
    method = perlclip.create_method("provp", backbone, tokens=1)
    result = perlclip.fit(method, replace(train_set.select(range(2)), name="imagenet"), recipe="original")
    assert result.settings["recipe"]["lr"] == 0.1


def test_the_embedded_backbone_has_wider_crops():
    assert recipe("coop", "fast", "tiny").crop_scale == (0.5, 1.0) and recipe("coop", "fast").crop_scale == (0.08, 1.0)
    assert recipe("perl", "extended", "tiny").lr == 3e-3


def test_adam_takes_its_eps():
    optimizer = build_optimizer(recipe("tcp", "original"), [torch.zeros(1, requires_grad=True)])
    assert isinstance(optimizer, torch.optim.Adam) and optimizer.defaults["eps"] == 1e-3
    assert not optimizer.defaults.get("decoupled_weight_decay")


# ---- the average over epochs ----


def test_shares_are_the_published_ones():
    peak = {e: recipe("promptsrc", "original").share(e - 1) for e in range(1, 21)}
    assert [peak[e] for e in range(12, 19)] == pytest.approx(
        [0.0044, 0.054, 0.242, 0.399, 0.242, 0.054, 0.0044], rel=0.02
    )
    cross = recipe("promptsrc", "original-cross")
    assert [cross.share(e) for e in (0, 5, 19)] == pytest.approx([0.055, 0.063, 0.024], rel=0.02)
    few = recipe("promptsrc", "original-few-shot", dataset="dtd")
    assert [few.share(e) for e in (44, 49)] == pytest.approx([0.092, 0.056], rel=0.02)
    for chosen in (recipe("promptsrc", "original"), cross, few, Recipe(average=(500, 1), epochs=3)):
        assert sum(chosen.share(e) for e in range(chosen.epochs)) == pytest.approx(1)
    assert Recipe(average=(15, 1)).share(0) == 1, "of one epoch, that one"
    with pytest.raises(perlclip.PerlclipError, match="must be positive"):
        Recipe(average=(1, 0))


AVERAGED = Recipe(lr=1e-2, epochs=3, average=(2, 1))


def test_the_result_is_the_average_of_the_epochs_ends(backbone, train_set):  # noqa: F811
    ends = []
    for epochs in (1, 2, 3):
        method = perlclip.create_method("perl", backbone, steps=1)
        perlclip.fit(method, train_set, recipe=replace(AVERAGED, epochs=epochs, average=None))
        ends.append(weights(method))
    method = perlclip.create_method("perl", backbone, steps=1)
    perlclip.fit(method, train_set, recipe=AVERAGED)
    for name, got in weights(method).items():
        want = sum(AVERAGED.share(e) * end[name] for e, end in enumerate(ends))
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_interrupted_average_is_taken_up_again(clip_folder, train_set, tmp_path, monkeypatch, dtype):  # noqa: F811
    backbone = perlclip.load_backbone(str(clip_folder), dtype=dtype)
    whole = perlclip.create_method("perl", backbone, steps=1)
    perlclip.fit(whole, train_set, recipe=AVERAGED)
    method, path, calls = perlclip.create_method("perl", backbone, steps=1), tmp_path / "c.safetensors", []
    loss = method.loss

    def stop(*inputs):
        calls.append(1)
        if len(calls) == 5:  # in the second of three epochs
            os.kill(os.getpid(), signal.SIGINT)
        return loss(*inputs)

    monkeypatch.setattr(method, "loss", stop)
    with pytest.raises(Interrupted):
        perlclip.fit(method, train_set, recipe=AVERAGED, checkpoint=path)
    for _ in range(2):  # a finished training can be resumed, too
        fresh = perlclip.create_method("perl", backbone, seed=9, steps=1)
        perlclip.fit(fresh, train_set, recipe=AVERAGED, checkpoint=path, resume=True)
        assert same(weights(fresh), weights(whole))


# ---- the published settings, cell by cell ----

DEFAULTS = {
    "coop": dict(tokens=4, init="a photo of a"),
    "cocoop": dict(tokens=4, init="a photo of a", reduction=16),
    "kgcoop": dict(tokens=4, init="a photo of a", weight=8.0, reference=""),
    "maple": dict(tokens=2, depth=9, template="a photo of a {}."),
    "promptsrc": dict(tokens=4, depth=9, text_weight=25.0, image_weight=10.0, template="a photo of a {}."),
    "provp": dict(tokens=16, alpha=0.01, weight=1.0, template=""),
    "tcp": dict(tokens=4, init="", hidden=128, layer=8, weight=8.0),
    "mma": dict(rank=32, start=4, scale=0.001, template="a photo of a {}."),
    "mmrl": dict(tokens=5, dim=512, start=5, alpha=0.7, weight=0.5),
    "mmrl++": dict(tokens=5, dim=512, start=5, alpha=0.7, weight=0.2, beta=0.9, rank=4, head_rank=64),
    "perl": dict(rank=1, steps=4, depth=7, anchor=1.0, modalities="both", variant="shared", init="normal"),
}


@pytest.mark.parametrize(("name", "expected"), DEFAULTS.items())
def test_default_settings(name, expected):
    config = method_class(name).config_class()
    assert {key: getattr(config, key) for key in expected} == expected


# method, recipe: optimiser, rate, decay, epochs, batch, warm-up epochs, smallest crop
PUBLISHED = {
    ("coop", "original"): ("sgd", 0.002, 5e-4, 200, 32, 1, 0.08),
    ("coop", "original-cross"): ("sgd", 0.002, 5e-4, 50, 32, 1, 0.08),
    ("cocoop", "original"): ("sgd", 0.002, 5e-4, 10, 1, 1, 0.08),
    ("kgcoop", "original"): ("sgd", 0.002, 5e-4, 100, 128, 1, 0.08),
    ("kgcoop", "original-few-shot"): ("sgd", 0.002, 5e-4, 100, 32, 1, 0.08),
    ("maple", "original"): ("sgd", 0.0035, 5e-4, 5, 4, 1, 0.08),
    ("maple", "original-cross"): ("sgd", 0.0026, 5e-4, 2, 4, 1, 0.08),
    ("promptsrc", "original"): ("sgd", 0.0025, 5e-4, 20, 4, 1, 0.08),
    ("promptsrc", "original-few-shot"): ("sgd", 0.0025, 5e-4, 50, 4, 1, 0.08),
    ("provp", "original"): ("sgd", 0.1, 1e-3, 100, 32, 1, 0.08),
    ("provp", "original-few-shot"): ("sgd", 0.1, 5e-4, 200, 32, 1, 0.08),
    ("tcp", "original"): ("adam", 0.002, 5e-4, 50, 32, 1, 0.08),
    ("tcp", "original-cross"): ("adam", 0.002, 5e-4, 25, 32, 1, 0.08),
    ("mma", "original"): ("sgd", 0.0015, 5e-4, 5, 16, 0, 0.08),
    ("mmrl", "original"): ("adamw", 1e-3, 5e-4, 10, 4, 1, 0.5),
    ("mmrl", "original-few-shot"): ("adamw", 1e-3, 5e-4, 50, 32, 1, 0.5),
    ("mmrl++", "original"): ("adamw", 1e-3, 5e-4, 10, 4, 1, 0.5),
    ("mmrl++", "original-few-shot"): ("adamw", 2e-3, 5e-4, 100, 32, 1, 0.5),
    ("mmrl++", "original-cross"): ("adamw", 1e-3, 5e-4, 1, 32, 0, 0.5),
}


@pytest.mark.parametrize(("method", "name"), PUBLISHED)
def test_published_recipes(method, name):
    r = recipe(method, name)
    got = (r.optimizer, r.lr, r.weight_decay, r.epochs, r.batch_size, r.warmup_epochs, r.crop_scale[0])
    assert got == PUBLISHED[method, name] and r.drop_last and r.schedule == "cosine"
    group = build_optimizer(r, [torch.zeros(1, requires_grad=True)]).defaults
    assert group.get("momentum", 0.9) == 0.9 and not group.get("nesterov")


def test_changes_for_single_data_sets():
    def fields(method, name, dataset, *keys):
        chosen = recipe(method, name, dataset=dataset)
        return tuple(getattr(chosen, key) for key in keys)

    assert fields("coop", "original", "imagenet", "epochs") == (50,)
    assert fields("tcp", "original", "sun397", "epochs") == (25,) == fields("tcp", "original", "imagenet", "epochs")
    assert fields("provp", "original", "imagenet", "lr", "weight_decay") == (5.0, 5e-3)
    assert fields("mma", "original", "imagenet", "batch_size") == (128,)
    assert fields("mmrl++", "original-few-shot", "imagenet", "epochs", "lr") == (5, 1e-3)

    def settings(method, sets):
        return {name: find_recipe(method, "fast", dataset=name)[1] for name in sets}

    weights_of = dict(
        stanford_cars=7, fgvc_aircraft=6, sun397=6, dtd=6, food101=5, oxford_flowers=4, ucf101=3, imagenet=0.5,
        caltech101=0.5, oxford_pets=0.2, eurosat=0.01,
    )  # fmt: skip
    assert settings("mmrl", weights_of) == {name: {"weight": weight} for name, weight in weights_of.items()}
    both = dict(
        imagenet=(0.9, 0.2), fgvc_aircraft=(0.9, 2), ucf101=(0.9, 3), dtd=(0.9, 7), oxford_pets=(0.7, 0.01),
        stanford_cars=(0.7, 6), caltech101=(0.6, 3), sun397=(0.5, 3), oxford_flowers=(0.4, 7), eurosat=(0.2, 0.01),
        food101=(0.1, 1),
    )  # fmt: skip
    assert settings("mmrl++", both) == {name: {"beta": beta, "weight": w} for name, (beta, w) in both.items()}
    template = "a type of aircraft, a photo of a {}."
    assert settings("provp", ["fgvc_aircraft"]) == {"fgvc_aircraft": {"template": template}}


def test_a_training_that_would_be_all_warm_up_has_none():
    assert replace(recipe("coop", "original"), epochs=1).rate(0) == 0.002


# method: parameter, and the deviation or the bound it starts with on the tiny CLIP (text 96, vision 128, joint 128)
STARTS = {
    ("coop", "context"): ("std", 0.02),
    ("tcp", "context"): ("std", 0.02),
    ("maple", "deep.0"): ("std", 0.02),
    ("promptsrc", "text.1"): ("std", 0.02),
    ("promptsrc", "vision.0"): ("std", 0.02),
    ("mma", "adapters.4.text_down.weight"): ("std", (2 / 32) ** 0.5),
    ("mma", "adapters.4.vision_up.weight"): ("std", (2 / 128) ** 0.5),
    ("mmrl", "space"): ("std", 0.02),
    ("mmrl", "rep_head"): ("std", 128**-0.5),
    ("mmrl++", "vision.left"): ("bound", 0.5),
    ("mmrl++", "rep_left"): ("bound", 0.125),
    ("cocoop", "meta.0.weight"): ("bound", 128**-0.5),
    ("maple", "couple.0.weight"): ("bound", 96**-0.5),
}


@pytest.mark.parametrize(("method", "name"), STARTS)
def test_initial_values(method, name, tiny):
    settings = dict(init="", tokens=16) if method == "coop" else {}
    values = perlclip.create_method(method, tiny, **settings).get_parameter(name).detach()
    kind, size = STARTS[method, name]
    if kind == "std":
        assert values.std().item() == pytest.approx(size, rel=0.15) and abs(values.mean().item()) < 0.2 * size
        assert values.abs().max() > 2 * size, "normal, not uniform"
    else:
        assert 0.9 * size < values.abs().max().item() <= size


def test_words_start_as_words(tiny):
    words = tiny.word_rows("a photo of a", 4)
    for name, parameter, count in (("coop", "context", 4), ("kgcoop", "context", 4), ("maple", "context", 2),
                                   ("promptsrc", "text.0", 4)):  # fmt: skip
        assert torch.equal(perlclip.create_method(name, tiny).get_parameter(parameter), words[:count])
