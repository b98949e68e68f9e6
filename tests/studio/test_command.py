"""`perlclip studio`: what it refuses before it starts, and what it starts with."""

import pytest

import perlclip
from perlclip.studio import interface
from perlclip.studio.project import Project
from perlclip.studio.toys import draw_toys, truth_of
from tests.cli.test_cli import run
from tests.common import loud
from tests.studio.conftest import COLOURS, draw
from tests.studio.test_interface import until


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "not a folder of images"),
        (["images", "--host", "0.0.0.0"], "a token is needed"),
        (["images", "--token", "short"], "a token has 16"),
        (["images", "--class-names", "other.txt"], "change them on the page"),
        (["images", "--recipe", "strongest"], "unknown recipe of method 'perl': 'strongest'; did you mean 'strong'?"),
        (["images", "--out", "other.txt"], "which is no folder"),
        (["fresh", "--class-names", "long.txt"], "tokens"),
    ],
)
def test_what_cannot_be_is_said_at_once(tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    with Project(draw(tmp_path / "images", 2)) as project:
        project.set_classes([(None, "cat")])
    (tmp_path / "other.txt").write_text("dog")
    (tmp_path / "long.txt").write_text("dog\n" + "a cat and " * 20)
    draw(tmp_path / "fresh", 1)
    result = run("studio", *words, "--backbone", "tiny", "--no-open")
    assert result.exit_code == 1 and sentence in result.output


def test_without_a_folder_it_opens_on_toys(tmp_path, monkeypatch):
    """Twice: what was drawn and labelled stays, also where classes were changed on the page."""
    served = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("perlclip.serve.guard.run_server", lambda app, limits, ready: served.append(limits))
    monkeypatch.setattr("perlclip.studio.worker.Worker.start", lambda self: None)
    monkeypatch.setattr("perlclip.studio.worker.Worker.stop", lambda self: None)
    assert run("studio", "--no-open").exit_code == 0
    with Project("perlclip-toys") as project:
        assert len(project) == 256 and set(project.names) == set(truth_of())
        names = project.labels().names
        assert names == draw_toys(tmp_path / "perlclip-toys") and len(names) == 8
        project.set_classes([(None, "thing")])
    assert run("studio", "--no-open").exit_code == 0 and len(served) == 2
    # A prompt for classes that are typed later.
    draw(tmp_path / "images", 2)
    began, begin = [], Project.begin_with
    monkeypatch.setattr(Project, "begin_with", lambda it, said: (begin(it, said), began.append(it.labels().template)))
    assert run("studio", "images", "--template", "a drawn {}.", "--backbone", "tiny", "--no-open").exit_code == 0
    assert began == ["a drawn {}."]
    assert served[0].loopback and not interface.FILES - {path.name for path in interface.STATIC.iterdir()}


def test_it_starts_from_an_adapter(studio, tmp_path, backbone):
    """Its maps are there before any label, and its head guesses until there are labels."""
    images, names = sorted(draw(tmp_path / "seen", 12).iterdir()), tuple(COLOURS)
    data = perlclip.ImageSet(images=images, labels=[n % 3 for n in range(12)], class_names=names)
    head = perlclip.fit(perlclip.create_method("ridge", backbone), data, progress=False).head
    method = loud(perlclip.create_method("perl", backbone))
    start = perlclip.Adapter(method=method, class_names=names, template="a {}", head=head)
    with studio(draw(tmp_path / "images", 30), start=start) as (_, worker):
        worker.project.set_classes([(None, name) for name in names])
        worker.wake()
        until(lambda: worker.guesses and worker.guesses.have_N.all())
        right = [int(guess) == n % 3 for n, guess in enumerate(worker.guesses.p_NC.argmax(1))]
        assert sum(right) > 27 and len(worker.explain(0)["answers"]) == 5
