"""The report as files: that all of them agree, need nothing else and come out the same; and the command."""

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from perlclip.bench.store import Store, failed_record
from perlclip.errors import PerlclipError
from perlclip.report.collect import collect
from perlclip.report.formats import escaped
from perlclip.report.paper import NAMES
from perlclip.report.write import write_report
from perlclip.viz.markup import markdown_text
from tests.cli.test_cli import fails, run
from tests.report.reports import NUMBERS, SETS, analysis_files, identity, markdown_tables, put


@pytest.fixture
def out(real, store, tmp_path) -> Path:
    """Both suites, an ablation, shots, transfer and an analysis in one report."""
    for steps in (1, 2):
        put(store, identity("base-to-novel", "a", "perl", 1, settings=(("steps", steps),)), {"base": 60, "novel": 60})
    for shots in (1, 4):
        put(store, identity("few-shot", "set_1", "perl", shots=shots), {"all": 50 + shots})
    put(store, identity("domain-shift", "toybox", "perl"), {"toybox": 50, "toybox_v2": 60})
    one = identity("base-to-novel", "b", "mmrl", 2)
    Store(store).write(one, failed_record(one, RuntimeError("<no memory>")))
    write_report([store, real], tmp_path / "out", analysis=[analysis_files(tmp_path / "analysis")])
    return tmp_path / "out"


def test_all_files_are_there(out):
    toy = "base-to-novel-toybox-tiny-float32-16shot"
    assert {path.name for path in out.iterdir()} == {
        "report.md", "index.html", "runs.csv", "tables", "figures", "latex",
    }  # fmt: skip
    figures = {path.name for path in (out / "figures").iterdir()}
    for stem in (f"{toy}-parameters", f"{toy}-ablation-steps-fast", "few-shot-toybox-tiny-float32-shots"):
        assert {f"{stem}.png", f"{stem}.svg"} <= figures
    assert len([name for name in figures if not name.startswith("dynamics-")]) == 8, "and the real suite's parameters"
    rows = list(csv.DictReader((out / "runs.csv").open()))
    assert len(rows) == len(NUMBERS) + 2 + 2 + 1 + 44
    text = (out / "report.md").read_text()
    assert "59 complete runs, 1 failed, 0 damaged records." in text
    assert "- failed: base-to-novel/toybox/b/mmrl/fast/seed2: RuntimeError: \\<no memory\\>" in text
    for link in re.findall(r"\]\((figures/[^)]+)\)", text):
        assert (out / link).is_file()


def plain(text: str) -> str:
    """A cell without marks, as Markdown and HTML have it."""
    return re.sub(r"\*\*|</?\w+[^>]*>", "", text).strip()


LATEX = {
    r"$\pm$": "±",
    "$-$": "−",
    r"$\times$": "×",
    r"$\dagger$": "†",
    "--": "–",
    r"$\Delta$": "Δ",
    r"\_": "_",
    r"\%": "%",
}


def unescaped(text: str) -> str:
    text = re.sub(r"\\(?:textbf|underline)\{([^}]*)\}", r"\1", text)
    for source, meant in LATEX.items():
        text = text.replace(source, meant)
    return text.strip()


def as_printed(cell: str) -> str:
    word, *rest = cell.split(" ", 1)
    return " ".join([NAMES.get(word, word), *rest])


class Rows(HTMLParser):
    """Tables of a page, and whether its tags are balanced."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.tables, self.links, self.ids, self.values = [], [], [], [], []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.links += [found[key] for key in ("src", "href") if key in found]
        self.ids += [found["id"]] if "id" in found else []
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self.values.append(found.get("data-v"))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data


def test_markdown_latex_html_and_csv_show_the_same_numbers(out):
    page = Rows()
    page.feed((out / "index.html").read_text())
    in_page = {json.dumps(table) for table in page.tables}
    # LaTeX has methods and sets by their published names.
    printed = {json.dumps([[as_printed(cell) for cell in row] for row in table]) for table in page.tables}
    in_text = {
        json.dumps([[plain(cell) for cell in row] for row in [table[0], *table[2:]]])
        for table in markdown_tables((out / "report.md").read_text())
    }
    assert in_page == in_text
    for path in sorted((out / "tables").glob("*.tex")):
        blocks = [
            [
                [unescaped(cell) for cell in line.removesuffix(r" \\").split(" & ")]
                for line in block.splitlines()
                if "&" in line
            ]
            for block in path.read_text().split(r"\begin{tabular}")[1:]
        ]
        joined = [[row[0] for row in blocks[0]], *(c for block in blocks for c in list(zip(*block, strict=True))[1:])]
        assert json.dumps([list(row) for row in zip(*joined, strict=True)]) in printed
        if path.stem == "dynamics":
            continue  # its CSV has every number, a line each
        rows = list(csv.DictReader(path.with_suffix(".csv").open()))
        assert [as_printed(row["label"]) for row in rows] == joined[0][1:]
        ours = {shown: name for name, shown in NAMES.items()}
        for column in joined[1:]:
            name = ours.get(column[0], column[0]).replace("×", "times").replace("Δ", "delta").replace(" ", "_")
            for row, text in zip(rows, column[1:], strict=True):
                shown = re.match(r"([+−]?[\d,.]+)×?(?: ± ([\d.]+))?", text)
                assert (row[name] == "") == (shown is None)
                if shown and "×" not in text:
                    assert float(row[name]) == pytest.approx(
                        float(shown[1].replace(",", "").replace("−", "-")), abs=0.0051
                    )
                    assert row.get(f"{name}_std", "") == "" or float(row[f"{name}_std"]) == pytest.approx(
                        float(shown[2]), abs=0.0051
                    )
                    assert row.get(f"{name}_outside") in (None, "", str(int("†" in text)))


def test_latex_is_balanced_escaped_and_as_wide_as_it_says(out):
    sources = [path.read_text() for path in (out / "tables").glob("*.tex")]
    assert len(sources) == len(list((out / "tables").glob("*.csv"))) > 10
    for source in sources:
        assert re.sub(r"\\[{}]", "", source).count("{") == re.sub(r"\\[{}]", "", source).count("}")
        begun, ended = (re.findall(rf"\\{word}{{(\w+)}}", source) for word in ("begin", "end"))
        assert sorted(begun) == sorted(ended) and begun[0] == ended[-1] == "table"
        assert source.isascii(), "whatever the document's encoding"
        for spec, body in re.findall(r"\\begin{tabular}{@{}([lr]+)@{}}(.*?)\\end{tabular}", source, re.S):
            lines = [line for line in body.splitlines() if line.endswith(r"\\")]
            assert {len(re.findall(r"(?<!\\)&", line)) + 1 for line in lines} == {len(spec)}
        assert not re.search(r"(?<!\\)[%#]", source)
        assert not re.search(r"(?<!\\)_", re.sub(r"\\label{[^}]*}", "", source))
    assert escaped("50 % of a_b & {c} \\ − ±") == r"50 \% of a\_b \& \{c\} \textbackslash{} $-$ $\pm$"


def test_latex_as_the_paper_lays_it_out(out):
    real, toy = (out / "latex" / f"base-to-novel-{name}-float32-16shot-paper.tex" for name in (
        "coop-clip-vit-base-patch16", "toybox-tiny",
    ))  # fmt: skip
    head, *lines = [line for line in real.read_text().splitlines() if line.endswith(r"\\")]
    words = head.removesuffix(r" \\").split(" & ")
    assert words[:3] == ["Method", r"\#Params", r"$\times$PERL"] and words[-1] == r"$\Delta$HM"
    named = re.findall(r"rotatebox\{90\}\{([^}]*)\}", head)
    assert named == [NAMES[name] for name in SETS[:11]] and words[-4:-1] == ["Base", "Novel", "HM"]
    assert [line.split(" & ")[0] for line in lines] == ["CoOp", "PERL"]
    assert lines[0].split(" & ")[3] == r"\underline{30.00}" and lines[1].endswith(r"& -- \\")
    body = toy.read_text()
    assert body.count(r"\midrule") == 3 and "CLIP & 0 & -- & " in body, "zero-shot, methods, PERL"
    assert body.isascii() and "$\\pm$" not in body


def test_the_page_needs_nothing_else(out):
    text = (out / "index.html").read_text()
    page = Rows()
    page.feed(text)
    assert not page.open and len(page.ids) == len(set(page.ids))
    anchors = {link[1:] for link in page.links if link.startswith("#")}
    assert anchors <= set(page.ids) and len(anchors) == 6, "all, four studies and the analysis"
    assert all(link.startswith(("#", "data:image/svg+xml;base64,")) for link in page.links)
    assert "http" not in text and "@import" not in text and "<script>" in text
    assert "RuntimeError: &lt;no memory&gt;" in text


def test_the_same_records_give_the_same_bytes(out, real, store, tmp_path):
    write_report([store, real], tmp_path / "again", analysis=[tmp_path / "analysis"])
    first, again = ({p.relative_to(d): p.read_bytes() for p in d.rglob("*.*")} for d in (out, tmp_path / "again"))
    assert first == again and len(first) > 20


def test_the_command_prints_the_summary_and_says_where_files_are(store, tmp_path):
    result = run("report", store, "--out", tmp_path / "out")
    assert re.search(r"\| \*\*81\.00\*\* ± 1\.00 +\|", result.stdout)
    assert "10 complete runs, 0 failed, 0 damaged records." in result.stdout
    assert str(tmp_path / "out" / "index.html") in result.stdout


def test_errors_are_one_sentence(store, tmp_path):
    assert "no such folder of runs" in fails("report", tmp_path / "nowhere", "--out", tmp_path / "out")
    (tmp_path / "empty" / "x").mkdir(parents=True)
    (tmp_path / "empty" / "x" / "run.json").write_text("{")
    with pytest.raises(PerlclipError, match=r"no complete run below .*empty \(0 failed, 1 damaged\)"):
        collect([tmp_path / "empty"])


def test_names_that_mean_something_elsewhere_are_text_everywhere(tmp_path):
    """A setting, a backbone and a data set of a record can be anything."""
    odd = r"$\input{x}$|<i>_&`"
    for dataset in ("a", odd):
        for seed in (1, 2):
            run = identity("base-to-novel", dataset, "coop", seed, settings=(("init", odd),), backbone=f"my {odd}")
            put(tmp_path / "runs", run, {"base": 50, "novel": 60})
    write_report([tmp_path / "runs"], tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    shown = markdown_text(odd)
    assert f"coop init={shown}" in text and odd not in text and "<i>" not in text.replace(r"\<i\>", "")
    for table in markdown_tables(text.replace(r"\|", "¦")):
        assert len({len(row) for row in table}) == 1, "a bar in a name makes no column"
    page = (tmp_path / "out" / "index.html").read_text()
    assert "<i>" not in page and r"$\input{x}$|&lt;i&gt;_&amp;`" in page
    for path in (tmp_path / "out" / "tables").glob("*.tex"):
        assert r"\input" not in path.read_text() and "<" not in path.read_text()
