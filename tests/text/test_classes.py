"""Names and sentences: one rule of how a name is said, when two are the same, and what is novel."""

import re
from pathlib import Path

import pytest
import torch

import perlclip
from perlclip import PerlclipError
from perlclip.text.classes import Classes, are_novel, check_class_names, spelling, spoken

SOURCES = Path(perlclip.__file__).parent


def test_a_name_is_said_and_spelt_one_way():
    assert spoken("Red_fox") == "Red fox"
    assert spelling(" Red__fox\u00a0") == spelling("red fox") == "red fox" != spelling("redfox")
    with pytest.raises(PerlclipError, match=r"duplicate class name 'red fox' \(from 'Red fox' and 'red_fox'\)"):
        check_class_names(["Red fox", "red_fox"])


def test_underscores_become_spaces_at_one_place():
    pattern = re.compile(r"""replace\(["']_["'], ["'] ["']\)""")
    places = {
        path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.py") if pattern.search(path.read_text())
    }
    assert places == {"text/classes.py"}


@pytest.mark.parametrize(
    ("names", "novel"),
    [
        (["green_grass", "Blue"], False),
        (["RED", "blue ", "green  grass"], False),
        (["red"], False),
        (["green"], True),
        (["red", "blue", "green grass", "pink"], True),
    ],
)
def test_what_is_novel(names, novel):
    assert are_novel(names, ["blue", "green grass", "red"]) is novel


def test_prompts_in_the_usual_template_give_their_names():
    classes = Classes.of(["a photo of a cat.", "a photo of a red fox."])
    assert classes == Classes(("cat", "red fox")) and hash(classes) == hash(Classes(("cat", "red fox")))
    assert Classes.of(classes) is classes
    for wrong in ([], "a photo of a cat."):
        with pytest.raises(PerlclipError, match="a list of class prompts is needed"):
            Classes.of(wrong)


def test_a_prompt_that_differs_stands_for_itself_and_changes_no_other():
    prompts = ["a photo of a cat.", "two dogs at play", "a photo of a ."]
    classes = Classes.of(prompts)
    assert classes.names == ("cat", "two dogs at play", "a photo of a .")
    assert classes.prompts() == classes.prompts(classes.template) == prompts
    assert classes.prompts("a drawing of a {}.")[:2] == ["a drawing of a cat.", "a drawing of a two dogs at play."]
    assert hash(classes) != hash(Classes(classes.names))


def test_methods_say_given_sentences_and_put_names_into_their_own(tiny):
    prompts = ["a photo of a star.", "two red circles"]
    with torch.no_grad():
        for name in ("zero-shot", "perl"):
            method = perlclip.create_method(name, tiny, **({"steps": 0} if name == "perl" else {}))
            torch.testing.assert_close(method.encode_text(method.class_state(prompts)), tiny.encode_text(prompts))
        coop = perlclip.create_method("coop", tiny)
        mixed, alone = (coop.encode_text(coop.class_state(some))[:1] for some in (prompts, prompts[:1]))
        torch.testing.assert_close(mixed, alone)
