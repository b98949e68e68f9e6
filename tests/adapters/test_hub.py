"""Push and pull with the real client against a small hub of our own: what is asked for, recorded, refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import ModelCard, constants

import perlclip
from perlclip import PerlclipError
from perlclip.adapters.folder import CARD, CONFIG, HUB, LARGEST, OWN_HASH, WEIGHTS, read_info
from perlclip.adapters.hub import HubName
from tests.adapters.hub_server import TOKEN, Hub
from tests.adapters.test_adapter import change, folder
from tests.cli.test_cli import fails, run

__all__ = ["folder"]  # a fixture
REPO = "me/pets"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The client's settings are read when it is imported; here they are those that the environment would give."""
    server = Hub()
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    settings = dict(
        ENDPOINT=server.url,
        HUGGINGFACE_CO_URL_TEMPLATE=server.url + "/{repo_id}/resolve/{revision}/{filename}",
        HF_HUB_CACHE=str(tmp_path / "cache"),
        HF_TOKEN_PATH=str(tmp_path / "no token"),
        HF_HUB_DISABLE_XET=True,  # whose protocol is another one
    )
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    yield server
    server.shutdown()
    server.server_close()


def test_pushed_and_pulled_it_is_the_same_adapter(hub, folder, backbone, tmp_path):
    (folder / "notes.txt").write_text("private")
    commit = perlclip.push_adapter(folder, REPO, private=True, dataset="oxford/pets")
    ((oid, files),) = hub.repos[REPO]
    assert oid == commit and set(files) == {CONFIG, WEIGHTS, CARD} and hub.private[REPO]
    pulled = perlclip.pull_adapter(REPO, tmp_path / "pulled")
    assert sorted(path.name for path in pulled.iterdir()) == sorted([CARD, CONFIG, WEIGHTS])
    assert read_info(pulled)[HUB] == {"repo": REPO, "revision": commit}
    here, there = (perlclip.load_adapter(place, backbone=backbone) for place in (folder, pulled))
    assert here.fingerprint == there.fingerprint and here.class_names == there.class_names
    at_once = perlclip.load_adapter(REPO, backbone=backbone)
    assert at_once.fingerprint == here.fingerprint and at_once.info[HUB]["revision"] == commit
    assert perlclip.Classifier.from_pretrained(f"{REPO}@{commit}", backbone=backbone).class_names == here.class_names


def test_the_hubs_card_says_library_backbone_data_and_metrics_and_no_path(hub, folder, backbone):
    perlclip.push_adapter(folder, REPO, dataset="oxford/pets")
    files = hub.repos[REPO][-1][1]
    card = ModelCard(files[CARD].decode())
    assert card.data.library_name == "perlclip" and card.data.datasets == ["oxford/pets"]
    (result,) = card.data.eval_results
    assert (result.dataset_type, result.metric_type, result.metric_value) == ("oxford/pets", "accuracy", 81.25)
    assert f'from_pretrained("{REPO}")' in card.text and card.data.base_model == Path(backbone.name).name
    assert not any(backbone.name.encode() in content for content in files.values())
    assert hub.cards == [files[CARD].decode()], "the hub has looked at it before"
    hub.complaints = [{"message": '"base_model" is odd'}]
    with pytest.raises(PerlclipError, match=r"^the hub and me/pets: [^\n]*\"base_model\" is odd$"):
        perlclip.push_adapter(folder, REPO)
    hub.complaints = []
    (folder / CARD).write_text("My own words.")
    perlclip.push_adapter(folder, REPO)
    assert hub.repos[REPO][-1][1][CARD] == b"My own words."


def test_a_revision_is_a_commit_for_ever(hub, folder, backbone):
    first = perlclip.push_adapter(folder, REPO)
    method = perlclip.create_method("perl", backbone, seed=9)
    second = perlclip.Classifier(method, ["cat", "dog"]).push_to_hub(REPO)
    assert first != second
    assert perlclip.load_adapter(REPO, backbone=backbone).class_names == ("cat", "dog")
    for words in (dict(folder=REPO, revision=first), dict(folder=f"{REPO}@{first}")):
        old = perlclip.load_adapter(**words, backbone=backbone)
        assert old.info[HUB]["revision"] == first and len(old.class_names) == 3
    with pytest.raises(PerlclipError, match="has no revision 'v9'"):
        perlclip.load_adapter(REPO, revision="v9", backbone=backbone)
    hub.sha = second
    with pytest.raises(PerlclipError, match=f"answered with revision '{second}'"):
        perlclip.load_adapter(REPO, revision=first, backbone=backbone)
    hub.sha = "../../x"
    with pytest.raises(PerlclipError, match=r"answered with revision '\.\./\.\./x'"):
        perlclip.load_adapter(REPO, backbone=backbone)


def test_only_files_of_an_adapter_are_downloaded_and_none_that_is_too_large(hub, folder, tmp_path):
    perlclip.push_adapter(folder, REPO)
    hub.commit(REPO, {"pytorch_model.bin": b"pickle", "run.py": b"import os", f"../../{CARD}": b"", "/etc/x": b""})
    hub.asked.clear()
    perlclip.pull_adapter(REPO, tmp_path / "pulled")
    assert {line.split("/")[-1] for line in hub.asked if "/resolve/" in line} == {CONFIG, WEIGHTS, CARD}
    for size, words in ((2**40, "1,048,576 MiB, and 1024 are allowed"), (None, "unknown size")):
        hub.sizes, hub.asked = {WEIGHTS: size}, []
        with pytest.raises(PerlclipError, match=words):
            perlclip.pull_adapter(REPO, tmp_path / "pulled")
        assert not [line for line in hub.asked if "/resolve/" in line]
    hub.commit("me/other", {"README.md": b""})
    hub.sizes = {}
    with pytest.raises(PerlclipError, match=f"is not an adapter: it has no {CONFIG}"):
        perlclip.pull_adapter("me/other", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_hub_that_lies_is_refused_in_one_sentence(hub, folder, tmp_path, monkeypatch):
    """About sizes, which end the download; about commits, by which files are kept; about what belongs together."""
    perlclip.push_adapter(folder, REPO)
    monkeypatch.setitem(LARGEST, WEIGHTS, 1000)
    hub.sizes = {WEIGHTS: 999}
    with pytest.raises(PerlclipError, match=f"^{WEIGHTS} of {REPO} is larger than the hub said: more than 0 MiB came$"):
        perlclip.pull_adapter(REPO, tmp_path / "pulled")
    monkeypatch.setitem(LARGEST, WEIGHTS, 2**30)
    hub.sizes, hub.headers = {}, {"X_Repo_Commit": "../../../outside"}
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "new" / "cache"))
    with pytest.raises(PerlclipError, match=r"^the hub and me/pets: Invalid pointer path"):
        perlclip.pull_adapter(REPO, tmp_path / "pulled")
    hub.headers = {}
    info = {key: value for key, value in read_info(folder).items() if key not in ("weights_sha256", OWN_HASH)}
    hub.commit(REPO, {CONFIG: json.dumps(info).encode()})
    with pytest.raises(PerlclipError, match="'weights_sha256' is missing"):
        perlclip.pull_adapter(REPO, tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists() and not list(tmp_path.rglob("outside"))


def test_what_was_damaged_there_is_refused_and_replaces_nothing(hub, folder, tmp_path):
    perlclip.push_adapter(folder, REPO)
    pulled = perlclip.pull_adapter(REPO, tmp_path / "pulled")
    before = {path.name: path.read_bytes() for path in pulled.iterdir()}
    weights = bytearray(before[WEIGHTS])
    weights[-1] ^= 1
    hub.commit(REPO, {WEIGHTS: bytes(weights)})
    with pytest.raises(PerlclipError, match="do not match the hash"):
        perlclip.pull_adapter(REPO, pulled)
    assert {path.name: path.read_bytes() for path in pulled.iterdir()} == before


def test_a_folder_here_goes_first(hub, folder, backbone, tmp_path):
    perlclip.push_adapter(folder, REPO)
    shutil.copytree(folder, tmp_path / REPO)
    change(tmp_path / REPO, class_names=["a", "b", "c"])
    assert perlclip.load_adapter(REPO, backbone=backbone).class_names == ("a", "b", "c")
    with pytest.raises(PerlclipError, match="is a folder here"):
        perlclip.load_adapter(REPO, revision="main", backbone=backbone)
    shutil.rmtree(tmp_path / "me")
    hub.asked.clear()
    with pytest.raises(PerlclipError, match=r"^no adapter folder me/pets$"):
        perlclip.load_adapter(Path(REPO), backbone=backbone)
    assert not hub.asked, "a service looks for names below its folder so"


def test_without_a_network_the_cached_one_is_used(hub, folder, backbone, monkeypatch):
    commit = perlclip.push_adapter(folder, REPO)
    perlclip.load_adapter(REPO, revision="main", backbone=backbone)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for revision in (None, commit):
        found = perlclip.load_adapter(REPO, revision=revision, backbone=backbone)
        assert found.info[HUB] == {"repo": REPO, "revision": commit}
    assert "cannot be reached for me/other" in fails("predict", "me/other", folder / CONFIG)


def test_errors_are_one_sentence_without_the_token(hub, folder, tmp_path, monkeypatch):
    perlclip.push_adapter(folder, REPO)
    hub.gated.add(REPO)
    said = [fails("pull", "me/nothing", "--out", "x"), fails("push", folder, "pets"), fails("pull", "..", "--out", "x")]
    said.append(fails("predict", "me/nothing", folder / CONFIG))
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    said.append(fails("push", folder, REPO))
    monkeypatch.delenv("HF_TOKEN")
    said += [fails("pull", REPO, "--out", "x"), fails("push", folder, REPO)]
    wanted = ["no repository me/nothing", "is no repository of the hub", "is no repository of the hub"]
    wanted += ["no adapter folder me/nothing here, and the hub has no repository", "may not do that", "is gated"]
    wanted += ["without a token of the hub: log in"]
    for words, sentence in zip(wanted, said, strict=True):
        assert words in sentence and "hf_" not in sentence.replace("hf_auth", "")
    assert not (tmp_path / "x").exists()


def test_names_of_repositories():
    assert HubName.parse("a/b") == HubName("a/b") and HubName.parse("a/b.c-d_e@v1.0") == HubName("a/b.c-d_e", "v1.0")
    assert HubName.parse("a/b@refs/pr/1") == HubName("a/b", "refs/pr/1")
    for no in (
        "a",
        "/a/b",
        "./a",
        "~/a",
        "a/b/c",
        "./a/b",
        "a/..",
        "../a",
        "a//b/",
        "a/b@",
        "a b/c",
        "a/b.",
        "a--b/c",
        "",
    ):
        assert HubName.parse(no) is None, no
    with pytest.raises(PerlclipError, match="names a revision already"):
        HubName.parse("a/b@c", "d")


def test_the_commands_go_where_the_environment_says(hub, folder, tmp_path):
    """In a process of its own, as a user has it."""
    words = (
        "import sys; from perlclip.cli import main; a = sys.argv[1:]; main(a[:3], standalone_mode=False); main(a[3:])"
    )
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", words, "push", str(folder), REPO, "pull", f"{REPO}@main", "--out", "pulled"]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    commit = hub.repos[REPO][-1][0]
    assert result.stdout.splitlines() == [f"{REPO}@{commit}", f"pulled: {REPO}@{commit}"], result.stderr
    assert result.stderr == "" and commit in run("inspect", tmp_path / "pulled").stdout
