"""The site: `make docs` builds it from the Markdown files of the project, as they stand, into build/site.

The source folder is the project's root, so that a link between two files is the same here and where the repository is
shown. What a link leads to that is no document, code or a folder or a file of results, has a page or a copy of its own
under files/. Formulas become MathML, and nothing is fetched from elsewhere when a page is read.
"""

import ast
import html
import importlib
import importlib.metadata
import inspect
import os
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sphinx import addnodes
from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent

project = "perlclip"
author = copyright = "the perlclip contributors"
release = version = importlib.metadata.version("perlclip")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.linkcode"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "docs/results/toybox/bench/report.md"]
exclude_patterns = [".*", "build", "dist", "src", "tests"]

myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 4
# Our signatures and commands stand in blocks without a language: neither is a program.
highlight_language = "none"

default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
nitpicky = True
# Types in signatures: those of other libraries have no page here, and ours have one where they are public.
nitpick_ignore_regex = [("py:.*", ".*")]

html_theme = "furo"
html_title = f"perlclip {release}"
html_math_renderer = "mathml"
html_static_path = ["site.css"]  # beside this file
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
templates_path: list[str] = []


# ---- docs/index.md's lists of links are the table of contents ----

POINT = re.compile(r"^- \[([^\]]+)\]\(([^)#]+)\.md\)", re.M)
TITLES = {
    os.path.normpath(f"docs/{path}"): title
    for title, path in POINT.findall((ROOT / "docs" / "index.md").read_text("utf-8"))
}


def toctrees(text: str) -> str:
    """A hidden toctree for each section, of the links that begin the points of its list."""
    blocks = []
    for section in text.split("\n## ")[1:]:
        found = [f"{title} <{path}>" for title, path in POINT.findall(section)]
        lines = [f":caption: {section.splitlines()[0]}", ":hidden:", *found]
        blocks += ["", "```{toctree}", *lines, "```"]
    return text + "\n".join(blocks) + "\n"


def read_source(app: Sphinx, docname: str, content: list[str]) -> None:
    """The start page gets its toctrees."""
    if docname == root_doc:
        content[0] = toctrees(content[0])


# ---- links ----

LINKED: set[Path] = set()  # the site is always built whole, so that it has all of them


def page_of(path: Path) -> str:
    """Where the site has a file or a folder."""
    return f"files/{path.relative_to(ROOT).as_posix()}"


def has_page(path: Path) -> bool:
    """Code is shown and folders are listed; other files are copied as they are."""
    return path.suffix == ".py" or path.is_dir()


@cache
def definitions(path: Path) -> dict[str, int]:
    """The line of each class, function, method, attribute and constant of a Python file, by its name: `Perl.loss`."""
    found: dict[str, int] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.setdefault(prefix + inner.name, inner.lineno)
            outside = isinstance(node, ast.Module | ast.ClassDef)
            for target in getattr(inner, "targets", [getattr(inner, "target", None)]):
                if isinstance(target, ast.Name) and outside:
                    found.setdefault(prefix + target.id, target.lineno)
                elif isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
                    found.setdefault(prefix + target.attr, target.lineno)
            visit(inner, f"{inner.name}." if isinstance(inner, ast.ClassDef) else prefix)

    visit(ast.parse(path.read_text("utf-8")), "")
    return found


def link_files(app: Sphinx, doctree: nodes.document) -> None:
    """Links to code go to its page, at the line of the name that is shown; others to a copy or a folder's list.

    A document that is called by its file, which is right where the repository is shown, has its title here.
    """
    here = app.env.docname
    for node in [*doctree.findall(addnodes.download_reference), *doctree.findall(addnodes.pending_xref)]:
        if node.get("refdomain") == "doc" and re.fullmatch(r"[\w./]+\.md", node.astext()):
            node[0].children = [nodes.Text(TITLES[node["reftarget"]])]
        path = Path(os.path.normpath((ROOT / here).parent / node.get("reftarget", "")))
        if node.get("reftype") != "myst" or node.get("refdomain") == "doc" or not path.exists():
            continue
        LINKED.add(path)
        uri = app.builder.get_relative_uri(here, page_of(path))
        uri = uri if has_page(path) else uri.removesuffix(".html")
        name = node.astext()
        anchor = f"#line-{definitions(path)[name]}" if path.suffix == ".py" and name in definitions(path) else ""
        node.replace_self(nodes.reference("", "", *node.children, internal=True, refuri=uri + anchor))


def file_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for each file of code and each folder that is linked; the others are copied."""
    linked = LINKED | {path for folder in LINKED for path in folder.rglob("*") if "__pycache__" not in path.parts}
    for path in sorted(linked):
        name = path.relative_to(ROOT).as_posix()
        body = ""
        if path.is_dir():
            inside = [(f"{path.name}/{entry.name}", entry) for entry in sorted(path.iterdir()) if entry in linked]
            rows = (
                f'<li><a href="{to}{".html" if has_page(at) else ""}">{html.escape(at.name)}</a></li>'
                for to, at in inside
            )
            body = f"<ul>{''.join(rows)}</ul>"
        elif has_page(path):
            formatter = HtmlFormatter(linenos="inline", lineanchors="line", anchorlinenos=False)
            body = highlight(path.read_text("utf-8"), PythonLexer(), formatter)
        else:
            copy = Path(app.outdir, page_of(path))
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            continue
        yield page_of(path), {"title": name, "body": f"<h1>{html.escape(name)}</h1>{body}"}, "page.html"
    Path(app.outdir, "index.html").write_text('<meta http-equiv="refresh" content="0; url=docs/index.html">')


# ---- the reference ----


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """[source] of a name in docs/reference.md: the same pages of code, at its line."""
    thing: Any = importlib.import_module(info["module"])
    for part in info["fullname"].split("."):
        thing = getattr(thing, part, None)
    thing = inspect.unwrap(getattr(thing, "fget", thing))
    try:
        path, line = Path(inspect.getsourcefile(thing) or ""), inspect.getsourcelines(thing)[1]
    except (TypeError, OSError):  # a constant; what a decorator has made
        return None
    if not path.is_relative_to(ROOT):
        return None
    LINKED.add(path)
    return f"../{page_of(path)}.html#line-{line}"


def readable_signature(app: Sphinx, what: str, name: str, thing: Any, options: Any, shown: str, result: str) -> Any:
    """Of a dataclass whose default is made anew each time."""
    return (shown or "").replace("<factory>", "...") or None, result


# ---- tables ----


def keep_numbers_together(app: Sphinx, doctree: nodes.document) -> None:
    """A cell such as 73.39 ± 0.85 stays on one line, however narrow the page."""
    for entry in doctree.findall(nodes.entry):
        if len(entry.astext()) <= 22:
            entry["classes"].append("short")


# ---- formulas ----


def mathml(tex: str, *, block: bool = False) -> str:
    """What browsers show without a library; GitHub wants `\\lt` for `<`, which docutils does not know."""
    return tex2mathml(tex.replace(r"\lt", "<"), as_block=block)


def inline_formula(self: Any, node: nodes.math) -> None:
    """$…$."""
    self.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def formula(self: Any, node: nodes.math_block) -> None:
    """A block of math."""
    self.body.append(f'<div class="math">{mathml(node.astext(), block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """What Sphinx calls."""
    app.add_html_math_renderer("mathml", (inline_formula, None), (formula, None))
    app.connect("source-read", read_source)
    app.connect("doctree-read", link_files, priority=400)  # before Sphinx takes them for downloads
    app.connect("doctree-read", keep_numbers_together)
    app.connect("autodoc-process-signature", readable_signature)
    app.connect("html-collect-pages", file_pages)
