"""Every family against `transformers`' own model: hidden states, pooled states, embeddings, logits, pixels."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from transformers import SiglipImageProcessorPil

import perlclip
from perlclip import PerlclipError
from perlclip.backbone.load import FAMILIES
from tests import families
from tests.common import CLOSE, loud, random_pixels
from tests.conftest import SIZES, build_clip

NAMES = list(families.SIZES)
PROMPTS = ["a photo of a cat.", "ox", "a photo of a very long named animal."]


@pytest.fixture(scope="module", params=NAMES)
def pair(request, family_folder, family_backbone):
    """A backbone and the model it was made of."""
    return family_backbone(request.param), families.model_of(family_folder(request.param))


def ids_of(backbone, prompts=PROMPTS) -> torch.Tensor:
    """Padded by the tokenizer itself."""
    length = backbone.context_length
    return backbone.tokenizer(prompts, padding="max_length", max_length=length, return_tensors="pt")["input_ids"]


def seen_by(model, pixels: torch.Tensor) -> dict:
    """The inputs of a model for these pixels: NaFlex models want patches, in the order row, column, channel."""
    if model.config.model_type != "siglip2":
        return dict(pixel_values=pixels)
    p = model.config.vision_config.patch_size
    B, _, side, _ = pixels.shape
    g = side // p
    patches = pixels.view(B, 3, g, p, g, p).permute(0, 2, 4, 3, 5, 1).reshape(B, g * g, -1)
    mask = torch.ones(B, g * g, dtype=torch.long)
    return dict(pixel_values=patches, pixel_attention_mask=mask, spatial_shapes=torch.tensor([[g, g]] * B))


def features(output) -> torch.Tensor:
    return F.normalize(output.pooler_output if hasattr(output, "pooler_output") else output, dim=-1)


@torch.no_grad()
def test_images_equal_the_model(pair):
    backbone, model = pair
    pixels, vision = random_pixels(backbone), backbone.vision
    output = model.vision_model(**seen_by(model, pixels), output_hidden_states=True)
    x = vision.embed(pixels)
    for i in range(vision.depth):
        torch.testing.assert_close(x, output.hidden_states[i], **CLOSE)
        x = vision.block(i, x)
    rows_B = torch.zeros(len(pixels), dtype=torch.long)
    h = vision.pool(vision.embed(pixels), rows_B)
    pooled = h if "siglip" in backbone.family else vision.norm(h)
    torch.testing.assert_close(pooled, output.pooler_output, **CLOSE)
    want = features(model.get_image_features(**seen_by(model, pixels)))
    torch.testing.assert_close(backbone.encode_image(pixels), want, **CLOSE)


@torch.no_grad()
def test_texts_equal_the_model(pair):
    backbone, model = pair
    ids, text, tokens = ids_of(backbone), backbone.text, backbone.tokenize(PROMPTS)
    if not text.causal:
        assert torch.equal(tokens.ids_BN, ids) and (tokens.eos_B == backbone.context_length - 1).all()
    hidden = model.text_model(input_ids=ids, output_hidden_states=True).hidden_states
    x = text.embed(ids)
    for i in range(text.depth):
        torch.testing.assert_close(x, hidden[i], **CLOSE)
        x = text.block(i, x)
    pooled = text.pool(text.embed(tokens.ids_BN), tokens.eos_B)
    where_B = tokens.eos_B if text.causal else torch.full((len(ids),), -1)
    torch.testing.assert_close(pooled, x[torch.arange(len(ids)), where_B], **CLOSE)
    want = features(model.get_text_features(input_ids=ids))
    torch.testing.assert_close(backbone.encode_text(PROMPTS), want, **CLOSE)


@torch.no_grad()
def test_logits_equal_the_model_but_for_its_bias(pair):
    """Which a softmax over classes does not see; it is kept for probabilities of single classes."""
    backbone, model = pair
    method, pixels = perlclip.create_method("zero-shot", backbone), random_pixels(backbone)
    want = model(input_ids=ids_of(backbone), **seen_by(model, pixels)).logits_per_image
    found = method.logits(pixels, method.class_state(PROMPTS)) + (backbone.logit_bias or 0.0)
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-5)
    assert (backbone.logit_bias == -12.5) == ("siglip" in backbone.family)


IMAGES = [(50, 81), (64, 64), (33, 20)]


@pytest.mark.parametrize("name", ["siglip", "siglip-odd", "metaclip_2"])
def test_pixels_are_the_processors(family_backbone, name):
    """SigLIP's are squashed to a square, bicubic, by its own mean; its processor says so, not we."""
    loaded = family_backbone(name).preprocess
    size = families.SIZES[name]
    processor = families.processor_of(size["type"], size["patch"], size["image"])
    for number, shape in enumerate(IMAGES):
        image = Image.fromarray(np.random.default_rng(number).integers(0, 256, (*shape, 3), dtype=np.uint8))
        want = processor(image, return_tensors="pt")["pixel_values"][0]
        assert torch.equal(loaded.test_view(image), want)
        assert torch.equal(loaded.pixels(torch.from_numpy(loaded.crop(image))), want), "of bytes that are kept"


def test_pixels_of_a_siglip_2_are_bilinear_as_its_processor_says(family_folder, tmp_path):
    """SigLIP's are bicubic, and the same class makes both."""
    folder = shutil.copytree(family_folder("siglip"), tmp_path / "siglip")
    processor = SiglipImageProcessorPil(size={"height": 32, "width": 32}, resample=Image.Resampling.BILINEAR)
    processor.save_pretrained(folder)
    loaded = perlclip.load_backbone(str(folder), device="cpu").preprocess
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 81, 3), dtype=np.uint8))
    want = processor(image, return_tensors="pt")["pixel_values"][0]
    assert torch.equal(loaded.test_view(image), want) and loaded.resample == Image.Resampling.BILINEAR
    assert torch.equal(loaded.pixels(torch.from_numpy(loaded.crop(image))), want)


def test_pixels_of_naflex_are_its_processors_for_square_images(family_folder, family_backbone):
    backbone = family_backbone("siglip2")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 50, 3), dtype=np.uint8))
    theirs = families.processor_of("siglip2", 8, 32)(image, return_tensors="pt")["pixel_values"]
    model = families.model_of(family_folder("siglip2"))
    ours = seen_by(model, backbone.preprocess.test_view(image)[None])["pixel_values"]
    torch.testing.assert_close(ours, theirs)


# ---- PERL, whose thoughts no readout sees ----


@pytest.mark.parametrize("name", ["siglip", "siglip-odd"])
@pytest.mark.parametrize("thoughts", [0, 3])
@pytest.mark.parametrize("start", [5, -1])
@torch.no_grad()
def test_refinement_equals_the_longer_sequence(family_folder, family_backbone, name, thoughts, start):
    """The pooling head reads the patches alone; of the last block, too, Q, K and V of frozen rows are kept."""
    backbone = family_backbone(name)
    vision, head = backbone.vision, families.model_of(family_folder(name)).vision_model
    start = start % vision.depth
    x_BND, front_BkD = torch.randn(4, vision.patches, vision.width), torch.randn(4, thoughts, vision.width)
    rows_B = torch.zeros(4, dtype=torch.long)
    for room in (0, 3):
        refinement = perlclip.backbone.Refinement(vision, x_BND, rows_B, start, room)
        got = refinement.pool(front_BkD if thoughts else None)
        longer = vision.run(torch.cat([front_BkD, x_BND], 1), start, vision.depth)
        want = head.head(head.post_layernorm(longer[:, thoughts:]))
        torch.testing.assert_close(got, want, **CLOSE)
        assert refinement.qkv_BME is not None


@torch.no_grad()
def test_padding_counts_without_a_causal_mask(family_backbone):
    """So that texts cannot be cut: another padding is another text."""
    text = family_backbone("siglip").text
    ids, rows_B = torch.full((2, 64), 7), torch.tensor([63, 63])
    ids[1, 40] = 8
    pooled = text.pool(text.embed(ids), rows_B)
    assert not torch.allclose(pooled[0], pooled[1], atol=1e-3)


# ---- sizes ----


@pytest.mark.parametrize("name", ["small", "siglip", "metaclip_2", "siglip2"])
@torch.no_grad()
def test_other_image_sizes_interpolate_as_transformers_does(clip_folders, family_folder, name):
    folder = clip_folders["small"] if name == "small" else family_folder(name)
    backbone, model = perlclip.load_backbone(str(folder), device="cpu", image_size=52), families.model_of(folder)
    assert backbone.preprocess.size == 52 and backbone.vision.patches == 6 * 6
    pixels = torch.randn(2, 3, 52, 52)
    if name == "siglip2":
        inputs = seen_by(model, pixels[..., :48, :48])
    else:
        inputs = dict(pixel_values=pixels[..., :48, :48], interpolate_pos_encoding=True)
    want = features(model.get_image_features(**inputs))
    torch.testing.assert_close(backbone.encode_image(pixels), want, **CLOSE)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 60, 3), dtype=np.uint8))
    assert backbone.preprocess.test_view(image).shape == (3, 52, 52)


def test_an_image_size_is_part_of_what_an_adapter_is_for(clip_folder, backbone, tmp_path):
    large = perlclip.load_backbone(str(clip_folder), device="cpu", image_size=48)
    own = perlclip.load_backbone(str(clip_folder), device="cpu", image_size=32)
    assert own.fingerprint == backbone.fingerprint != large.fingerprint and own.image_size is None
    method = perlclip.create_method("perl", large)
    perlclip.save_adapter(method, tmp_path / "a", class_names=["cat"], template="a {}.")
    loaded = perlclip.load_adapter(tmp_path / "a", device="cpu")
    assert loaded.method.backbone.preprocess.size == 48 and loaded.info["image_size"] == 48
    assert loaded.info["backbone_family"] == "clip"
    with pytest.raises(PerlclipError, match="images of 48 pixels"):
        perlclip.load_adapter(tmp_path / "a", backbone=backbone)
    for wrong in (7, 5000, 33.5, True):
        with pytest.raises(PerlclipError, match="image_size must be a whole number from 8"):
            perlclip.load_backbone(str(clip_folder), image_size=wrong)


def test_an_adapter_names_its_family_and_is_refused_on_another(family_backbone, backbone, tmp_path):
    method = perlclip.create_method("perl", family_backbone("siglip"))
    perlclip.save_adapter(method, tmp_path / "a", class_names=["cat"], template="a {}.")
    info = perlclip.load_adapter(tmp_path / "a", device="cpu").info
    assert info["backbone_family"] == "siglip" and "image_size" not in info
    assert "(siglip)" in (tmp_path / "a" / "README.md").read_text()
    with pytest.raises(PerlclipError, match=r"\(\w+, siglip\); it does not fit .* \(\w+, clip\)"):
        perlclip.load_adapter(tmp_path / "a", backbone=backbone)


# ---- OpenCLIP ----


@pytest.mark.parametrize("act", ["gelu", "quick_gelu"])
@pytest.mark.parametrize("size", SIZES)
@torch.no_grad()
def test_an_openclip_checkpoint_is_the_clip_of_its_weights(tmp_path, size, act):
    same = build_clip(tmp_path / "clip", **{**SIZES[size], "act": act})
    folder = families.as_openclip(same, tmp_path / "openclip", act=act)
    found, want = (perlclip.load_backbone(str(each), device="cpu") for each in (folder, same))
    assert (found.family, found.fingerprint) == ("clip", want.fingerprint)
    model, pixels = families.model_of(same), random_pixels(want)
    torch.testing.assert_close(found.encode_image(pixels), features(model.get_image_features(pixels)), **CLOSE)
    torch.testing.assert_close(found.encode_text(PROMPTS), want.encode_text(PROMPTS), **CLOSE)


OPENCLIP_VIEWS = {
    "usual": ({}, dict(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})),
    "squashed": (
        {"resize_mode": "squash", "interpolation": "bilinear", "mean": [0.5] * 3, "std": [0.25] * 3},
        dict(
            size={"height": 32, "width": 32}, do_center_crop=False, resample=Image.Resampling.BILINEAR,
            image_mean=[0.5] * 3, image_std=[0.25] * 3,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("said", "settings"), OPENCLIP_VIEWS.values(), ids=OPENCLIP_VIEWS)
def test_openclips_views(clip_folder, tmp_path, said, settings):
    from transformers import CLIPImageProcessorPil

    folder = families.as_openclip(clip_folder, tmp_path / "openclip", act="quick_gelu", preprocess=said)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 81, 3), dtype=np.uint8))
    want = CLIPImageProcessorPil(**settings)(image, return_tensors="pt")["pixel_values"][0]
    assert torch.equal(perlclip.load_backbone(str(folder)).preprocess.test_view(image), want)


WRONG = {
    "timm": (("vision_cfg", "timm_model_name", "vit_base"), "vision_cfg.timm_model_name = 'vit_base': it is no CLIP"),
    "pooling": (("vision_cfg", "attentional_pool", True), "attentional_pool = True: it is no CLIP of two ViTs"),
    "text": (("text_cfg", "hf_model_name", "xlm-roberta-base"), "text_cfg.hf_model_name"),
    "mask": (("text_cfg", "no_causal_mask", True), "no_causal_mask"),
    "width": (("vision_cfg", "width", 50), "a width that its heads do not divide"),
    "size": (("vision_cfg", "layers", "many"), "vision_cfg.layers = 'many', which is no size"),
    "fewer": (("text_cfg", "layers", 5), "its weights have 'text_model.encoder.layers.*, for which its config has no"),
}


@pytest.mark.parametrize(("change", "words"), WRONG.values(), ids=WRONG)
def test_another_openclip_model_is_refused(clip_folder, tmp_path, change, words):
    folder = families.as_openclip(clip_folder, tmp_path / "openclip", act="quick_gelu")
    path, (part, key, value) = folder / "open_clip_config.json", change
    config = json.loads(path.read_text())
    config["model_cfg"][part][key] = value
    path.write_text(json.dumps(config))
    with pytest.raises(PerlclipError, match=words):
        perlclip.load_backbone(str(folder))


def test_openclip_files_that_are_not_right_are_named(clip_folder, backbone, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = families.as_openclip(clip_folder, tmp_path / "openclip", act="quick_gelu")
    weights = folder / "open_clip_model.safetensors"
    tensors = load_file(weights)
    save_file({**tensors, "visual.attn_pool.query": torch.zeros(2)}, weights)
    with pytest.raises(PerlclipError, match=r"has a tensor 'visual.attn_pool.query', which no CLIP"):
        perlclip.load_backbone(str(folder))
    save_file({key: value for key, value in tensors.items() if key != "visual.proj"}, weights)
    with pytest.raises(PerlclipError, match=r"lacks 1 weights, the first being 'visual_projection.weight'"):
        perlclip.load_backbone(str(folder))
    save_file({**tensors, "ln_final.bias": torch.zeros(5)}, weights)
    with pytest.raises(PerlclipError, match=r"'text_model.final_layer_norm.bias' of shape \(5,\)"):
        perlclip.load_backbone(str(folder))
    save_file({**tensors, "text_projection.weight": torch.zeros(2)}, weights)
    with pytest.raises(PerlclipError, match=r"has a tensor 'text_projection.weight', which no CLIP"):
        perlclip.load_backbone(str(folder))
    named = {f"text.{key}" if not key.startswith(("visual", "logit")) else key: value for key, value in tensors.items()}
    save_file({**named, "logit_scale": tensors["logit_scale"].view(1), "logit_bias": torch.tensor(-9.0)}, weights)
    same = perlclip.load_backbone(str(folder), device="cpu")
    assert same.logit_bias == -9 and torch.equal(same.encode_text(["ox"]), backbone.encode_text(["ox"]))
    weights.unlink()
    with pytest.raises(PerlclipError, match="what is pickled is not opened"):
        perlclip.load_backbone(str(folder))
    (folder / "open_clip_config.json").write_text("[]")
    weights.write_bytes(b"")
    with pytest.raises(PerlclipError, match="has no model_cfg"):
        perlclip.load_backbone(str(folder))


# ---- what is known, and what is not ----


def test_an_unknown_type_lists_the_known_ones(tmp_path, write_json):
    write_json(tmp_path / "config.json", {"model_type": "align"})
    with pytest.raises(PerlclipError, match="is a 'align' model; perlclip knows 'clip', 'metaclip_2', 'siglip'"):
        perlclip.load_backbone(str(tmp_path))
    assert {size["type"] for size in families.SIZES.values()} == set(FAMILIES) - {"clip"}, "every family is compared"


def test_siglips_own_tokenizer(family_folder, tmp_path):
    """Made by sentencepiece: small letters, no punctuation, padded with its end of text."""
    import io

    spm = pytest.importorskip("sentencepiece")
    from transformers import SiglipTokenizer

    folder, model = shutil.copytree(family_folder("siglip"), tmp_path / "siglip"), io.BytesIO()
    for path in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
        path.unlink()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(["a photo of a cat", "the quick brown fox jumps over the lazy dog"] * 5),
        model_writer=model, vocab_size=40, hard_vocab_limit=False, minloglevel=2, pad_id=0, eos_id=1, unk_id=2,
        bos_id=-1,
    )  # fmt: skip
    (tmp_path / "spiece.model").write_bytes(model.getvalue())
    SiglipTokenizer(vocab_file=str(tmp_path / "spiece.model")).save_pretrained(folder)
    backbone = perlclip.load_backbone(str(folder), device="cpu")
    assert type(backbone.tokenizer) is SiglipTokenizer and backbone.text.starts == 0
    tokens = backbone.tokenize(["A photo of a CAT.", "a photo of a cat"])
    assert torch.equal(tokens.ids_BN[0], tokens.ids_BN[1]) and tokens.ids_BN.shape == (2, 64)
    assert torch.equal(tokens.ids_BN, ids_of(backbone, ["a photo of a cat"] * 2)) and tokens.ids_BN[0, -1] == 1
    method, pixels = loud(perlclip.create_method("coop", backbone)), random_pixels(backbone)
    assert torch.isfinite(method.logits(pixels, method.class_state(["cat", "dog"]))).all()


def test_a_tokenizer_that_pads_on_the_left(family_folder, tmp_path):
    folder = shutil.copytree(family_folder("siglip"), tmp_path / "siglip")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"padding_side": "left"}))
    backbone = perlclip.load_backbone(str(folder), device="cpu")
    assert torch.equal(backbone.tokenize(PROMPTS).ids_BN, ids_of(backbone)) and ids_of(backbone)[0, 0] == 0
    with pytest.raises(PerlclipError, match="pads texts on the left"):
        perlclip.create_method("coop", backbone).class_state(["cat", "dog"])


def test_texts_of_siglip_are_in_small_letters(family_backbone):
    backbone = family_backbone("siglip")
    assert torch.equal(backbone.tokenize(["A Cat"]).ids_BN, backbone.tokenize(["a cat"]).ids_BN)
    clip = family_backbone("metaclip_2")
    assert not clip.lowers


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@torch.no_grad()
def test_half_precision_stays_close(family_folder, dtype):
    folder = str(family_folder("siglip"))
    whole, half = (perlclip.load_backbone(folder, device="cpu", dtype=each) for each in ("float32", dtype))
    assert half.dtype == getattr(torch, dtype) and half.fingerprint == whole.fingerprint
    pixels = random_pixels(whole)
    for name in ("perl", "zero-shot"):
        full, rough = (perlclip.create_method(name, each).encode_image(pixels) for each in (whole, half))
        assert rough.dtype == torch.float32 and (full * rough).sum(-1).min() > 0.99
