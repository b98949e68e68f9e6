"""The studio over HTTP, without a browser: what it says, what it refuses, what it makes."""

import io
import time
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

import perlclip
from perlclip.data import decoding
from perlclip.data.images import Held
from perlclip.studio.project import NONE, SKIPPED
from tests.studio.conftest import COLOURS, ask, draw


def until(found, seconds=60):
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)
    return value


def test_from_an_empty_log_to_an_adapter(studio, tmp_path, backbone, monkeypatch):
    """Guesses before labels, better ones after; PERL behind; a check that finds a wrong label; an export that loads."""
    monkeypatch.setattr("perlclip.studio.worker.READY_ON", ("cpu",))
    folder = draw(tmp_path / "images", 40)
    (folder / "broken.png").write_bytes(b"no image")
    with studio(folder, every=12) as (address, worker):
        state = until(lambda: (s := ask(address, "/api/state")[1])["looked"] == 40 and s)
        assert state["images"] == 41 and state["queue"] == [] and state["classes"] == [] and state["unreadable"] == 1
        names = ask(address, "/api/images")[1]["names"]
        classes = {"classes": [[None, name] for name in COLOURS], "template": "a {} patch", "version": 0}
        assert ask(address, "/api/classes", classes) == (200, {"version": 1})
        state = until(lambda: (s := ask(address, "/api/state")[1])["queue"] and s)
        assert len({place for place, _ in state["queue"]}) == 16 and worker.guesses.accuracy is None
        until(lambda: worker._ready and not worker.status.task)  # it has trained for nothing, of which nothing is left
        assert worker.perl is None and not worker.history and not worker.status.error
        numbers = {name: number for number, name in state["classes"]}
        assert [c for c, _ in state["queue"][0][1]] and sum(p for _, p in state["queue"][0][1]) == pytest.approx(
            1, abs=0.01
        )

        def label(place, value):
            body = {"listing": state["listing"], "places": [place], "value": value, "by": "me"}
            assert ask(address, "/api/label", body)[0] == 200

        truth = [numbers.get(name.split("-")[-1].removesuffix(".png")) for name in names]
        order = list(range(40))
        for place in order[:30]:
            label(place, truth[place])
        label(31, truth[30])  # wrong
        label(38, SKIPPED)
        until(lambda: worker.perl and worker.guesses.labels.version == 33 and not worker.status.task)
        table = ask(address, "/api/table")[1]
        given, guess = np.frombuffer(table[: 8 * 41], "<i4").reshape(2, 41)
        assert given[:30].tolist() == truth[:30] and given[38] == SKIPPED and given[40] == NONE == guess[40]
        assert np.mean(guess[:40] == truth[:40]) > 0.9  # colours are easy, also for random weights
        check = ask(address, "/api/check")[1]
        assert [(s["place"], s["likely"]) for s in check["suspects"]] == [(31, truth[31])]
        rows = ask(address, "/api/history")[1]
        assert {row["kind"] for row in rows} == {"quick", "perl"} and rows[-1]["held"] > 0
        assert ask(address, "/api/undo", {"listing": state["listing"], "by": "me"})[1]["places"] == [38]
        maps = ask(address, "/api/look/3")[1]["maps"]
        assert len(maps["answers"]) == 5 and set(maps["answers"]) <= set(COLOURS)
        assert ask(address, "/api/ask", {"what": "export"})[0] == 200
        done = until(lambda: ask(address, "/api/state")[1]["exported"])
        assert done["files"] == ["adapter", "labels.csv", "report.html"] and done["method"] == "perl"
        archive = zipfile.ZipFile(io.BytesIO(ask(address, "/api/export.zip")[1]))
        assert {"adapter/adapter_config.json", "labels.csv", "report.html"} <= set(archive.namelist())
    out = tmp_path / "images-adapter"
    perlclip.load_adapter(out / "adapter", backbone=backbone)
    listed = perlclip.load_images(out / "labels.csv")
    assert len(listed) == 31 and set(listed.class_names) == set(COLOURS)
    # Started again: nothing is looked at anew, the adapter is there, no label asks for a training.
    with studio(folder, every=12) as (address, worker):
        assert worker.features.have_N.sum() == 40 and worker.perl is not None
        assert len(worker.project.labels().given()) == 31
        before = len(worker.history)
        until(lambda: worker.guesses)
        assert len(worker.history) - before <= 1  # the undo was the last word


def test_what_is_refused_and_what_hides(studio, tmp_path, monkeypatch):
    monkeypatch.setattr("perlclip.studio.interface.LOOKS", 0)
    folder = draw(tmp_path / "images", 4)
    (tmp_path / "secret.png").write_bytes((folder / "00-red.png").read_bytes())
    with studio(folder) as (address, worker):
        state = ask(address, "/api/state")[1]
        hidden = ("/static/..%2finterface.py", "/static/interface.py", "/thumbnail/4", "/thumbnail/-1", "/api/nothing")
        for path in hidden:
            assert ask(address, path)[0] == 404, path
        assert ask(address, "/thumbnail/../secret.png")[0] in (404, 422)
        good = {"listing": state["listing"], "places": [0], "value": SKIPPED}
        bad = [{}, good | {"listing": "x"}, good | {"places": "0"}, good | {"places": [True]}, good | {"value": 1.5}]
        bad += [good | {"places": [9]}, good | {"value": 7}, good | {"stroke": "x" * 65}, [], b"{", b"[" * 99999]
        for body in bad:
            status, answer = ask(address, "/api/label", body)
            assert 400 <= status < 500 and answer["error"], body
        new = {"classes": [[None, "cat"]], "template": "a {}", "version": 0}
        for change in (
            {"version": 3},
            {"template": "none"},
            {"classes": [["", "x"]]},
            {"classes": [[None, "x" * 300]]},
        ):
            assert 400 <= ask(address, "/api/classes", new | change)[0] < 500, change
        assert ask(address, "/api/label", good, origin="http://evil.example")[0] == 403
        assert ask(address, "/api/state", host="evil.example")[0] == 421
        assert (ask(address, "/api/look/0")[0], ask(address, "/api/guess/0")[0]) == (503, 200)  # labels do not wait
        assert worker.project.version == 0
        assert ask(address, "/api/ask", {"what": "train"})[0] == 200
        until(lambda: "two classes" in ask(address, "/api/state")[1]["status"]["error"])
        content = ask(address, "/thumbnail/0")[1]
        assert Image.open(io.BytesIO(content)).size == (40, 32)
        assert ask(address, "/api/export.zip")[0] == 404
        # Classes may be changed while others label, but not what others have changed.
        assert ask(address, "/api/classes", new)[1] == {"version": 1} and ask(address, "/api/label", good)[0] == 200
        more = {"classes": [[0, "cat"], [None, "dog"]], "template": "a {}", "version": 1}
        assert ask(address, "/api/classes", more)[1] == {"version": 3}
        assert [ask(address, "/api/classes", more | {"version": n})[0] for n in (1, 2, 4, "3")] == [409] * 4


def test_a_training_can_be_stopped_and_a_label_does_not_wait_for_it(studio, tmp_path):
    folder = draw(tmp_path / "images", 30)
    with studio(folder, every=1000, recipe="strong") as (_, worker):
        until(lambda: worker.features.have_N.all())
        project = worker.project
        project.set_classes([(None, name) for name in COLOURS])
        for place in range(24):
            project.label([place], place % 3)
        worker.ask("train")
        until(lambda: worker.status.task == "train" and worker.status.done > 0)
        project.label([25], 1)
        until(lambda: worker.guesses.labels.version == project.version)
        assert worker.status.task == "train" and worker.perl is None
        worker.ask("stop")
        until(lambda: not worker.status.task)
        assert worker.perl is None and not worker.status.error


@pytest.mark.parametrize("recipe", [None, "strong", "fast"])
def test_a_refit_of_few_labels_has_no_more_epochs_than_one_of_many(studio, tmp_path, tree, recipe):
    """Somebody waits for it; and it answers as whatever `fit` makes by that recipe."""
    few = perlclip.load_images(tree).select(range(0, 24, 8))
    with studio(draw(tmp_path / "images", 2), recipe=recipe) as (_, worker):
        fitted = worker._fit(few, lens="plain", head=False, thresholds=False)
    assert fitted.training["recipe"]["epochs"] == (1 if recipe == "fast" else 10)
    own = perlclip.create_method("perl", worker.backbone, recipe=recipe or "strong")
    same = perlclip.Recipe(**fitted.settings["recipe"])
    alone = perlclip.fit(own, few, recipe=same, lens="plain", head=False, thresholds=False, progress=False)
    assert fitted.method.config == alone.method.config
    learned = fitted.method.learned()
    assert learned.keys() == alone.method.learned().keys()
    assert all(torch.equal(learned[name], numbers) for name, numbers in alone.method.learned().items())


def test_a_refit_reads_only_what_is_new_and_equals_a_first_one(studio, tmp_path, monkeypatch):
    """Files are decoded once, changed ones again, lost ones left out; the method that is trained again is as a new."""
    folder, read = draw(tmp_path / "images", 16), []
    look = decoding._look
    monkeypatch.setattr(decoding, "_look", lambda source: (read.append(isinstance(source, Held)), look(source))[1])
    with studio(folder, every=1000) as (_, worker):
        project = worker.project
        until(lambda: worker.features.have_N.all())
        project.set_classes([(None, name) for name in COLOURS])
        for place in range(15):
            project.label([place], place % 3)
        to_train, _ = project.split(project.labels())

        def refit():
            read.clear()
            before = len(worker.history)
            worker.ask("train")
            until(lambda: any(row["kind"] == "perl" for row in worker.history[before:]) and not worker.status.task)
            return worker.perl

        first, kept = refit(), worker._gradients
        assert read == [False] * len(to_train)
        again = refit()
        assert read == [True] * len(to_train) and worker._gradients is kept and again.method is not first.method
        assert again.fingerprint == first.fingerprint and again.metrics == first.metrics
        project.paths[to_train[0]].write_bytes(project.paths[to_train[1]].read_bytes())
        project.paths[to_train[2]].unlink()
        assert refit().fingerprint != first.fingerprint and read.count(False) == 2
        assert "cannot read" in worker.unreadable[to_train[2]] and not worker.status.error
        project.set_classes([(number, f"{name} thing") for number, name in enumerate(COLOURS)])
        worker.ask("export")
        until(lambda: "for other classes" in worker.status.error)
        assert refit().class_names[0] == "red thing" and worker._gradients is not kept
