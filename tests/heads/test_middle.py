"""What a head reads in the middle of the image tower: as `transformers` has it there, in every kind of answer."""

from dataclasses import replace

import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from transformers import CLIPModel

import perlclip
from perlclip import PerlclipError
from perlclip.adapters.folder import WEIGHTS, Adapter, read_info
from perlclip.data.sets import ImageSet
from perlclip.heads.answering import Answering
from perlclip.heads.head import Head
from perlclip.text.classes import Classes
from perlclip.training.choose_head import FIXED, Discriminant, Said, choose, choose_head
from perlclip.training.choose_unseen import choose_unseen
from perlclip.training.shots import look_at
from tests.common import check_early_stops, gaussian_head, loud, random_middle, random_pixels

NAMES, NEW = ("red", "green", "blue", "white"), ("violet", "black")


@pytest.fixture(scope="module")
def images(backbone):
    return random_pixels(backbone, 6)


def answering(method, names, head) -> Answering:
    return Answering(method, method.class_state(Classes.spoken(names)), head)


def headed(backbone, **numbers) -> Head:
    return gaussian_head(backbone, NAMES, middle=random_middle(backbone, NAMES), **numbers)


@torch.no_grad()
def test_the_middle_is_cls_and_the_mean_of_the_patches_there(any_backbone):
    pixels, depth = random_pixels(any_backbone, 3), any_backbone.vision.middle
    assert 0 < depth < any_backbone.vision.depth
    clip = CLIPModel.from_pretrained(any_backbone.name).eval()
    x_BND = clip.vision_model(pixel_values=pixels, output_hidden_states=True).hidden_states[depth]
    expected = torch.cat([F.normalize(x_BND[:, 0], dim=-1), F.normalize(x_BND[:, 1:].mean(1), dim=-1)], -1) / 2**0.5
    frozen = any_backbone.frozen(pixels)
    torch.testing.assert_close(frozen.middle(depth), expected, atol=1e-5, rtol=1e-5)
    assert expected.shape[1] == any_backbone.vision.middle_width and set(frozen.known) >= {depth}
    torch.testing.assert_close(any_backbone.encode_image(frozen), any_backbone.encode_image(pixels))


def test_a_tower_without_cls_has_the_patches_alone():
    siglip = perlclip.load_backbone("tiny-siglip")
    pixels = random_pixels(siglip, 2)
    with torch.no_grad():
        m_BF = siglip.frozen(pixels).middle(siglip.vision.middle)
        x_BND = siglip.vision.run(siglip.vision.embed(pixels), 0, siglip.vision.middle)
    torch.testing.assert_close(m_BF, F.normalize(x_BND.mean(1), dim=-1), atol=1e-5, rtol=1e-5)
    assert m_BF.shape[1] == siglip.vision.middle_width == siglip.vision.width


@pytest.mark.parametrize("name", ["perl", "zero-shot", "coop", "mma"])
@torch.no_grad()
def test_it_is_added_for_classes_trained_on_alone(backbone, images, name):
    method = perlclip.create_method(name, backbone, seed=3).eval()
    head = headed(backbone, text=0.5, share=0.7)
    bare, middle = replace(head, middle=None), head.middle
    more_BC = backbone.frozen(images).middle(middle.depth) @ middle.weight_CF.T + middle.bias_C
    one, two = (answering(method, NAMES, each) for each in (bare, head))
    torch.testing.assert_close(two.logits(images), one.logits(images) + more_BC, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(two.scores(images)[0], one.scores(images)[0] + more_BC, atol=1e-4, rtol=1e-4)
    assert torch.equal(two.scores(images)[1], one.scores(images)[1])
    turned = answering(method, NAMES[::-1], head)
    torch.testing.assert_close(turned.logits(images), two.logits(images).flip(-1), atol=1e-4, rtol=1e-4)
    new = [answering(method, NEW, each).logits(images) for each in (bare, head)]
    torch.testing.assert_close(*new, atol=0, rtol=0)


@torch.no_grad()
def test_in_a_list_with_new_classes_it_only_divides_among_the_trained_ones(backbone, images):
    method = perlclip.create_method("perl", backbone, seed=3).eval()
    head, names = headed(backbone), (*NAMES, *NEW)
    one, two = (
        answering(method, names, each).logits(images).softmax(-1) for each in (replace(head, middle=None), head)
    )
    torch.testing.assert_close(one[:, 4:], two[:, 4:], atol=1e-4, rtol=1e-3)
    alone = answering(method, NAMES, head).logits(images).softmax(-1)
    torch.testing.assert_close(F.normalize(two[:, :4], p=1, dim=-1), alone, atol=1e-4, rtol=1e-3)
    assert not torch.allclose(one[:, :4], two[:, :4], atol=1e-2)


@torch.no_grad()
def test_it_may_say_whether_an_image_is_of_a_trained_class_at_all(backbone, images):
    method = perlclip.create_method("perl", backbone, seed=3).eval()
    names, quiet = (*NAMES, *NEW), headed(backbone)
    told = replace(quiet, middle=replace(quiet.middle, among=0.5))
    asked = [answering(method, names, each) for each in (quiet, told)]
    one, two = (each.logits(images).softmax(-1) for each in asked)
    v_BE, (weight_CE, bias_C) = backbone.encode_image(images), asked[1].mass
    mass_BC = v_BE @ weight_CE.T + bias_C + 0.5 * asked[1].middle(images)
    torch.testing.assert_close(two[:, :4].sum(-1), mass_BC.softmax(-1)[:, :4].sum(-1), atol=1e-4, rtol=1e-3)
    for kind in (slice(0, 4), slice(4, 6)):  # what is trained, and what is new, is divided as before
        parts = [F.normalize(each[:, kind], p=1, dim=-1) for each in (one, two)]
        torch.testing.assert_close(*parts, atol=1e-3, rtol=1e-2)
    assert not torch.allclose(one, two, atol=1e-2)


def test_how_much_it_says_of_that_is_chosen_with_classes_left_out():
    """Embeddings and texts say nothing, but in the middle images of one class are together."""
    draw = torch.Generator().manual_seed(0)
    labels_N = torch.arange(160) % 8
    x_NE, t_CE = F.normalize(torch.randn(160, 16, generator=draw), dim=-1), torch.randn(8, 16, generator=draw)
    means_CF, noise_NF = torch.randn(8, 24, generator=draw), torch.randn(160, 24, generator=draw)
    for noise, told in ((0.2, True), (50.0, False)):
        m_NF = F.normalize(means_CF[labels_N] + noise * noise_NF, dim=-1)
        unseen, among, _ = choose_unseen(x_NE, labels_N, F.normalize(t_CE, dim=-1), 1.0, middle=(m_NF, 0.5))
        assert unseen is not None and (among > 2.0**-8) == told
    assert choose_unseen(x_NE, labels_N, t_CE, 1.0)[1] == 0


@torch.no_grad()
def test_images_that_stop_early_have_it_too(backbone, images):
    method = loud(perlclip.create_method("perl", backbone, seed=3, readout="mean")).eval()
    asked = answering(method, NAMES, headed(backbone, text=0.5))
    check_early_stops(asked, images)


@pytest.mark.parametrize("names", [NAMES, (*NAMES, *NEW)], ids=["trained", "with new ones"])
@pytest.mark.parametrize("how", ["gradient", "occlusion"])
@pytest.mark.parametrize("further", [-1, 0, 1])
def test_evidence_is_that_of_the_answer_with_it(backbone, images, how, names, further):
    depth = backbone.vision.middle + further
    method = loud(perlclip.create_method("perl", backbone, seed=3, steps=2, readout="mean", vision_depth=depth)).eval()
    state, classes_BM = method.class_state(Classes.spoken(names)), torch.tensor([[0, 2]] * len(images))
    head = headed(backbone)
    maps = [
        perlclip.analysis.evidence_maps(method, images, classes_BM, state, how, each)
        for each in (replace(head, middle=None), head)
    ]
    assert not torch.allclose(maps[0].maps_KBMGG, maps[1].maps_KBMGG, atol=1e-4)
    if how == "gradient" and further == 0 and names == NAMES:  # both are of the same rows: the middle's is all of it
        (without, more) = (each.maps_KBMGG.sum((-1, -2)) + each.cls_KBM - each.logits_KBM for each in maps)
        expected = -head.middle.bias_C[[0, 2]].expand_as(more)
        torch.testing.assert_close(more - without, expected, atol=1e-3, rtol=1e-3)
    if how == "gradient":
        with torch.no_grad():
            expected = answering(method, names, head).trajectory(images)[..., [0, 2]]
        torch.testing.assert_close(maps[1].logits_KBM, expected, atol=1e-3, rtol=1e-3)


def test_saved_and_loaded_it_answers_the_same_and_counts(backbone, tmp_path, images):
    method = perlclip.create_method("perl", backbone, seed=3, steps=2).eval()
    head = replace(headed(backbone), middle=random_middle(backbone, NAMES, among=1.5))
    adapter = Adapter(method=method, class_names=NAMES, template="a {}.", head=head)
    folder = adapter.save(tmp_path / "adapter")
    loaded, info = perlclip.load_adapter(folder, backbone=backbone), read_info(folder)
    assert info["format_version"] == 4 and loaded.fingerprint == adapter.fingerprint
    assert head.numbers - replace(head, middle=None).numbers == len(NAMES) * (backbone.vision.middle_width + 1)
    numbers = {"depth": backbone.vision.middle, "among": 1.5, "beside": 1.0, "offset": 0.0}
    told = {**numbers, "features": backbone.vision.middle_width}
    assert info["head"]["numbers"] == head.numbers and info["head"]["middle"] == told
    with torch.no_grad():
        one, two = (answering(each.method, NAMES, each.head).logits(images) for each in (adapter, loaded))
    assert torch.equal(one, two)
    perlclip.save_adapter(loaded, tmp_path / "again")
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    elsewhere = replace(adapter, head=replace(head, middle=random_middle(backbone, NAMES, depth=99)))
    with pytest.raises(PerlclipError, match="numbers after block 99; the image tower has"):
        perlclip.load_adapter(elsewhere.save(tmp_path / "elsewhere"), backbone=backbone)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("head.middle.weight", lambda x: x[:2], "the middle of a head for 4 classes has tensors of shape"),
        ("head.middle.bias", lambda x: x[0], "the middle of a head for 4 classes has tensors of shape"),
        ("head.middle.numbers", lambda x: x[:1], "the middle of a head for 4 classes has tensors of shape"),
        ("head.middle.numbers", lambda x: x + 0.5, "numbers that cannot be"),
        ("head.middle.numbers", lambda x: x * float("nan"), "numbers that cannot be"),
        ("head.middle.numbers", lambda x: x - torch.tensor([0, 1, 0, 0]), "numbers that cannot be"),
        ("head.middle.numbers", lambda x: x - torch.tensor([0, 0, 1, 0]), "numbers that cannot be"),
        ("head.middle.numbers", lambda x: x + torch.tensor([1, 0, 0, 0]), "not those in its tensor file"),
        ("head.middle.numbers", lambda x: x + torch.tensor([0, 0, 0, 1e9]), "numbers that cannot be"),
        ("head.middle.numbers", lambda x: x + torch.tensor([0, 1, 0, 0]), "not those in its tensor file"),
        ("head.middle.weight", lambda x: x * float("inf"), "not finite"),
        ("head.middle.weight", lambda x: None, "lacks some of its tensors"),
    ],
)
def test_damaged_tensors_are_refused(backbone, name, change, words):
    head = headed(backbone)
    tensors = head.tensors()
    changed = change(tensors.pop(name))
    with pytest.raises(PerlclipError, match=words):
        Head.read(NAMES, backbone.embed_dim, head.as_json(), tensors | ({} if changed is None else {name: changed}))


@torch.no_grad()
def test_those_who_have_embeddings_alone_are_answered_as_without_it(backbone, images):
    """As the studio's first guesses are."""
    method = perlclip.create_method("perl", backbone, seed=3).eval()
    whole = headed(backbone, text=0.5, scale=0.25, share=0.7)
    shrunk = replace(whole, text=0.25, scale=0.125, middle=replace(whole.middle, beside=0.5))
    wanted, found = (answering(method, NAMES, each) for each in (replace(whole, middle=None), shrunk.without_middle()))
    logits_KBC, v_KBE = method.look(images, found.state)
    torch.testing.assert_close(found.finish(logits_KBC, v_KBE), wanted.finish(logits_KBC, v_KBE))
    assert replace(whole, middle=None).without_middle() == replace(whole, middle=None)
    unread = replace(whole, middle=replace(whole.middle, offset=-1.5)).without_middle()
    assert (unread.unseen.offset, unread.unseen.among) == (-1.5, whole.unseen.among), "as if it were not there"


@pytest.mark.parametrize("depth", [1, 3, 4, 5])
@torch.no_grad()
def test_no_block_runs_twice_over_the_same_rows(backbone, images, depth, monkeypatch):
    tower, ran = backbone.vision, []
    plain = type(tower).rows

    def noted(self, start, rows, stop, **more):
        ran.extend(range(start, stop) if self is tower else ())
        return plain(self, start, rows, stop, **more)

    monkeypatch.setattr(type(tower), "rows", noted)
    method = perlclip.create_method("perl", backbone, seed=3, steps=0, vision_depth=depth).eval()
    answering(method, NAMES, headed(backbone)).logits(images)
    assert sorted(ran) == sorted(set(ran)) and max(ran) == tower.full - 1


def test_weights_that_are_too_large_for_a_file_are_held_back(backbone):
    solution = torch.full((4, backbone.vision.middle_width), 2 * 65504.0), torch.full((4,), 8.0)
    held_back = random_middle(backbone, NAMES).of(1, solution, 1.0)
    assert held_back.weight_CF.max() == 65504 and held_back.bias_C.tolist() == [4.0] * 4
    with pytest.raises(PerlclipError, match="not finite"):
        replace(random_middle(backbone, NAMES), bias_C=torch.tensor([0.0, 1.0, float("nan"), 0.0]))


def said(useful: bool, seed: int = 0) -> Said:
    """Shots about which embeddings say something and the middle says much, or says what is not so."""
    draw = torch.Generator().manual_seed(seed)
    N, C, L = 60, 4, len(Discriminant.STRENGTHS)
    labels_N = torch.arange(N) % C
    truth_NC = F.one_hot(labels_N, C).float()
    texts_NC, scores_NC, noise_NC = (torch.randn(N, C, generator=draw) for _ in range(3))
    middle_NC, scores_NC = 6 * truth_NC + noise_NC if useful else 6 * noise_NC, 3 * truth_NC + 2 * scores_NC
    return Said(
        labels_N=labels_N, zero_NC=texts_NC, adapted_NC=texts_NC, scores_LNC=scores_NC.repeat(L, 1, 1),
        middle_LNC=middle_NC.repeat(L, 1, 1), solver=Discriminant,
    )  # fmt: skip


def test_it_is_used_where_shots_left_out_are_better_off():
    useful, useless = said(True), said(False)
    choice = choose(useful, (1.0,), "each left out")
    assert choice.middle > 0 and choice.chosen > choose(replace(useful, middle_LNC=None), (1.0,), "").chosen
    answers_NC, _ = useful.answers(choice)
    right = (answers_NC.argmax(-1) == useful.labels_N).double().mean().item()
    assert choice.chosen == pytest.approx(100 * right), "what was chosen is what is answered"
    assert choose(useless, (1.0,), "each left out").middle <= 2.0**-4


def test_choices_are_made_on_classes_that_keep_a_shot(backbone):
    """A class whose only shot is left out is gone, and a few classes that have two would choose for all."""
    method = perlclip.create_method("gaussian", backbone).eval()
    assert choose_head(method, colours(5))[1].how == "fixed"
    _, choice, held = choose_head(method, colours(7))
    assert (choice.images, choice.how) == (6, "each left out") and 3 not in held.labels_N


def test_one_class_has_no_middle(backbone):
    method, images = perlclip.create_method("gaussian", backbone).eval(), colours(2)
    alone = ImageSet(images=images.images, labels=[0, 0], class_names=NAMES[:1], name="noise")
    head, _, _ = choose_head(method, alone)
    assert head is None or head.middle is None


def colours(count: int) -> ImageSet:
    draw = torch.Generator().manual_seed(0)
    pictures = (torch.rand(count, 24, 24, 3, generator=draw) * 255).byte().numpy()
    labels = [i % 4 for i in range(count)]
    return ImageSet(images=[Image.fromarray(each) for each in pictures], labels=labels, class_names=NAMES, name="noise")


def test_heads_of_methods_that_leave_the_tower_alone_have_it(backbone):
    for name, has in {"gaussian": True, "zero-shot": True, "perl": True, "mma": False, "ridge": False}.items():
        method = perlclip.create_method(name, backbone).eval()
        images = colours(4)
        seen = look_at(method, images, method.class_state(images.classes))
        assert (seen.middle_NF is not None) == (has or name == "ridge"), name
        head, choice, _ = choose_head(method, images, seen=seen)
        assert choice.how == "fixed" and (head is not None and head.middle is not None) == has, name
    assert FIXED[Discriminant].middle > 0


@torch.no_grad()
def test_it_may_speak_where_the_embedding_says_nothing(backbone, tmp_path, images):
    method = perlclip.create_method("perl", backbone, seed=3, steps=2).eval()
    head = headed(backbone, text=0.25, scale=0.0, unseen=None)
    bare = replace(head, middle=None)
    assert not head.idle and bare.idle and head.numbers == head.middle.numbers and head.texts_alone().middle is None
    state = method.class_state(Classes.spoken(NAMES))
    expected = 0.25 * method.logits(images, state) + Answering(method, state, head).middle(images)
    adapter = Adapter(method=method, class_names=NAMES, template="a {}.", head=head)
    loaded = perlclip.load_adapter(adapter.save(tmp_path / "adapter"), backbone=backbone)
    for each in (head, loaded.head):
        torch.testing.assert_close(Answering(method, state, each).logits(images), expected, atol=1e-4, rtol=1e-4)
