"""docs/api.md is true: its program runs, it has every public name, and its signatures are those of the code."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import perlclip
from perlclip.batch import job, shards, work
from perlclip.bench import machines, protocols, schedule, store
from perlclip.export import adapter_arrays, onnx_graph, web_page
from perlclip.report import write
from tests.conftest import draw_tree

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "api.md").read_text()
HOMES = (perlclip, perlclip.methods, perlclip.data, perlclip.analysis, protocols, schedule, store, machines, write)
HOMES += (work, job, shards, onnx_graph, adapter_arrays, web_page)
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.M | re.S)


def test_the_program_of_the_page_runs(tmp_path, monkeypatch, capsys):
    from perlclip.data.suites import SUITES

    draw_tree(tmp_path / "pets")
    monkeypatch.chdir(tmp_path)
    before = dict(SUITES)
    try:
        exec(compile("\n".join(code for language, code in BLOCKS if language == "python"), "api.md", "exec"), {})
    finally:  # it reads a suite and makes it known
        SUITES.clear()
        SUITES.update(before)
    assert capsys.readouterr().out.splitlines()[0] in ("red", "green grass", "blue")


def signatures() -> list[str]:
    """Those of the page, one a line."""
    blocks = [code for language, code in BLOCKS if not language]
    return [line for code in blocks for line in re.sub(r"\s*\n +", " ", code).splitlines()]


@pytest.mark.parametrize(
    "home", [perlclip, perlclip.methods, perlclip.data, perlclip.analysis], ids=lambda m: m.__name__
)
def test_every_public_name_is_on_the_page(home):
    prose = re.sub(r"^```.*?^```", "", PAGE, flags=re.M | re.S)
    said = {word for code in re.findall(r"`([^`]+)`", prose) for word in re.findall(r"\w+", code)}
    said |= {re.match(r"\w+", text)[0] for text in signatures()}
    assert sorted(set(home.__all__) - said) == []


def parameters(text: str) -> tuple[list[tuple[str, bool, str]], str]:
    """Of each parameter its name, whether it goes by name only, and its default; and what comes back."""
    call, _, result = text.partition(" -> ")
    arguments = ast.parse(f"def f({call.partition('(')[2]}: ...".replace("…", "...")).body[0].args
    first = len(arguments.args) - len(arguments.defaults)
    found = [
        (each.arg, False, "" if i < first else ast.unparse(arguments.defaults[i - first]))
        for i, each in enumerate(arguments.args)
    ]
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append((each.arg, True, ast.unparse(default) if default else ""))
    return found + ([(arguments.kwarg.arg, True, "**")] if arguments.kwarg else []), result


def expected(function: object) -> tuple[list[tuple[str, bool, str]], str]:
    signature, found = inspect.signature(function), []
    for p in signature.parameters.values():
        default = "" if p.default is p.empty else "..." if "factory" in repr(p.default) else repr(p.default)
        default = "**" if p.kind is p.VAR_KEYWORD else default
        if p.name != "self":
            found.append((p.name, p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD), default))
    result = signature.return_annotation
    shown = result if isinstance(result, str) else inspect.formatannotation(result)
    return found, "" if inspect.isclass(function) else re.sub(r"[\w.]+\.(\w+)", r"\1", shown)


@pytest.mark.parametrize("text", signatures(), ids=lambda text: text.partition("(")[0])
def test_a_signature_is_that_of_the_code(text):
    name, _, attribute = text.partition("(")[0].partition(".")
    thing = next(getattr(home, name) for home in HOMES if hasattr(home, name))
    assert parameters(text) == expected(getattr(thing, attribute) if attribute else thing)
