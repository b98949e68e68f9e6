"""What makes each method what it is, one formula at a time, and the work each one saves.

That the whole computation is right is shown in `test_plain_methods.py`, against forms written apart from it.
"""

import pytest
import torch
from torch.nn import functional as F

import perlclip
from perlclip.backbone.tower import Block
from perlclip.methods import cocoop, promptsrc
from perlclip.text.classes import Classes
from perlclip.text.templates import IMAGENET_7, IMAGENET_60
from tests.common import CLOSE, loud

CLASSES = Classes(("red circle", "blue square", "star"), "a photo of a {}.")
PETS = Classes(("cat", "ox"), "a photo of a {}, a type of pet.")
LABELS = torch.tensor([0, 1, 2, 0])


@pytest.fixture
def pixels(tiny):
    return torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def loss_parts(method, pixels, classes=CLASSES):
    """The whole loss, and the cross-entropy of what the method says."""
    state = method.class_state(classes)
    return method.loss(pixels, LABELS, state), F.cross_entropy(method.logits(pixels, state), LABELS)


def gradients(method, value):
    return torch.autograd.grad(value, list(method.parameters()), allow_unused=True)


# zero-shot


def test_the_ensemble_is_the_mean_of_unit_embeddings(tiny):
    method = perlclip.create_method("zero-shot", tiny, ensemble=True)
    templates = [*IMAGENET_7, CLASSES.template]
    assert len(set(templates)) == 8 and len(set(IMAGENET_60)) == 60
    with torch.no_grad():
        want = F.normalize(torch.stack([tiny.encode_text(CLASSES.prompts(t)) for t in templates]).mean(0), dim=-1)
        torch.testing.assert_close(method.encode_text(method.class_state(CLASSES)), want, **CLOSE)
        again = perlclip.create_method("zero-shot", tiny, ensemble=True, templates=[CLASSES.template])
        alone = perlclip.create_method("zero-shot", tiny)
        a, b = (m.encode_text(m.class_state(CLASSES)) for m in (again, alone))
        torch.testing.assert_close(a, b, **CLOSE)


# CoOp, KgCoOp, CoCoOp


def test_coop_begins_as_a_photo_of_a(tiny, pixels):
    """With its first words CoOp is zero-shot CLIP under that template, whatever the data set's is."""
    coop, zero_shot = (perlclip.create_method(name, tiny) for name in ("coop", "zero-shot"))
    with torch.no_grad():
        want = zero_shot.logits(pixels, zero_shot.class_state(CLASSES))
        for template in ("a photo of a {}.", "{} texture."):
            got = coop.logits(pixels, coop.class_state(Classes(CLASSES.names, template)))
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)


def test_kgcoop_is_anchored_to_the_hand_written_prompt(tiny, pixels):
    method = perlclip.create_method("kgcoop", tiny)
    whole, classification = loss_parts(method, pixels)
    assert (whole - classification).abs() < 1e-4, "it starts at the anchor: a photo of a"
    loud(method)
    whole, classification = loss_parts(method, pixels)
    with torch.no_grad():
        t, t0 = method.encode_text(method.class_state(CLASSES)), tiny.encode_text(CLASSES.prompts())
        cosines = F.cosine_similarity(t, t0)
    torch.testing.assert_close(whole - classification, 8 * (1 - cosines.mean()), atol=1e-4, rtol=1e-4)
    other = perlclip.create_method("kgcoop", tiny, reference="a drawing of a {}.")
    assert not torch.allclose(other.class_state(CLASSES).t0_CE, t0)


def test_cocoop_shifts_every_word_by_the_image(tiny, pixels):
    method = loud(perlclip.create_method("cocoop", tiny))
    coop = perlclip.create_method("coop", tiny)
    with torch.no_grad():
        got = method.logits(pixels, method.class_state(CLASSES))
        for i, v in enumerate(method.encode_image(pixels)):
            coop.context.copy_(method.context + method.meta(v))
            want = coop.logits(pixels[i : i + 1], coop.class_state(CLASSES))[0]
            torch.testing.assert_close(got[i], want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("pairs", [1, 2, 5])
def test_cocoop_in_pieces_is_the_same(tiny, pixels, monkeypatch, pairs):
    method = loud(perlclip.create_method("cocoop", tiny))
    whole, _ = loss_parts(method, pixels)
    expected = gradients(method, whole)
    monkeypatch.setattr(cocoop, "PAIRS", pairs)
    pieces, _ = loss_parts(method, pixels)
    torch.testing.assert_close(pieces, whole, **CLOSE)
    for got, want in zip(gradients(method, pieces), expected, strict=True):
        assert (got - want).abs().max() <= 1e-3 * want.abs().max()


def test_cocoop_keeps_no_more_for_a_thousand_classes(tiny, pixels, monkeypatch):
    """What autograd holds grows with the class texts' own rows, not with their passage through the tower."""

    def kept(count: int) -> int:
        method = perlclip.create_method("cocoop", tiny)
        state = method.class_state(Classes(tuple(f"red {i}" for i in range(count))))
        sizes: dict[int, int] = {}

        def note(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            method.loss(pixels, LABELS, state)
        return sum(sizes.values())

    monkeypatch.setattr(cocoop, "PAIRS", 128)
    assert kept(1000) < 2 * kept(32)


# ProVP


def test_provp_carries_over_from_block_to_block(tiny, pixels):
    shallow = loud(perlclip.create_method("provp", tiny, alpha=1.0, weight=0.0))
    gradient = gradients(shallow, loss_parts(shallow, pixels)[0])[0]
    assert gradient[0].abs().max() > 0 and gradient[1:].abs().max() == 0, "alpha = 1: only the first prompts count"
    deep = loud(perlclip.create_method("provp", tiny, alpha=0.0, weight=0.0))
    gradient = gradients(deep, loss_parts(deep, pixels)[0])[0]
    assert all(block.abs().max() > 0 for block in gradient), "alpha = 0: each block has its own"


def test_provp_re_formation_tells_images_apart(tiny, pixels):
    method = loud(perlclip.create_method("provp", tiny, weight=2.0))
    whole, classification = loss_parts(method, pixels)
    with torch.no_grad():
        s = method.encode_image(pixels) @ tiny.encode_image(pixels).T
    want = 2.0 * (s.exp().sum(1).log() - s.diagonal()).mean()
    torch.testing.assert_close(whole - classification, want, atol=1e-4, rtol=1e-4)


def test_provp_starts_within_the_released_bound(tiny):
    prompts = perlclip.create_method("provp", tiny).prompts
    bound = (6 / (3 * 8 * 8 + 128)) ** 0.5
    assert 0.95 * bound < prompts.abs().max() <= bound


# TCP


def test_tcp_replaces_the_words_before_block_nine(tiny, pixels, monkeypatch):
    method, seen = loud(perlclip.create_method("tcp", tiny)), {}
    both = Block.both

    def spy(self, prefix, x):
        seen[list(tiny.text.blocks).index(self)] = (prefix.shape[1], x.shape[1])
        return both(self, prefix, x)

    state = method.class_state(PETS)
    assert state.t0_CE.shape == (2, tiny.embed_dim)
    monkeypatch.setattr(Block, "both", spy)
    with torch.no_grad():
        method.encode_text(state)
    shared, own = seen[7]
    assert shared >= 5 and seen[8] == (1, own + shared - 1), "from block 9 on only SOS is common to all classes"
    context, *tke = gradients(method, method.encode_text(state)[0].sum())
    assert context.abs().max() > 0 and tke[0].abs().max() > 0
    at_once = loud(perlclip.create_method("tcp", tiny, layer=0))
    grads = gradients(at_once, at_once.encode_text(at_once.class_state(PETS))[0].sum())
    assert grads[0] is None or grads[0].abs().max() == 0, "words replaced at the entrance say nothing"


def test_tcp_says_the_template_from_the_name_on(tiny):
    method = perlclip.create_method("tcp", tiny)
    want = tiny.tokenize(["x x x x cat, a type of pet.", "x x x x ox, a type of pet."])
    text = method.class_state(PETS).text
    assert text.prefix_1PD.shape[1] + int(text.eos_C.max()) == int(want.eos_B.max())
    assert torch.equal(method.class_state(PETS).t0_CE, tiny.encode_text(PETS.prompts()))


# MaPLe, PromptSRC


def test_maple_couples_the_towers(tiny, pixels):
    method = loud(perlclip.create_method("maple", tiny))
    named = dict(method.named_parameters())
    grads = dict(zip(named, gradients(method, method.encode_image(pixels).sum()), strict=True))
    assert all(grads[name].abs().max() > 0 for name in named), "the image depends on the text prompts, through W"
    grads = dict(zip(named, gradients(method, method.encode_text(method.class_state(CLASSES)).sum()), strict=True))
    assert all(grads[name] is None for name in named if name.startswith("couple"))
    for couple, rows, coupled in zip(method.couple, [method.context, *method.deep], method.coupled(), strict=True):
        torch.testing.assert_close(coupled, rows @ couple.weight.T + couple.bias, **CLOSE)
    fresh = perlclip.create_method("maple", tiny)
    assert all(torch.equal(fresh.couple[1].weight, other.weight) for other in fresh.couple[2:])
    assert not torch.equal(fresh.couple[0].weight, fresh.couple[1].weight)


def test_promptsrc_has_three_pulls(tiny, pixels):
    settings = dict(templates=["a photo of a {}.", "a picture of the {}."])

    def extra(**weights):
        method = loud(perlclip.create_method("promptsrc", tiny, **settings, **weights))
        whole, classification = loss_parts(method, pixels)
        return method, (whole - classification).item()

    method, divergence = extra(text_weight=0.0, image_weight=0.0)
    state = method.class_state(CLASSES)
    with torch.no_grad():
        features = [tiny.text_features(CLASSES.prompts(t)) for t in settings["templates"]]
        t0, v0 = F.normalize(sum(features) / 2, dim=-1), tiny.encode_image(pixels)
        t, v = method.encode_text(state), method.encode_image(pixels)
        z, z0 = method.logits(pixels, state), tiny.logit_scale * v0 @ t0.T
        p0 = z0.softmax(-1)
        kl = (p0 * (z0.log_softmax(-1) - z.log_softmax(-1))).sum() / z.numel()
    assert divergence == pytest.approx(kl.item(), rel=1e-4)
    assert extra(text_weight=25.0, image_weight=0.0)[1] == pytest.approx(
        (kl + 25 * (t - t0).abs().mean()).item(), rel=1e-4
    )
    assert extra(text_weight=0.0, image_weight=10.0)[1] == pytest.approx(
        (kl + 10 * (v - v0).abs().mean()).item(), rel=1e-4
    )


def test_promptsrc_asks_its_teacher_only_to_train(tiny, pixels, monkeypatch):
    method, asked = perlclip.create_method("promptsrc", tiny), []
    teacher = promptsrc.teacher
    monkeypatch.setattr(promptsrc, "teacher", lambda *given: asked.append(1) or teacher(*given))
    state = method.class_state(CLASSES)
    with torch.no_grad():
        method.logits(pixels, state)
    assert not asked
    method.loss(pixels, LABELS, state)
    method.loss(pixels, LABELS, state)
    assert len(asked) == 1


# MMA


@pytest.mark.parametrize("scale", [0.001, 0.5])
def test_mma_scales_the_gradient_of_its_weights_alone(tiny, pixels, scale, monkeypatch):
    from perlclip.methods import mma

    def grads():
        method = loud(perlclip.create_method("mma", tiny, scale=scale)).double()
        towers = [tower.double() for tower in (tiny.vision, tiny.text)]
        try:
            return gradients(method, loss_parts(method, pixels.double())[0])
        finally:
            for tower in towers:
                tower.float()

    scaled = grads()
    monkeypatch.setattr(mma.ScaleGradient, "backward", staticmethod(lambda ctx, gradient: (gradient, None)))
    for got, true in zip(scaled, grads(), strict=True):
        torch.testing.assert_close(got, true / scale, rtol=1e-4, atol=1e-7)


def test_mma_shares_the_middle_of_each_block(tiny):
    method = perlclip.create_method("mma", tiny)
    assert list(method.adapters) == [str(i) for i in range(4, 12)]
    adapter = loud(method).adapters["4"]
    y = torch.randn(2, 5, 96)
    want = (y @ adapter.text_down.weight.T + adapter.text_down.bias).relu()
    want = (want @ adapter.shared.weight.T + adapter.shared.bias).relu()
    want = 0.001 * (want @ adapter.text_up.weight.T + adapter.text_up.bias)
    torch.testing.assert_close(adapter("text", y, 0.001), want, **CLOSE)


# MMRL, MMRL++


@pytest.mark.parametrize("name", ["mmrl", "mmrl++"])
def test_mmrl_fuses_two_branches_for_known_classes(tiny, pixels, name):
    method = loud(perlclip.create_method(name, tiny))
    known, novel = method.class_state(CLASSES), method.class_state(CLASSES, novel=True)
    with torch.no_grad():
        class_branch, representation = method.branches(pixels)
        t = method.encode_text(known)
        z_c, z_r = (tiny.logit_scale * f @ t.T for f in (class_branch, representation))
        torch.testing.assert_close(method.logits(pixels, known), 0.7 * z_c + 0.3 * z_r, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(method.logits(pixels, novel), z_c, atol=1e-4, rtol=1e-5)
        assert not torch.allclose(z_c, z_r, atol=1e-2)


def test_mmrl_puts_its_tokens_behind_sos(tiny):
    """SOS cannot see them, the words can; and the words keep their own positions."""
    method = loud(perlclip.create_method("mmrl", tiny))
    text = method.class_state(CLASSES).text
    tokens = method.aligned("text")
    inserted = text.insert(tokens[0])
    assert inserted.prefix_1PD.shape[1] == text.prefix_1PD.shape[1] + 5
    assert torch.equal(inserted.prefix_1PD[0, 1:6], tokens[0])
    assert torch.equal(inserted.prefix_1PD[:, 6:], text.prefix_1PD[:, 1:])
    with torch.no_grad():
        torch.testing.assert_close(inserted.block(5).prefix_1PD[:, 0], text.block(5).prefix_1PD[:, 0], **CLOSE)
        assert not torch.allclose(inserted.block(5).own_CMD, text.block(5).own_CMD, atol=1e-3)


def test_mmrlpp_residuals_are_of_low_rank(tiny):
    method = loud(perlclip.create_method("mmrl++", tiny))
    for side in ("vision", "text"):
        aligner = getattr(method, side)
        for i, rows in enumerate(method.aligned(side)):
            weight = aligner.shared + aligner.left[i] @ aligner.right[i]
            torch.testing.assert_close(rows, method.space @ weight.T + aligner.bias[i], atol=1e-4, rtol=1e-5)
            assert torch.linalg.matrix_rank(weight - aligner.shared, atol=1e-4) == 4
    fresh = perlclip.create_method("mmrl++", tiny)
    torch.testing.assert_close(fresh.head(), tiny.vision.head.weight.T, msg="it starts as CLIP's own projection")
    assert fresh.vision.right.abs().max() == 0 and 0.45 < fresh.vision.left.abs().max() <= 0.5


def test_mmrlpp_without_composition_is_mmrl(tiny, pixels):
    plus, mmrl = loud(perlclip.create_method("mmrl++", tiny, beta=1.0)), perlclip.create_method("mmrl", tiny)
    with torch.no_grad():
        mmrl.space.copy_(plus.space)
        mmrl.rep_head.copy_(plus.head())
        for side in ("vision", "text"):
            aligner = getattr(plus, side)
            for i, linear in enumerate(getattr(mmrl, f"{side}_aligners")):
                linear.weight.copy_(aligner.shared + aligner.left[i] @ aligner.right[i])
                linear.bias.copy_(aligner.bias[i])
        a, b = (m.logits(pixels, m.class_state(CLASSES)) for m in (plus, mmrl))
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-4)


def test_mmrlpp_tokens_carry_over(tiny, pixels):
    """The share of the last block's output grows as beta falls, in the image and in the text."""
    logits = []
    for beta in (1.0, 0.99, 0.5):
        method = loud(perlclip.create_method("mmrl++", tiny, beta=beta))
        with torch.no_grad():
            logits.append(method.logits(pixels, method.class_state(CLASSES, novel=True)))
            own, last = torch.randn(5, 96), torch.randn(2, 5, 96)
            torch.testing.assert_close(method.carry(own, last), beta * own + (1 - beta) * last, **CLOSE)
    assert 0 < (logits[0] - logits[1]).abs().max() < (logits[0] - logits[2]).abs().max()


# Work saved


@pytest.fixture
def rows_done(tiny, monkeypatch):
    """How many rows each block of each tower updates."""
    done = {"vision": {}, "text": {}}
    forward, both, read = Block.forward, Block.both, Block.read

    def note(block, rows):
        for side in done:
            for i, other in enumerate(getattr(tiny, side).blocks):
                if other is block:
                    done[side][i] = done[side].get(i, 0) + rows

    def spy_forward(self, rows, *rest):
        note(self, rows.x_BND.shape[0] * rows.x_BND.shape[1])
        return forward(self, rows, *rest)

    def spy_both(self, prefix, x):
        note(self, prefix.shape[0] * prefix.shape[1] + x.shape[0] * x.shape[1])
        return both(self, prefix, x)

    def spy_read(self, x, rows, causal, context=None):
        note(self, rows.numel())
        return read(self, x, rows, causal, context)

    monkeypatch.setattr(Block, "forward", spy_forward)
    monkeypatch.setattr(Block, "both", spy_both)
    monkeypatch.setattr(Block, "read", spy_read)
    return done


def test_mmrl_runs_the_frozen_blocks_once_for_student_and_teacher(tiny, pixels, rows_done):
    method = perlclip.create_method("mmrl", tiny)
    state = method.class_state(CLASSES)
    for side in rows_done.values():
        side.clear()
    method.loss(pixels, LABELS, state)
    image, tokens = 4 * 65, 4 * 5
    assert [rows_done["vision"][i] for i in range(12)] == [image] * 5 + [2 * image + tokens] * 6 + [4 * 1 + 4 * 6]
    assert min(rows_done["text"]) == 5, "the texts' frozen blocks ran with the class list"


@pytest.mark.parametrize(("name", "first"), [("mma", 4), ("mmrl", 5), ("mmrl++", 5), ("coop", 0), ("perl", 8)])
def test_training_does_not_run_the_frozen_text_again(tiny, pixels, rows_done, name, first):
    """PERL's first refinement block only attends: its frozen rows' projections are kept."""
    method = perlclip.create_method(name, tiny)
    state = method.class_state(CLASSES)
    method.loss(pixels, LABELS, state)
    rows_done["text"].clear()
    method.loss(pixels, LABELS, state)
    assert min(rows_done["text"]) == first


@pytest.mark.parametrize("name", ["coop", "kgcoop", "maple", "promptsrc", "mma", "mmrl", "mmrl++", "tcp"])
def test_common_rows_are_computed_once_for_all_classes(tiny, rows_done, name):
    """Forty names of one word that differ in it: SOS, prompts and "a photo of a" are one sequence, not forty."""
    classes = Classes(tuple(f"{a} {b}" for a in ("red", "blue", "green", "pink") for b in "abcdefghij"))
    method = perlclip.create_method(name, tiny, **(dict(templates=["a {}."]) if name == "promptsrc" else {}))
    state = method.class_state(classes)
    with torch.no_grad():
        method.encode_text(state)  # TCP's first encoding also makes the frozen one
        rows_done["text"].clear()
        method.encode_text(state)
    own = len(classes.names) * state.text.own_CMD.shape[1]
    assert state.text.own_CMD.shape[1] == 4, "the two words, the full stop, EOS"
    shared = state.text.prefix_1PD.shape[1]
    upper = 40 * 4 if name == "tcp" else 0  # from block 9 on the class-aware words are each class's own
    tokens = 5 if name.startswith("mmrl") else 0
    assert rows_done["text"][7] == own + shared + tokens
    assert rows_done["text"][9] == own + upper + (1 if upper else shared + tokens)
    assert rows_done["text"][11] == 40, "the last block only at EOS"


# Sentences


def test_sentences_can_be_changed(tiny):
    def state(name, classes=PETS, **settings):
        return perlclip.create_method(name, tiny, **settings).class_state(classes)

    def said(state):
        return state.text.prefix_1PD.shape[1] + int(state.text.eos_C.max())

    other = tiny.encode_text(PETS.prompts("a drawing of a {}."))
    with torch.no_grad():
        assert torch.equal(state("provp", template="a drawing of a {}.").t_CE, other)
        assert torch.equal(state("tcp", reference="a drawing of a {}.").t0_CE, other)
        assert torch.equal(state("kgcoop", reference="a drawing of a {}.").t0_CE, other)
    assert said(state("tcp", tail="{} here.")) == int(tiny.tokenize(PETS.prompts("x x x x {} here.")).eos_B.max())
    for name in ("maple", "promptsrc", "mma"):
        assert said(state(name)) == int(tiny.tokenize(PETS.prompts("a photo of a {}.")).eos_B.max())
        assert said(state(name, template="")) == int(tiny.tokenize(PETS.prompts()).eos_B.max())
    assert perlclip.create_method("tcp", tiny).sentence(PETS.template) == "V V V V {}, a type of pet."
    assert perlclip.create_method("mma", tiny).sentence(PETS.template) == "a photo of a {}."


def test_plain_prompts_in_the_usual_template_are_understood(tiny, pixels):
    for name in ("maple", "coop", "mma", "perl"):
        method = perlclip.create_method(name, tiny)
        with torch.no_grad():
            a, b = (method.logits(pixels, method.class_state(c)) for c in (CLASSES, CLASSES.prompts()))
        assert torch.equal(a, b), name
