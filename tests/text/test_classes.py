"""Names and sentences: one rule of how a name is said, when two are the same, and what is novel."""

import json
import re
from pathlib import Path

import pytest
import torch

import perlclip
from perlclip import PerlclipError
from perlclip.adapters.folder import OWN_HASH
from perlclip.text.classes import Classes, are_novel, check_class_names, plain, spelling, spoken

SOURCES = Path(perlclip.__file__).parent


def test_a_name_is_said_and_spelt_one_way():
    assert spoken("Red_fox") == "Red fox"
    assert spelling(" Red__fox\u00a0") == spelling("red fox") == "red fox" != spelling("redfox")
    with pytest.raises(PerlclipError, match=r"duplicate class name 'red fox' \(from 'Red fox' and 'red_fox'\)"):
        check_class_names(["Red fox", "red_fox"])


@pytest.mark.parametrize(
    ("name", "read"),
    [  # as OpenAI's tokenizer reads them, with ftfy 6.3
        ("cat\u2019s eye", "cat's eye"),
        ("\u201cred\u201d fox", '"red" fox'),
        ("black &amp; white", "black & white"),
        ("black &amp;amp; white", "black & white"),
        ("caf&eacute; &lsquo;x&rsquo;", "caf\u00e9 'x'"),
        ("\ufb01re tru\ufb00le", "fire truffle"),
        ("\uff21\uff11", "A1"),
        ("cafe\u0301", "caf\u00e9"),
    ],
)
def test_names_are_read_as_clip_reads_them(name, read):
    assert plain(name) == read and spelling(name) == spelling(read)


@pytest.mark.parametrize(
    "name", ["red_fox", "Boeing 737-300", "R&B", "na\u00efve caf\u00e9", "\u65e5\u672c", "a < b", "it's"]
)
def test_usual_names_are_read_as_they_are_written(name):
    assert plain(name) == name


def test_methods_read_names_as_clip_does_but_for_adapters_of_0_1_0(tiny, tmp_path):
    curly, straight = ["star\u2019s ring", "red &amp; blue"], ["star's ring", "red & blue"]
    method = perlclip.create_method("perl", tiny, steps=1)
    config = perlclip.save_adapter(method, tmp_path, class_names=curly, template="a {}.") / "adapter_config.json"
    new = perlclip.load_adapter(tmp_path, backbone=tiny).method
    info = json.loads(config.read_text())
    config.write_text(json.dumps({key: value for key, value in info.items() if key not in ("plain_names", OWN_HASH)}))
    old = perlclip.load_adapter(tmp_path, backbone=tiny)

    def texts(method, names):
        with torch.no_grad():
            return method.encode_text(method.class_state(Classes(tuple(names), "a {}.")))

    assert torch.equal(texts(new, curly), texts(new, straight))
    assert torch.equal(texts(old.method, straight), texts(new, straight))
    assert not torch.allclose(texts(old.method, curly), texts(new, straight), atol=1e-3)
    perlclip.save_adapter(old, tmp_path / "again")
    assert perlclip.load_adapter(tmp_path / "again", backbone=tiny).method.as_written


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
