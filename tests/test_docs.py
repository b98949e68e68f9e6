"""What the documents say of the code is there: every link, and every name that can be told from its form.

Checked in README.md and its like (`PAGES`) and docs/*.md, outside of code blocks unless said otherwise:

    [text](path), [text][id]            the file or folder exists; of path#heading the heading, too
    [`Perl.loss`](…/perl.py)            that class, function, method, attribute or constant is defined in that very file
    `tower.py`, `data/sets.py`          a file of the project ends so
    `perl.py: Perl.loss`                as the link
    `test_no_steps_is_zero_shot_clip`   a test or a file of tests is called so
    `Perl.loss`, `PerlConfig`           the class exists, ours or imported; ours has or inherits the rest
    `DATASET_SETTINGS`                  a constant of the project is called so
    `length_groups`                     the word occurs in the code, whatever it is there
    `perlclip.reference.plain_form`     can be reached by this path
    `benchmarks.speed`, `scripts/….py`  the file exists, also in code blocks

Every document is linked from docs/index.md, which is the site's table of contents, and from the README. Every command
line parses. The table of equations of docs/method.md has links of the second form alone. The method that
CONTRIBUTING.md shows is written to a file, trained and benched by the commands that stand below it.
"""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from pkgutil import resolve_name

import click
import pytest

from perlclip.cli import main

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md")
DOCUMENTS = [*(ROOT / name for name in PAGES), *sorted((ROOT / "docs").glob("*.md"))]
REPORT = ROOT / "docs" / "results" / "toybox" / "bench" / "report.md"
LINKED = [*DOCUMENTS, REPORT, *sorted((ROOT / ".github").rglob("*.md")), ROOT / "tests" / "stored" / "README.md"]
ENVIRONMENT = {"OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HOME", "PERLCLIP_TOKEN"}
ENVIRONMENT |= {"LABEL_STUDIO_URL", "LABEL_STUDIO_API_KEY"}
LINK = re.compile(r"\[([^\][]+)\](?:\(([^)\s]+)\)|\[([\w-]+)\])")
TARGET = re.compile(r"^\[([\w-]+)\]: (\S+)$", re.M)


@cache
def trees() -> dict[Path, ast.Module]:
    """Every Python file of the project."""
    folders = ("src", "tests", "benchmarks", "scripts")
    return {path: ast.parse(path.read_text()) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))}


def targets(node: ast.AST) -> list[ast.expr]:
    """What an assignment sets, several at once taken apart."""
    found = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [part for each in found for part in (each.elts if isinstance(each, ast.Tuple) else [each])]


@cache
def names(path: Path) -> frozenset[str]:
    """What a file defines, by qualified name: `Perl`, `Perl.loss`, `PerlConfig.depth`, `Tower.blocks`, `RECIPES`."""
    found = set()
    for node in trees()[path].body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        found |= {part.id for part in targets(node) if isinstance(part, ast.Name)}
        for inner in ast.walk(node) if isinstance(node, ast.ClassDef) else ():
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(f"{node.name}.{inner.name}")
            for part in targets(inner):
                if isinstance(part, ast.Name) and inner in node.body:
                    found.add(f"{node.name}.{part.id}")
                elif isinstance(part, ast.Attribute) and getattr(part.value, "id", "") == "self":
                    found.add(f"{node.name}.{part.attr}")
    return frozenset(found)


@cache
def classes() -> dict[str, list[tuple[Path, ast.ClassDef]]]:
    """By name; benchmarks and tests may have one that the package has as well."""
    found: dict[str, list[tuple[Path, ast.ClassDef]]] = {}
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append((path, node))
    return found


@cache
def foreign() -> frozenset[str]:
    """Names that some file imports from elsewhere, such as `CLIPModel`."""
    imports = (node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    ours = ("perlclip", "tests", "benchmarks")
    return frozenset(alias.name for node in imports if not (node.module or "").startswith(ours) for alias in node.names)


@cache
def words() -> frozenset[str]:
    """Every word of the package, the benchmarks and the scripts."""
    texts = (path.read_text() for path in trees() if "tests" not in path.relative_to(ROOT).parts)
    return frozenset(word for text in texts for word in re.findall(r"\w+", text))


def has(name: str, attribute: str) -> bool:
    """Whether a class of ours, or one that it is derived from, defines the attribute; a foreign one may."""
    if name not in classes():
        return name in foreign()
    return any(
        f"{name}.{attribute}" in names(path)
        or any(has(getattr(base, "id", getattr(base, "attr", "")), attribute) for base in node.bases)
        for path, node in classes()[name]
    )


def files(ending: str) -> list[Path]:
    return [path for path in trees() if path.as_posix().endswith(f"/{ending}")]


def reachable(dotted: str) -> bool:
    try:
        resolve_name(dotted)
    except (ImportError, AttributeError):
        return False
    return True


def wrong_name(code: str) -> str:
    """Why the code in backticks does not exist; "" if it does, or if its form says nothing."""
    if match := re.fullmatch(r"([\w/+-]+\.py)(?:: ([\w.]+))?", code):
        file, name = match.groups()
        if not files(file):
            return "no such file"
        return "" if name is None or any(name in names(path) for path in files(file)) else f"not in {file}"
    code = re.sub(r"\(.*\)$", "", code)
    if re.fullmatch(r"test_\w+", code):
        known = any(code in names(path) or path.stem == code for path in trees())
        return "" if known else "no such test"
    if re.fullmatch(r"perlclip(\.\w+)+", code):
        return "" if reachable(code) else "cannot be reached"
    if match := re.fullmatch(r"([A-Z]\w*[a-z]\w*)\.(\w+)", code):
        return "" if has(*match.groups()) else "no such class, or it has no such attribute"
    if re.fullmatch(r"[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*[A-Z][A-Za-z0-9]*", code):
        known = code in classes() or code in foreign() or any(code in names(path) for path in trees())
        return "" if known else "no such class"
    if re.fullmatch(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+", code):
        return "" if code in ENVIRONMENT or any(code in names(path) for path in trees()) else "no such constant"
    if re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)+", code):
        return "" if code in words() else "occurs nowhere in the code"
    return ""


def prose(text: str) -> str:
    """Without code blocks and formulas."""
    return re.sub(r"^```.*?^```|\$[^$\n]+\$", "", text, flags=re.M | re.S)


def links(text: str) -> list[tuple[str, str]]:
    """(text, target), wherever the target stands."""
    known = dict(TARGET.findall(text))
    return [(shown, inline or known.get(key, f"[{key}] is not defined")) for shown, inline, key in LINK.findall(text)]


@cache
def anchors(path: Path) -> frozenset[str]:
    """What a link may have behind its #: the headings, as GitHub and the site spell them."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} (.+)$", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S), re.M):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.append(slug if slug not in found else f"{slug}-{sum(s == slug for s in found)}")
    return frozenset(found)


@pytest.mark.parametrize("document", LINKED, ids=lambda path: path.name)
def test_links_resolve(document):
    wrong = []
    for shown, target in links(prose(document.read_text())):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        if not path.exists():
            wrong.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(path):
            wrong.append(f"{target}: no such heading")
        elif path.suffix == ".py" and (match := re.fullmatch(r"`([\w./]+)`", shown)):
            name = match[1]
            if name not in names(path) and not path.as_posix().endswith(f"/{name}"):
                wrong.append(f"{name}: not in {target}")
    assert not wrong, "\n".join(wrong)


def test_every_document_is_in_the_contents_of_the_site_and_linked_from_the_readme():
    index, readme = ROOT / "docs" / "index.md", ROOT / "README.md"
    contents = re.findall(r"^- \[[^\]]+\]\(([^)]+\.md)\)", index.read_text(), re.M)
    assert len(contents) == len(set(contents))
    assert {(index.parent / path).resolve() for path in contents} == {*DOCUMENTS, REPORT} - {index}
    linked = {(ROOT / target.partition("#")[0]).resolve() for _, target in links(readme.read_text())}
    assert not set((ROOT / "docs").glob("*.md")) - linked - {index}


def commands(text: str) -> list[str]:
    """The command lines of a document: those of its blocks, and those in backticks that nothing was left out of."""
    shown = re.findall(r"^```\n(.*?)^```", text, re.M | re.S)
    lines = [line for code in shown for line in re.sub(r"\\\n\s*", "", code).splitlines()]
    lines += [" ".join(code.split()) for code in re.findall(r"`(perlclip [^`]+)`", prose(text))]
    return [line for line in lines if line.startswith("perlclip ") and not re.search(r" …|\||\[", line)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_command_lines_parse(document):
    wrong = []
    for line in commands(document.read_text()):
        words = shlex.split(line, comments=True)[1:]
        try:
            main.make_context("perlclip", words, resilient_parsing=True)
            command: click.Command | None = main
            while isinstance(command, click.Group) and words and not words[0].startswith("-"):
                command = command.commands.get(words.pop(0))
            if command is None:
                wrong.append(f"{line}: no such command")
            elif command is not main:
                command.make_context("perlclip", words, resilient_parsing=True)
        except click.ClickException as error:
            wrong.append(f"{line}: {error.format_message()}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_names_in_backticks_exist(document):
    text = document.read_text()
    codes = dict.fromkeys(re.findall(r"`([^`\n]+)`", prose(text)))
    wrong = [f"{code}: {reason}" for code in codes if (reason := wrong_name(code))]
    commands = [name.replace(".", "/") + ".py" for name in re.findall(r"\bbenchmarks\.\w+\b(?!/)", text)]
    commands += re.findall(r"\bscripts/\w+\.py", text)
    wrong += [f"{name}: no such file" for name in commands if not files(name)]
    assert not wrong, "\n".join(wrong)


def test_every_row_of_the_table_of_equations_names_its_code():
    text = (ROOT / "docs" / "method.md").read_text()
    table = text.split("## Every equation")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 20
    for row in rows:
        for cell in row[2:]:
            assert links(cell), row[0]
            assert "`" not in LINK.sub("", cell), f"{row[0]}: a name without a link"


def test_the_checks_can_fail():
    assert wrong_name("Perl.loss") == wrong_name("perl.py: Perl.loss") == wrong_name("CLIPModel") == ""
    gone = (
        "Perl.losses",
        "perl.py: losses",
        "ClipModell",
        "plain.py",
        "test_of_nothing",
        "perlclip.train.fit",
        "of_nothing",
    )
    assert all(wrong_name(name) for name in gone)


# ---- CONTRIBUTING.md's method, outside the package ----


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text().split("## Add a method")[1].split("\n## ")[0]


def block(language: str) -> str:
    """The first code block of the section in this language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", CONTRIBUTING, re.M | re.S)
    return next(code for name, code in blocks if name == language)


def perlclip(*commands: list[str], folder: Path, **environment: str) -> list[str]:
    """What commands say, in a process of their own, as the method would stay known in this one."""
    code = "import json, sys; from perlclip.cli import main\n"
    code += "for words in json.loads(sys.argv[1]): main(words, standalone_mode=False); print(chr(0))"
    command = [sys.executable, "-c", code, json.dumps(commands)]
    result = subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\0")[:-1]


def test_the_method_of_contributing_is_fitted_and_benched_as_it_is_shown(tmp_path):
    (tmp_path / "residual.py").write_text(block("python"))
    commands = [shlex.split(line) for line in block("").splitlines()]
    assert [words[:2] for words in commands] == [["perlclip", name] for name in ("fit", "eval", "bench")]
    fitted, tested, benched = perlclip(*(words[1:] for words in commands), folder=tmp_path)
    assert "time: reading images" in fitted and ", training " in fitted
    assert "on 96 images" in tested and "2 complete runs, 0 failed" in benched
    adapter = json.loads((tmp_path / "adapter" / "adapter_config.json").read_bytes())
    assert adapter["method"] == "residual" and adapter["config"] == {"rank": 8, "lens": "smooth"}
    assert adapter["training"]["recipe_name"] == "original" and adapter["training"]["recipe"]["epochs"] == 20
    (run,) = (tmp_path / "bench" / "runs").rglob("residual-fast-1shot-seed1/run.json")
    record = json.loads(run.read_bytes())
    assert record["status"] == "complete" and record["parameters"] == 1028 and record["recipe"]["epochs"] == 1


def test_an_installed_package_makes_its_methods_known(tmp_path):
    ((group, points),) = tomllib.loads(block("toml"))["project"]["entry-points"].items()
    installed = tmp_path / "residual-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: residual\nVersion: 1\n")
    lines = [f"[{group}]", *(f"{name} = {module}" for name, module in points.items())]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    (tmp_path / "residual.py").write_text(block("python"))
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    (said,) = perlclip(["methods", "resid*"], folder=tmp_path, PYTHONPATH=path)
    assert "4,100" in said
