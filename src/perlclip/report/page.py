"""The report as one HTML page that needs no other file: style, script and figures are in it."""

import base64
import re
from collections.abc import Sequence
from html import escape

from perlclip.report.dynamics import Chapter
from perlclip.report.plots import Drawing
from perlclip.report.sections import Section
from perlclip.report.tables import MISSING, OUTSIDE, Table
from perlclip.report.text import texts

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5d6675; --line: #dfe3ea; --page: #fff; --tint: #f4f6f9;
        --accent: #0072b2; --flag: #c04e00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #9aa4b5; --line: #333b49; --page: #14181f;
        --tint: #1d232d; --accent: #6cb8e6; --flag: #ff9a4d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 0 1.5rem 4rem; background: var(--page); color: var(--ink);
       font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
h1 { font-size: 1.9rem; margin: 2rem 0 .3rem; } h2 { font-size: 1.4rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .4rem; }
p, ul { max-width: 60rem; } .about { color: var(--soft); font-size: .9rem; }
a { color: var(--accent); }
nav { position: sticky; top: 0; z-index: 3; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: .7rem 0;
      max-height: 6rem; overflow-y: auto; background: var(--page); border-bottom: 1px solid var(--line);
      font-size: .92rem; }
nav a { text-decoration: none; } nav a:hover { text-decoration: underline; }
section { scroll-margin-top: 4rem; }
body:has(section:target) section:not(:target) { display: none; }
.scroll { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .8rem .32rem 0; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line); }
:is(th, td):first-child { padding-left: .4rem; } th:first-child { position: sticky; left: 0; background: var(--page); }
.count, .ratio { text-align: right; }
thead th { border-bottom: 2px solid var(--soft); vertical-align: bottom; }
thead button { all: unset; cursor: pointer; font-weight: 600; } thead button:focus-visible { outline: 2px solid; }
th[aria-sort=ascending] button::after { content: " ▲"; } th[aria-sort=descending] button::after { content: " ▼"; }
tbody tr:hover td, tbody tr:hover th { background: var(--tint); }
tbody th { font-weight: 400; } tr.perl th, tr.perl td { background: var(--tint); }
.words td, .words th { white-space: normal; }
td small { color: var(--soft); font-size: .82em; } td em { color: var(--flag); font-style: normal; font-weight: 600; }
.figures { display: flex; flex-wrap: wrap; align-items: flex-start; gap: 1rem 1.5rem; }
figure { margin: 1rem 0; flex: 1 1 26rem; max-width: 36rem; } figcaption { color: var(--soft); font-size: .85rem; }
.wide figure { max-width: 62rem; }
figure img { width: 100%; background: #fff; border: 1px solid var(--line); border-radius: 6px; padding: .6rem; }
summary { cursor: pointer; color: var(--accent); margin: .8rem 0; }
.warning { border-left: 4px solid var(--flag); padding: .3rem 1rem .3rem 1.2rem; background: var(--tint); }
ul.warning { padding-left: 2.2rem; }
@media print { nav { display: none; } body { max-width: none; padding: 0; font-size: 10pt; }
  body:has(section:target) section:not(:target) { display: block; }
  .scroll { overflow: visible; } table { font-size: 6.5pt; } th, td { padding: .15rem .25rem; }
  th:first-child { position: static; } tr, figure { break-inside: avoid; } }
"""

# Sorts by a cell's data-v; what has none stays at the end. Before printing, everything is opened.
SCRIPT = """
for (const head of document.querySelectorAll("thead th")) head.firstElementChild.addEventListener("click", () => {
  const down = head.getAttribute("aria-sort") === (head.cellIndex ? "descending" : "ascending");
  const rising = head.cellIndex ? down : !down;
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", rising ? "ascending" : "descending");
  const body = head.closest("table").tBodies[0];
  const key = row => row.cells[head.cellIndex].dataset.v;
  const order = (a, b) => a === undefined || b === undefined ? (a === undefined) - (b === undefined)
    : (rising ? 1 : -1) * (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
  body.append(...[...body.rows].sort((a, b) => order(key(a), key(b))));
});
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(d => d.open = true));
"""


def page(title: str, head: str, parts: Sequence[tuple[str, str, str]], tail: str) -> str:
    """`parts` are name, short title and HTML of the sections; `head` and `tail` HTML of what stands around them."""
    links = [f'<a href="#{escape(name)}">{escape(short)}</a>' for name, short, _ in parts]
    body = "\n".join(f'<section id="{escape(name)}">\n{html}\n</section>' for name, _, html in parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{head}
<nav><a href="#all">All</a>{"".join(links)}</nav>
<main id="all">
{body}
</main>
{tail}
<script>{SCRIPT}</script>
</body>
</html>
"""


def study_html(section: Section, drawings: Sequence[Drawing]) -> str:
    """A study: what is said about it, averages, figures, and set by set."""
    parts = [f"<h2>{escape(section.title)}</h2>"]
    parts.append(f"<p>{escape(section.sentences[0])}</p>\n<p class=about>{escape(' '.join(section.sentences[1:]))}</p>")
    parts += [f"<p class=warning>{escape(note)}</p>" for note in section.notes]
    parts += [table_html(section.summary)] if section.summary.lines else []
    parts += ["<div class=figures>", *(_figure(drawing) for drawing in drawings), "</div>"] if drawings else []
    parts += [table_html(table) for _, table in section.ablations]
    sets = [table_html(table) for table in section.sets]
    if len(sets) > 1:
        sets = [f"<details><summary>Set by set: {len(sets)} tables</summary>", *sets, "</details>"]
    parts += sets
    return "\n".join(parts)


def dynamics_html(chapter: Chapter) -> str:
    """An analysis: what was measured, averages as table and figure, and set by set."""
    found, (averages, *each) = chapter.found, map(_figure, chapter.drawings)
    parts = [f"<h2>{escape(chapter.title)}</h2>", f"<p class=about>{escape(found.note)}</p>"]
    parts += [plain_table(found.head, found.rows), f"<div class=wide>{averages}"]
    parts += [f"<details><summary>Set by set: {len(each)} figures</summary>", *each, "</details></div>"]
    return "\n".join(parts)


def _figure(drawing: Drawing) -> str:
    data = base64.b64encode(drawing.svg).decode()
    caption = escape(drawing.caption)
    image = f'<img alt="{caption}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def table_html(table: Table) -> str:
    """A table whose headers sort."""
    heads = f"<th scope=col><button type=button>{escape(table.head)}</button></th>" + "".join(
        f"<th scope=col class={column.kind}><button type=button>{escape(column.title)}</button></th>"
        for column in table.columns
    )
    rows = []
    for i, (line, (label, cells)) in enumerate(zip(table.lines, texts(table), strict=True)):
        parts = zip(cells, line.cells, table.columns, strict=True)
        columns = "".join(_cell(*text, cell.value, column.kind) for text, cell, column in parts)
        perl = " class=perl" if line.row.method == "perl" and not line.row.settings else ""
        key = label if line.setting is None else i  # settings are in order already
        rows.append(f'<tr{perl}><th scope=row data-v="{escape(str(key))}">{escape(label)}</th>{columns}</tr>')
    return f'<h3 id="{escape(table.name)}">{escape(table.title)}</h3>\n{_scrolled("", heads, rows)}'


def plain_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Words in rows and columns, whose headers sort as well."""
    heads = "".join(f"<th scope=col><button type=button>{escape(text)}</button></th>" for text in head)
    return _scrolled(" class=words", heads, [f"<tr>{''.join(map(_word, row))}</tr>" for row in rows])


def _scrolled(kind: str, heads: str, rows: Sequence[str]) -> str:
    body = "\n".join(rows)
    return f"<div class=scroll><table{kind}>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"


def _word(text: str) -> str:
    sort = "" if text in ("", MISSING) else f' data-v="{escape(text)}"'
    return f"<td{sort}>{escape(text)}</td>"


def _cell(main: str, rest: str, mark: str, value: float | None, kind: str) -> str:
    number = {"best": "<b>{}</b>", "second": "<u>{}</u>", "": "{}"}[mark].format(escape(main))
    rest = re.sub(rf"\S+{OUTSIDE}\S*", r"<em>\g<0></em>", escape(rest))
    small = f" <small>{rest}</small>" if rest else ""
    sort = "" if value is None else f' data-v="{value!r}"'
    return f"<td class={kind}{sort}>{number}{small}</td>"
