"""The drawn world and the toybox suite: reproducible, compositional, and as large as promised."""

import importlib.util
import itertools
import os
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from perlclip.data.sets import DataSet
from perlclip.data.toybox import (
    TASKS,
    WORDS,
    Task,
    caption_words,
    captions,
    checksum,
    is_held_out,
    load_toybox,
    render,
    sample_scenes,
    toybox_names,
)
from perlclip.data.toybox.draws import Draws
from perlclip.data.toybox.render import _root
from perlclip.data.toybox.shifts import CANVAS_SHIFTS, PICTURE_SHIFTS, SCENE_SHIFTS
from perlclip.data.toybox.world import ATTRIBUTES, COLOURS, HELD_OUT_RULES, SHAPES, TEXTURES
from perlclip.errors import PerlclipError

ROOT = Path(__file__).parents[2]
VARIANTS = ("toybox_v2", "toybox_sketch", "toybox_a", "toybox_r")

# SHA-256 of the test splits. They change when a task's row or the renderer does; print them with
#   python -c "from perlclip.data.toybox import *; [print(n, checksum(load_toybox(n).test)) for n in toybox_names()]"
CHECKSUMS = {
    "toybox": "e80655dd80ea52cdd3b5e2234631a2d843e6a19cae99d52a97234f901276a124",
    "cluttered_toys": "a9f0118860a5aaeb1dc61374a40ba185a356ebe5cf03ef27bf5d0026a1dfa736",
    "blurred_shapes": "54b40fcf3673b4a9813e50acff071daad33c90ac99aa411e3451a8868917d4cd",
}


@lru_cache(maxsize=3)
def drawn(name: str) -> DataSet:
    return load_toybox(name)


@pytest.fixture(scope="module")
def pretrain() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pretrain_tiny", ROOT / "scripts" / "pretrain_tiny.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


# ---- random numbers ----


def test_draws_are_uniform_and_independent_of_the_cut() -> None:
    whole = Draws(7, 4000)
    tail = Draws(7, 1000, start=3000)
    for _ in range(3):
        values = whole.uniform(0, 1)
        assert torch.equal(values[3000:], tail.uniform(0, 1))
        assert values.mean().item() == pytest.approx(0.5, abs=0.02)
        assert values.std().item() == pytest.approx(12**-0.5, abs=0.02)
    first, second = whole.uniform(-1, 1), whole.uniform(-1, 1)
    assert abs((first * second).mean().item()) < 0.02
    assert set(whole.below(5).tolist()) == set(range(5))


def test_seeds_differ() -> None:
    assert not torch.equal(Draws(0, 100).bits(), Draws(1, 100).bits())


# ---- pictures ----


def test_pictures_depend_on_seed_and_index_alone() -> None:
    pictures = render(sample_scenes(100, seed=3))
    assert pictures.shape == (100, 3, 64, 64) and pictures.dtype == torch.uint8
    assert torch.equal(pictures[40:], render(sample_scenes(60, seed=3, start=40)))
    assert torch.equal(pictures[[5, 50]], render(sample_scenes(100, seed=3)[torch.tensor([5, 50])]))
    assert not torch.equal(pictures, render(sample_scenes(100, seed=4)))


def test_size_is_an_argument() -> None:
    scenes = sample_scenes(8, seed=0)
    large, small = render(scenes, size=96).float(), render(scenes, size=32).float()
    assert large.shape[-1] == 96
    shrunk = torch.nn.functional.avg_pool2d(large, 3)
    assert (shrunk - small).abs().mean() < 8  # of 255: the same picture at another resolution


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_draws_the_same_pictures() -> None:
    on_gpu = render(sample_scenes(500, seed=3, device="cuda")).cpu()
    assert (on_gpu.int() - render(sample_scenes(500, seed=3)).int()).abs().max() <= 1


def test_square_roots_are_rounded_correctly() -> None:
    """As IEEE 754 has it: the nearest of a root in higher precision."""
    x = torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(_root(x), x.double().sqrt().float())


@pytest.mark.parametrize("other", [{"ATEN_CPU_CAPABILITY": "default"}, {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}])
def test_no_other_kernels_of_the_processor_change_pixels(other: dict[str, str]) -> None:
    """MKL's are others on every maker's processors."""
    code = "from perlclip.data.toybox import *; print(checksum(load_toybox('blurred_shapes').test))"
    environment = {**os.environ, **other, "PYTHONPATH": str(ROOT / "src")}
    plain = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert plain.stdout.strip() == checksum(drawn("blurred_shapes").test)


def _gallery(triples: list[tuple[int, int, int]]) -> torch.Tensor:
    """Pictures, as floats, that differ only in the given attributes: all else is the first scene's."""
    scenes = sample_scenes(len(triples), seed=0, triples_B3=torch.tensor(triples))
    first = torch.zeros(len(triples), dtype=torch.int64)
    shared = ("radius_B", "centre_BC", "turn_B", "canvas_BC", "slope_BC", "density_B", "phase_BC")
    return render(replace(scenes, **{name: getattr(scenes, name)[first] for name in shared})).float()


def _least_difference(pictures: torch.Tensor) -> float:
    """Share of changed values (by more than 40 of 255) between the two most similar pictures."""
    changed = [(a - b).abs().gt(40).float().mean().item() for a, b in itertools.combinations(pictures, 2)]
    return float(min(changed))


def test_shapes_textures_and_colours_look_different() -> None:
    assert _least_difference(_gallery([(s, 10, 0) for s in range(len(SHAPES))])) > 0.02
    assert _least_difference(_gallery([(1, 2, t) for t in range(len(TEXTURES))])) > 0.03
    assert _least_difference(_gallery([(1, c, 0) for c in range(len(COLOURS))])) > 0.05


# ---- composition ----


def test_the_striped_purple_crescent_is_new_in_every_pair() -> None:
    striped, purple, crescent = TEXTURES.index("striped"), list(COLOURS).index("purple"), SHAPES.index("crescent")
    assert is_held_out(texture=striped, shape=crescent)
    assert is_held_out(colour=purple, shape=crescent)
    assert is_held_out(texture=striped, colour=purple)
    assert not is_held_out(shape=crescent)


def test_pretraining_shows_every_pair_but_those_held_out() -> None:
    scenes = sample_scenes(40_000, seed=11)
    for first, second, *_ in HELD_OUT_RULES:
        shown = set(zip(getattr(scenes, f"{first}_B").tolist(), getattr(scenes, f"{second}_B").tolist(), strict=True))
        every = set(itertools.product(range(len(ATTRIBUTES[first])), range(len(ATTRIBUTES[second]))))
        held_out = {pair for pair in every if is_held_out(**dict(zip((first, second), pair, strict=True)))}
        assert held_out and shown == every - held_out


# ---- captions ----


def test_captions_mention_what_is_there() -> None:
    scenes = sample_scenes(500, seed=2)
    words, mentions = caption_words(scenes, seed=5)
    ids = scenes.ids()
    for i, text in enumerate(captions(words)):
        said = text.replace(".", " .").split()
        assert set(said) <= set(WORDS)
        for a, values in enumerate(ATTRIBUTES.values()):
            named = {word for word in said if word in values}
            assert named == ({values[ids[i, a]]} if mentions[i, a] else set())
    assert mentions.any(0).all() and mentions.any(1).all()


def test_captions_depend_on_seed_and_index_alone() -> None:
    scenes = sample_scenes(100, seed=2)
    words, _ = caption_words(scenes, seed=5)
    again, _ = caption_words(scenes[40:], seed=5, start=40)
    assert torch.equal(words[40:], again)


# ---- the suite ----


def test_the_suite_is_a_source_ten_targets_and_four_variants() -> None:
    assert len(toybox_names()) == 15
    assert toybox_names()[0] == "toybox" and toybox_names()[11:] == VARIANTS


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_sizes_classes_and_words(task: Task) -> None:
    data = drawn(task.name)
    classes = len(data.class_names)
    is_source_like = task.name == "toybox" or task.name in VARIANTS
    assert classes == task.seen + task.unseen == len(set(data.class_names))
    assert classes >= 60 if is_source_like else 10 <= classes <= 40
    assert len(data.test) >= 1000
    for split, per_class in ((data.train, 32), (data.val, 8), (data.test, len(data.test) // classes)):
        assert np.bincount(split.labels).tolist() == [per_class] * classes
        pixels = np.stack([np.asarray(image) for image in split.images])
        assert pixels.shape == (per_class * classes, 64, 64, 3) and pixels.dtype == np.uint8
    assert all(set(prompt.replace(".", " .").split()) <= set(WORDS) for prompt in data.test.prompts)
    known = {**SCENE_SHIFTS, **CANVAS_SHIFTS, **PICTURE_SHIFTS}
    assert {name for name, _ in task.shifts} <= set(known)
    assert task.name == "toybox" or task.shifts


def test_variants_have_the_classes_of_the_source() -> None:
    by_name = {task.name: task for task in TASKS}
    source = by_name["toybox"]
    for name in VARIANTS:
        variant = by_name[name]
        assert (variant.names, variant.seen, variant.unseen) == (source.names, source.seen, source.unseen)
    assert drawn("toybox_r").class_names == drawn("toybox").class_names


def test_unseen_classes_are_held_out_combinations() -> None:
    held_out = 0
    for name in drawn("covered_toys").class_names:
        colour, shape = name.split()
        held_out += is_held_out(colour=list(COLOURS).index(colour), shape=SHAPES.index(shape))
    assert held_out == 24


@pytest.mark.parametrize("name", CHECKSUMS)
def test_splits_share_no_picture(name: str) -> None:
    data = drawn(name)
    seen = [{np.asarray(image).tobytes() for image in split.images} for split in (data.train, data.val, data.test)]
    assert not (seen[0] & seen[1] or seen[0] & seen[2] or seen[1] & seen[2])


@pytest.mark.parametrize(("name", "expected"), CHECKSUMS.items())
def test_sets_are_identical_everywhere(name: str, expected: str) -> None:
    assert checksum(drawn(name).test) == expected


def test_another_root_seed_draws_other_pictures_of_the_same_classes() -> None:
    other = load_toybox("blurred_shapes", root_seed=1)
    assert other.class_names == drawn("blurred_shapes").class_names
    assert checksum(other.test) != checksum(drawn("blurred_shapes").test)


def test_unknown_set_is_refused_with_a_suggestion() -> None:
    with pytest.raises(PerlclipError, match="did you mean 'noisy_shapes'"):
        load_toybox("noisy_shape")


# ---- what pre-training makes of it ----


def test_every_word_is_one_token(pretrain: ModuleType, tmp_path: Path) -> None:
    tokenizer = pretrain.write_tokenizer(tmp_path, [word for word in WORDS if word])
    assert all(len(tokenizer(word).input_ids) == 3 for word in WORDS if word)
    assert tokenizer.eos_token_id == len(tokenizer) - 1 == tokenizer.pad_token_id
    assert tokenizer.tokenize("a zebra") == ["a</w>", "z", "e", "b", "r", "a</w>"]
    words, _ = caption_words(sample_scenes(200, seed=0), seed=1)
    tokens = pretrain.Lexicon.of(tokenizer, "cpu").tokens(words)
    expected = tokenizer(captions(words), padding="max_length", max_length=tokens.shape[1], return_tensors="pt")
    assert torch.equal(tokens, expected.input_ids)


def test_true_captions_are_no_negatives(pretrain: ModuleType) -> None:
    scenes = sample_scenes(200, seed=0)
    words, mentions = caption_words(scenes, seed=1)
    same, neutral = pretrain.relations(scenes, words, mentions)
    texts = captions(words)
    assert all(same[i, j] == (texts[i] == texts[j]) for i, j in itertools.product(range(200), repeat=2))
    assert not (same & neutral).any() and neutral.any()
    ids = scenes.ids()
    for i, j in neutral.nonzero().tolist():
        assert torch.equal(ids[i][mentions[j]], ids[j][mentions[j]])
