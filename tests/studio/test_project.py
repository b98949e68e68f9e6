"""A labelling project: labels that outlive kills, what an undo means, and features that are computed once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from perlclip.data import load_images
from perlclip.data.images import images_under
from perlclip.errors import PerlclipError
from perlclip.studio.journal import Journal
from perlclip.studio.kept import Features, Thumbnails
from perlclip.studio.project import FOLDER, NONE, SKIPPED, Project
from tests.conftest import draw_tree


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "images").mkdir()
    for i in range(12):
        Image.new("RGB", (40, 30), (20 * i, 0, 0)).save(tmp_path / "images" / f"{i:02}.png")
    return tmp_path / "images"


def named(project: Project, *names: str) -> tuple[int, ...]:
    project.set_classes([(None, name) for name in names])
    return project.labels().numbers


def test_labels_are_there_when_it_is_opened_again(folder):
    with Project(folder) as project:
        cat, dog = named(project, "cat", "dog")
        project.label([0, 3], cat)
        project.label([1], dog)
        project.label([2], SKIPPED)
        before = project.labels()
        assert before.of == {0: cat, 3: cat, 1: dog, 2: SKIPPED} and before.given() == {0: 0, 3: 0, 1: 1}
    with Project(folder) as project:
        assert project.labels() == before
        project.set_classes([(dog, "puppy"), (None, "ox"), (cat, "cat")])
        after = project.labels()
        assert after.names == ("puppy", "ox", "cat") and after.given() == {0: 2, 3: 2, 1: 0}
        project.set_classes([(cat, "cat")])  # the others' labels are put away, not lost
        assert project.labels().given() == {0: 0, 3: 0}
        project.set_classes([(cat, "cat"), (dog, "dog")])
        assert project.labels().given() == {0: 0, 3: 0, 1: 1}


def test_an_undo_takes_back_the_last_stroke_of_whoever_asks(folder):
    with Project(folder) as project:
        cat, dog = named(project, "cat", "dog")
        project.label([0], cat, by="left")
        project.label([0, 1], dog, by="right")
        assert project.undo(by="left") == [0] and project.labels().of == {0: dog, 1: dog}
        assert project.undo(by="left") == []
        assert project.undo(by="right") == [0, 1] and project.labels().of == {}
        project.label([0], cat, by="left", stroke="once")
        project.label([0], dog, by="left", stroke="once")  # sent again: it counts once, as it was
        assert project.labels().of == {0: cat}
        assert project.undo(by="left", stroke="back") == project.undo(by="left", stroke="back") == [0]
        project.label([5], cat)
        project.label([5], NONE)
        assert project.labels().of == {}


@pytest.mark.parametrize("torn", [b'{"op": "label", "ima', b"\xff\x00", b'{"op": "label"}'])
def test_a_torn_last_line_is_nothing(folder, torn):
    with Project(folder) as project:
        (cat,) = named(project, "cat")
        project.label([0], cat)
    log = folder / FOLDER / "labels.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole + torn)
    with Project(folder) as project:
        assert project.labels().of == {0: cat} and log.read_bytes() == whole
        project.label([1], cat)
    with Project(folder) as project:
        assert set(project.labels().of) == {0, 1}


@pytest.mark.parametrize("line", ["{", "[1]", '{"op": "label"}', '{"op": "undo", "of": 0}', '{"op": "fly"}', "{}"])
def test_damage_in_the_middle_is_said(folder, line):
    with Project(folder) as project:
        named(project, "cat")
    log = folder / FOLDER / "labels.jsonl"
    log.write_text(f"{log.read_text()}{line}\n")
    with pytest.raises(PerlclipError, match=r"labels.jsonl is damaged in line 2"), Project(folder):
        pass


def test_a_full_disk_leaves_no_half_line(folder, monkeypatch):
    with Project(folder) as project:
        (cat,) = named(project, "cat")
        before = project.journal.path.read_bytes()
        real = os.write
        monkeypatch.setattr(os, "write", lambda file, data: real(file, bytes(data)[:7]) and _full())
        with pytest.raises(PerlclipError, match=r"labels\.jsonl"):
            project.label([0], cat)
        monkeypatch.undo()
        assert project.journal.path.read_bytes() == before and project.labels().of == {}
        project.label([0], cat)
        assert project.labels().of == {0: cat}


def _full() -> int:
    raise OSError(28, "No space left on device")


WRITER = """
import sys
from perlclip.studio.project import Project
with Project(sys.argv[1]) as project:
    for n in range(10**6):
        project.label([n % 12], project.labels().numbers[0])
        print(project.version, flush=True)
"""


def test_a_kill_loses_nothing_that_was_said_to_be_written(folder):
    with Project(folder) as project:
        named(project, "cat")
    process = subprocess.Popen([sys.executable, "-c", WRITER, folder], stdout=subprocess.PIPE, text=True)
    told = [process.stdout.readline() for _ in range(20)]
    with pytest.raises(PerlclipError, match="another perlclip studio"), Project(folder):
        pass  # while it lives, nobody else may write
    process.send_signal(signal.SIGKILL)
    told += process.communicate()[0].splitlines(keepends=True)
    told = [line for line in told if line.endswith("\n")]
    with Project(folder) as project:
        assert project.version >= int(told[-1]) >= 21
        assert len(project.labels().of) == min(12, project.version - 1)


def test_what_cannot_be_is_refused(folder, tmp_path):
    with Project(folder) as project:
        (cat,) = named(project, "cat")
        for places, value in (([0], cat + 1), ([12], cat), ([-1], cat), ([], cat), ([0], -3)):
            with pytest.raises(PerlclipError):
                project.label(places, value)
        for classes in ([], [(None, "a"), (None, "A")], [(None, " ")], [(7, "a")], [(cat, "a"), (cat, "b")]):
            with pytest.raises(PerlclipError):
                project.set_classes(classes)
        with pytest.raises(PerlclipError):
            project.set_classes([(None, "a")], "no place for a name")
        assert project.version == 1
    (tmp_path / "empty").mkdir()
    for wrong in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(PerlclipError, match="images"), Project(wrong):
            pass


def test_held_out_images_stay_held_out(folder):
    for i in range(200):
        (folder / f"more-{i}.png").write_bytes((folder / "00.png").read_bytes())
    with Project(folder) as project:
        held = {project.names[i] for i in range(len(project)) if project.is_held_out(i)}
        assert 20 < len(held) < 65
        (cat,) = named(project, "cat")
        project.label(list(range(60)), cat)
        train, tested = project.split(project.labels())
        assert len(train) + len(tested) == 60 and {project.names[i] for i in tested} <= held
    (folder / "00.png").unlink()  # all places move
    with Project(folder) as project:
        assert {project.names[i] for i in range(len(project)) if project.is_held_out(i)} == held - {"00.png"}
        assert len(project.labels().of) == 59


def test_names_that_are_no_text_and_hidden_folders(folder):
    strange = os.fsdecode(b"caf\xe9 <b>&.png")
    (folder / "00.png").rename(folder / strange)
    with Project(folder) as project:
        (cat,) = named(project, "<script>alert(1)</script>")
        project.label([project.names.index(strange)], cat)
    with Project(folder) as project:
        assert [project.names[i] for i in project.labels().of] == [strange]
        assert list(project.rows(project.labels())) == [(strange, "<script>alert(1)</script>")]
    assert len(images_under(folder)) == 12


def test_a_project_does_not_disturb_data_loading(tmp_path):
    tree = draw_tree(tmp_path / "tree", images=2)
    with Project(tree) as project:
        Thumbnails(project.folder, project.paths, project.keys).get(0)
        assert len(project) == 6
    assert len(load_images(tree)) == 6


def test_features_are_kept_by_file_and_backbone(folder, backbone, tiny):
    with Project(folder) as project:
        v_NE = torch.nn.functional.normalize(torch.randn(12, backbone.embed_dim), dim=-1)
        kept = Features(project.folder, backbone, project.keys)
        kept.add([0, 1, 2], v_NE[:3])
        kept.write()
        kept.add([3], v_NE[3:4])
        kept.write()
    again = Features(project.folder, backbone, project.keys)
    assert again.have_N.tolist() == [True] * 4 + [False] * 8 and torch.equal(again.v_NE[:4], v_NE[:4])
    assert not Features(project.folder, tiny, project.keys).have_N.any()
    Image.new("RGB", (41, 30)).save(folder / "01.png")
    time.sleep(0.01)
    with Project(folder) as project:
        again = Features(project.folder, backbone, project.keys)
        assert again.have_N.nonzero()[:, 0].tolist() == [0, 2, 3]
    file = sorted(again.folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-50])  # damaged: made again, not an error
    assert Features(project.folder, backbone, project.keys).have_N.nonzero()[:, 0].tolist() == [3]
    assert not file.exists()


def test_thumbnails_are_made_once(folder):
    with Project(folder) as project:
        thumbnails = Thumbnails(project.folder, project.paths, project.keys)
        first = thumbnails.get(0)
        (file,) = (path for path in (project.folder / "thumbnails").rglob("*") if path.is_file())
        for torn in (first[0][:-4], b""):  # as a power cut may leave it
            file.write_bytes(torn)
            assert thumbnails.get(0) == first and file.read_bytes() == first[0]
        (folder / "00.png").write_bytes(b"gone")
        assert thumbnails.get(0) == first and first[1] == "image/png"
        with pytest.raises(PerlclipError):
            thumbnails.view(0)
        (project.folder / "no").mkdir()
        (project.folder / "no" / "thumbnails").write_bytes(b"")  # nothing can be written there
        other = Thumbnails(project.folder / "no", project.paths, project.keys)
        assert other.get(1) == thumbnails.get(1)


def test_a_journal_takes_any_plain_data(tmp_path):
    journal = Journal(tmp_path / "a.jsonl")
    entries = [{"a": "\udce9\n\u2028"}, {"b": [1, None, 2.5]}]
    for entry in entries:
        journal.append(entry)
    with pytest.raises(ValueError):
        journal.append({"a": float("nan")})
    assert Journal(tmp_path / "a.jsonl").entries == entries
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_bytes().splitlines()] == entries
