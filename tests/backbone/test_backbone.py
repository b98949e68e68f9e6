"""Loading: folders, hub names, fingerprints, and what is refused."""

import json
import shutil

import pytest
import torch

import perlclip
from perlclip import PerlclipError
from tests.conftest import SIZES, build_clip

HUB_NAME = "openai/clip-vit-base-patch16"


@pytest.fixture
def hub_cache(clip_folder, tmp_path, monkeypatch):
    """A hub cache as `huggingface_hub` lays it out, so that loading by hub name runs without a network."""
    commit = "0" * 40
    repo = tmp_path / "hub" / f"models--{HUB_NAME.replace('/', '--')}"
    shutil.copytree(clip_folder, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_hub_name_loads_from_the_hub_cache(hub_cache, backbone):
    loaded = perlclip.load_backbone(HUB_NAME)
    assert loaded.name == HUB_NAME
    assert loaded.fingerprint == backbone.fingerprint


def test_an_unreachable_hub_name_is_one_sentence(hub_cache):
    with pytest.raises(PerlclipError, match="cannot load backbone 'openai/clip-vit-large-patch14'") as caught:
        perlclip.load_backbone("openai/clip-vit-large-patch14")
    assert "\n" not in str(caught.value)


def test_frozen_in_fact(any_backbone):
    for tower in (any_backbone.vision, any_backbone.text):
        assert not tower.training
        assert not any(p.requires_grad for p in tower.parameters())


def test_sizes_are_read_from_the_config(clip_folders):
    for name, size in SIZES.items():
        loaded = perlclip.load_backbone(str(clip_folders[name]))
        assert (loaded.vision.width, loaded.vision.depth) == (size["vision"][0], size["vision"][2])
        assert (loaded.text.width, loaded.text.depth) == (size["text"][0], size["text"][2])
        assert (loaded.embed_dim, loaded.context_length) == (size["embed"], size["context"])
        assert loaded.preprocess.size == size["image"]


def test_fingerprint_sees_weights_and_settings(clip_folder, backbone, tmp_path):
    build_clip(tmp_path / "other", **SIZES["small"], seed=1)
    assert perlclip.load_backbone(str(tmp_path / "other")).fingerprint != backbone.fingerprint
    shutil.copytree(clip_folder, tmp_path / "same")
    config = json.loads((tmp_path / "same" / "config.json").read_text())
    config["vision_config"]["hidden_act"] = "gelu"
    (tmp_path / "same" / "config.json").write_text(json.dumps(config))
    assert perlclip.load_backbone(str(tmp_path / "same")).fingerprint != backbone.fingerprint


def test_eos_is_the_first_one(backbone):
    tokens = backbone.tokenize(["ab", "abcd"])
    eos = backbone.tokenizer.eos_token_id
    assert tokens.eos_B.tolist() == [3, 5]
    assert tokens.ids_BN[0].tolist()[3:] == [eos] * 3


def test_a_prompt_longer_than_the_context_is_refused(backbone):
    with pytest.raises(PerlclipError, match="prompt of 92 tokens is longer than the context of 77"):
        backbone.tokenize(["x" * 90])


def test_wrong_sources_are_named(tmp_path, write_json, clip_folder):
    cases = {
        "no/such/folder": "no backbone",
        str(tmp_path): "has no config.json",
        "clippy": "no backbone 'clippy'",
    }
    for source, words in cases.items():
        with pytest.raises(PerlclipError, match=words):
            perlclip.load_backbone(source)
    write_json(tmp_path / "config.json", {"model_type": "bert"})
    with pytest.raises(PerlclipError, match="is a 'bert' model"):
        perlclip.load_backbone(str(tmp_path))
    broken = tmp_path / "broken"
    shutil.copytree(clip_folder, broken)
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(PerlclipError, match="cannot load backbone"):
        perlclip.load_backbone(str(broken))


def test_missing_weights_are_not_made_up(clip_folder, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "clip"
    shutil.copytree(clip_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["visual_projection.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(PerlclipError, match=r"lacks 1 weights, the first being 'visual_projection.weight'"):
        perlclip.load_backbone(str(folder))


def test_unknown_device_and_dtype(clip_folder):
    with (
        pytest.raises(PerlclipError, match="device 'cuda' is not available")
        if not torch.cuda.is_available()
        else (pytest.raises(PerlclipError, match="device"))
    ):
        perlclip.load_backbone(str(clip_folder), device="cuda" if not torch.cuda.is_available() else "xpu9")
    with pytest.raises(PerlclipError, match="did you mean 'float32'"):
        perlclip.load_backbone(str(clip_folder), dtype="float23")
