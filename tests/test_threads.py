"""One backbone, many users: whatever threads do at the same time, every answer is the serial one."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import perlclip
from perlclip import threads
from perlclip.backbone import FrozenImages
from perlclip.data import ImageSet
from perlclip.data.loading import fixed_views
from perlclip.inference.cache import EvalCache
from perlclip.methods.seeding import Seeded

THREADS = 8
LISTS = (("cat", "striped horse"), ("red", "green grass", "blue"), ("ox", "a bird", "tree", "house"))


def pictures(seed: int, count: int, names: tuple[str, ...]) -> ImageSet:
    rng = np.random.default_rng(seed)
    images = [rng.integers(0, 256, (32, 32, 3), dtype=np.uint8) for _ in range(count)]
    return ImageSet(images=images, labels=[i % len(names) for i in range(count)], class_names=names)


@pytest.fixture
def one_thread_each():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_eight_threads_share_a_backbone(backbone, one_thread_each):
    """Evaluations, predictions, adaptive ones, and a training meanwhile; each thread begins at another place."""
    sets = [pictures(seed, 9 + seed, names) for seed, names in enumerate(LISTS)]
    methods = [perlclip.create_method(name, backbone, seed=7) for name in ("perl", "mmrl", "coop", "promptsrc", "mma")]
    shared = EvalCache()

    def evaluated(method, images, kept):
        cache = shared.of(images.class_names) if kept else None
        result = perlclip.evaluate(method, images, batch_size=4, cache=cache, progress=False)
        return result.predictions_KB.tolist(), result.probabilities_BC

    classifiers = {
        (method.name, names): perlclip.Classifier(method, names) for method in methods for names in LISTS[:2]
    }
    perl = perlclip.create_method("perl", backbone)
    fitted = perlclip.fit(perl, sets[0], recipe=perlclip.Recipe(), progress=False)
    adaptive = perlclip.Classifier(fitted)

    def predicted(classifier, images, **thinking):
        found = classifier.predict(images.images, batch_size=4, top_k=2, **thinking)
        return [p.label for p in found], torch.tensor([p.probability for p in found])

    def trained():
        method = perlclip.create_method("perl", backbone, steps=2)
        result = perlclip.fit(
            method, sets[1], recipe=perlclip.Recipe(lr=1e-3), thresholds=False, head=False, progress=False
        )
        return [p.detach().clone() for p in method.parameters()], torch.tensor(result.losses)

    jobs = [lambda m=m, s=s, k=k: evaluated(m, s, k) for m in methods for s in sets for k in (False, True)]
    jobs += [lambda c=c, s=s: predicted(c, s) for c in classifiers.values() for s in sets]
    jobs += [lambda s=s: predicted(adaptive, s, steps="adaptive") for s in sets]
    jobs[len(jobs) // 2 : len(jobs) // 2] = [trained]
    serial = [job() for job in jobs]
    shared.forget()
    start = threading.Barrier(THREADS)

    def work(thread: int):
        start.wait()
        order = [(i + thread * len(jobs) // THREADS) % len(jobs) for i in range(len(jobs) // 2)]
        return {i: jobs[i]() for i in order}

    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(work, range(THREADS)):
            for i, (answers, numbers) in found.items():
                if jobs[i] is trained:
                    assert all(torch.equal(a, b) for a, b in zip(answers, serial[i][0], strict=True))
                else:
                    assert answers == serial[i][0]
                torch.testing.assert_close(numbers, serial[i][1], rtol=0, atol=1e-6)


def test_a_cache_that_grows_meanwhile_gives_every_image_once(backbone):
    """Batches that another thread had kept since the first look at the cache were left out of their place."""
    images, cache = pictures(0, 10, LISTS[0]), EvalCache().of("these")
    method = perlclip.create_method("zero-shot", backbone)
    first = cache.batches(images, method, 2)
    found = [next(first).pixels]
    others = cache.batches(images, method, 2)
    for _ in range(3):
        next(others)
    found += [batch.pixels for batch in first]
    alone = [batch.pixels for batch in EvalCache(limit=0).of("these").batches(images, method, 2)]
    assert len(found) == 5
    assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


def test_random_numbers_of_threads_do_not_mix(backbone):
    """Between seeding and drawing, another thread drew from the process's one generator, as every loader does."""

    found = []

    def drawn(between):
        linear = nn.Linear(3, 4)
        between()
        return [linear.weight, linear.bias, torch.randn(5), torch.randperm(6), nn.init.kaiming_normal_(linear.weight)]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        alone = drawn(lambda: None)
        torch.manual_seed(3)
        expected = torch.rand(2)
        torch.manual_seed(3)
        with Seeded(7), ThreadPoolExecutor(1) as pool:
            mixed = drawn(lambda: found.append(pool.submit(torch.rand, 1).result()))
        perlclip.create_method("mmrl", backbone, seed=9)
        list(fixed_views(pictures(0, 2, LISTS[0]), backbone.preprocess, 2, backbone.device))
        found.append(torch.rand(1))
    assert all(torch.equal(a, b) for a, b in zip(alone, mixed, strict=True))
    assert torch.equal(torch.cat(found), expected)


def test_a_foreign_training_step_makes_nobody_encode_again(backbone):
    """Any optimiser step of any model used to: 4 encodings instead of 1 after 3 of them."""
    method = perlclip.create_method("coop", backbone)
    state, pixels, calls = method.class_state(["a cat", "a dog"]), torch.randn(2, 3, 32, 32), []
    encode = method.encode_text
    method.encode_text = lambda state: (calls.append(1), encode(state))[1]
    other = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(4):
        with torch.no_grad():
            method.logits(pixels, state)
        other(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert len(calls) == 1


def test_nothing_stays_on_towers_or_backbones(backbone):
    """After answers with a cache, the towers hold what they held, no hook and no batch."""
    before = {side: dict(vars(getattr(backbone, side))) for side in ("vision", "text")}
    perlclip.evaluate(
        perlclip.create_method("perl", backbone), pictures(0, 5, LISTS[0]), cache=EvalCache().of("x"), progress=False
    )
    assert before == {side: dict(vars(getattr(backbone, side))) for side in before}
    for tower in (backbone.vision, backbone.text):
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in tower.modules())


def test_pool_reads_the_rows_it_is_told_to(backbone):
    """For a remembered batch it used to give CLS whatever was asked for."""
    pixels = torch.randn(3, 3, 32, 32)
    images = FrozenImages(backbone.vision, pixels)
    x_BND = images.rows(4)
    cls_BD = images.pooled()
    rows_B = torch.full((3,), 5)
    fifth_BD = backbone.vision.pool(x_BND, rows_B, 4)
    whole_BND = backbone.vision.run(x_BND, 4, backbone.vision.depth)
    torch.testing.assert_close(fifth_BD, whole_BND[:, 5], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cls_BD, whole_BND[:, 0], atol=1e-4, rtol=1e-4)


def test_each_image_file_is_opened_twice_and_the_texts_prepared_once(tree, clip_folder, tmp_path, monkeypatch):
    """In one `fit`: looked at when it is found, then read; class texts serve training, validation and thresholds."""
    from PIL import Image

    from perlclip.methods.perl import Perl
    from tests.cli.test_cli import run

    opened: dict[str, int] = {}
    prepared = []
    pil_open, path_open, prepare = Image.open, Path.open, Perl.prepare

    def count(source):
        if str(source).endswith(".png"):
            opened[str(source)] = opened.get(str(source), 0) + 1

    monkeypatch.setattr(Image, "open", lambda source, *a, **k: (count(source), pil_open(source, *a, **k))[1])
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: (count(self), path_open(self, *a, **k))[1])
    monkeypatch.setattr(Perl, "prepare", lambda self, classes: (prepared.append(1), prepare(self, classes))[1])
    done = run("fit", tree, "--backbone", clip_folder, "--out", tmp_path / "a", "--epochs", 3, "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert len(prepared) == 1 and opened and max(opened.values()) == 2


def test_frozen_images_have_the_graph_that_is_asked_for(backbone):
    """Looked at once without gradients, in inference mode or not, they can still be trained with and derived from."""
    method = perlclip.create_method("perl", backbone)
    state, labels = method.class_state(["a cat", "a dog"]), torch.tensor([0, 1])
    for quiet in (torch.no_grad, torch.inference_mode):
        pixels = torch.randn(2, 3, 32, 32, requires_grad=True)
        images = backbone.frozen(pixels)
        with quiet():
            method.logits(images, state)
        method.loss(images, labels, state).backward()
        assert pixels.grad is not None and pixels.grad.abs().max() > 0
        plain = backbone.frozen(pixels.detach())
        with quiet():
            method.logits(plain, state)
        method.loss(plain, labels, state).backward()
        torch.testing.assert_close(
            method.loss(plain, labels, state), method.loss(pixels.detach(), labels, state), rtol=0, atol=0
        )


@pytest.mark.parametrize("frozen", [False, True], ids=["all is trained", "the text's projector is not"])
def test_towers_that_think_at_the_same_time_give_the_same_gradients(tiny, monkeypatch, one_thread_each, frozen):
    """To the bit; where a part is not trained, one tower waits for the other as before."""
    method = perlclip.create_method("perl", tiny, seed=3, recipe="strong")
    method.take_center(torch.full((tiny.embed_dim,), 0.01))
    for p in method.projectors["text"].parameters():
        p.requires_grad_(not frozen)
    trained, calls = [p for p in method.parameters() if p.requires_grad], []
    state, pixels = method.class_state(["cat", "boat", "ox"]), torch.randn(4, 3, 64, 64)
    whole = threads.beside_each_other

    def counted(work, items):
        calls.append(len(items))
        return whole(work, items)

    monkeypatch.setattr(threads, "beside_each_other", counted)

    def step() -> list[torch.Tensor]:
        loss = method.loss(pixels, torch.tensor([0, 1, 2, 0]), state)
        return [loss, *torch.autograd.grad(loss, trained)]

    found = step()
    assert calls == ([] if frozen else [2, 2])
    monkeypatch.setattr(type(tiny), "small", False)
    assert all(torch.equal(one, other) for one, other in zip(found, step(), strict=True)) and len(calls) in (0, 2)


def test_what_breaks_in_a_piece_is_said(one_thread_each):
    def broken() -> torch.Tensor:
        raise perlclip.PerlclipError("no such class")

    with pytest.raises(perlclip.PerlclipError, match="no such class"):
        threads.apart((lambda: torch.ones(1), broken), [torch.ones(1, requires_grad=True)])
