"""What looks a built site over finds what is wrong with it (`scripts/site.py`, run by `make docs`)."""

import pytest

from scripts.site import main

PAGE = """<h1 id="top">Ö</h1><a href="#top">a</a> <a href="sub/two.html#here%20too">b</a> <a href="d%20e.csv">c</a>
<a href="https://example.org/page">another site may be linked</a> <img src="data:image/png;base64,AAAA">{}"""


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", ""),
        ('<a href="three.html">x</a>', "three.html: no such file"),
        ('<a href="sub">x</a>', "sub: no such file"),
        ('<a href="#bottom">x</a>', "#bottom: no such place"),
        ('<a href="sub/two.html#gone">x</a>', "sub/two.html#gone: no such place"),
        ('<script src="https://cdn.example.org/a.js"></script>', "loaded from elsewhere"),
        ('<link rel="stylesheet" href="//fonts.example.org/a.css">', "loaded from elsewhere"),
    ],
)
def test_a_link_that_leads_nowhere_is_said(tmp_path, capsys, more, said):
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text(PAGE.format(more), "utf-8")
    (tmp_path / "sub" / "two.html").write_text('<p id="here too"><a href="../index.html">up</a>', "utf-8")
    (tmp_path / "d e.csv").touch()
    assert main(tmp_path) == bool(said)
    assert said in capsys.readouterr().out


def test_styles_fetch_nothing_and_an_empty_site_is_wrong(tmp_path, capsys):
    assert main(tmp_path) == 1
    (tmp_path / "index.html").write_text("<p>")
    assert main(tmp_path) == 0
    (tmp_path / "a.css").write_text("@import 'https://fonts.example.org/x'; b { background: url(b.png) }")
    assert main(tmp_path) == 1 and "fonts.example.org/x: loaded from elsewhere" in capsys.readouterr().out
