"""The picture of the house, drawn from the order of imports that tests/test_house.py enforces.

python -m scripts.house            # writes docs/house.svg; the table of docs/inside.md is `scripts/documents.py`'s
"""

import ast
import re
from html import escape
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "perlclip"
PICTURE = ROOT / "docs" / "house.svg"
# Floors from the bottom up, each by its first package, with what it is for.
FLOORS = {
    "errors": "what everything may use",
    "data": "images and frozen towers: neither knows the other",
    "methods": "what is trained, and what an answer is made of",
    "adapters": "train, keep, answer",
    "bench": "in quantity, and out of Python",
    "viz": "to look at",
    "serve": "who asks",
}
WORDS = {
    "errors": "one sentence", "files": "whole or not there", "progress": "bars, lines", "threads": "one, if short",
    "text": "names, templates",
    "data": "folders, tables, suites, toybox", "backbone": "CLIP, SigLIP, … opened between blocks",
    "methods": "one file each", "reference": "plain forms", "thinking": "when to stop", "heads": "closed form",
    "trust": "calibration", "adapters": "folder, card, hub", "training": "one loop",
    "inference": "Classifier, evaluate", "labels": "check, suggest", "bench": "runs, store",
    "batch": "jobs, shards", "export": "ONNX",
    "viz": "one style", "report": "tables, paper", "analysis": "step by step", "serve": "HTTP", "studio": "a page",
    "cli": "perlclip …",
}  # fmt: skip
WIDTH, HEIGHT, GAP, LEFT, RIGHT, TOP = 900, 46, 10, 40, 860, 96
COLOURS = ("#e8eef4", "#d6e4f0", "#f9dcb4", "#f6cf98", "#dbe9d6", "#cfe3d8", "#e6dcef")


def order() -> list[str]:
    """The packages from the bottom up, as the test has them."""
    body = ast.parse((ROOT / "tests" / "test_house.py").read_text("utf-8")).body
    found = next(n.value for n in body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "ORDER")
    return list(chain.from_iterable(ast.literal_eval(found)))


def floors() -> list[list[str]]:
    """The packages of each floor, in the order of imports."""
    found: list[list[str]] = []
    for package in order():
        found += [[]] if package in FLOORS else []
        found[-1].append(package)
    return found


def imports(package: str) -> set[str]:
    """The packages of ours that one imports; the test has it from the syntax tree, here the lines will do."""
    files = [SOURCE / f"{package}.py", *(SOURCE / package).rglob("*.py")]
    text = "\n".join(path.read_text("utf-8") for path in files if path.exists())
    found = set(re.findall(r"^\s*(?:from|import) perlclip\.(\w+)", text, re.M))
    return (found | set(re.findall(r"^\s*from perlclip import (\w+)$", text, re.M))) & set(order()) - {package}


def house() -> str:
    """The picture, as SVG."""
    storeys = floors()
    pitch = HEIGHT + 34
    bottom = TOP + pitch * len(storeys)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{bottom + 34}" viewBox="0 0 {WIDTH} '
        f'{bottom + 34}" font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#1b2733" role="img" '
        'aria-labelledby="title desc">',
        '<title id="title">The packages of perlclip</title>',
        '<desc id="desc">Floors of a house, from errors, files, progress, threads and text at the bottom to '
        "serve, studio and cli under the roof. A package imports only what stands below it, or left of it on its "
        "floor.</desc>",
        f'<rect width="{WIDTH}" height="{bottom + 34}" fill="#ffffff"/>',
        f'<path d="M{LEFT - 26},{TOP - 4} L{WIDTH / 2},14 L{RIGHT + 26},{TOP - 4} z" fill="#f4ece2" stroke="#8a6d4b" '
        'stroke-width="1.5"/>',
        f'<text x="{WIDTH / 2}" y="{TOP - 34}" text-anchor="middle" font-size="16" font-weight="bold">perlclip</text>',
        f'<text x="{WIDTH / 2}" y="{TOP - 14}" text-anchor="middle" fill="#44566a">the public names, each imported '
        "when first used</text>",
        f'<rect x="{LEFT - 14}" y="{TOP - 4}" width="{RIGHT - LEFT + 28}" height="{bottom - TOP + 4}" fill="none" '
        'stroke="#8a6d4b" stroke-width="1.5"/>',
    ]
    for number, packages in enumerate(storeys):
        y = bottom - pitch * (number + 1)
        wide = (RIGHT - LEFT + GAP) / len(packages) - GAP
        parts.append(
            f'<text x="{LEFT}" y="{y + 17}" font-size="12" fill="#44566a">{escape(FLOORS[packages[0]])}</text>'
        )
        for place, package in enumerate(packages):
            x = LEFT + place * (wide + GAP)
            middle = x + wide / 2
            parts += [
                f'<rect x="{x:.1f}" y="{y + 24}" width="{wide:.1f}" height="{HEIGHT}" rx="4" fill="{COLOURS[number]}" '
                'stroke="#3f6b93"/>',
                f'<text x="{middle:.1f}" y="{y + 43}" text-anchor="middle" font-weight="bold">{package}</text>',
                f'<text x="{middle:.1f}" y="{y + 60}" text-anchor="middle" font-size="11.5" fill="#44566a">'
                f"{escape(WORDS[package])}</text>",
            ]
    parts += [
        f'<text x="{WIDTH / 2}" y="{bottom + 22}" text-anchor="middle" fill="#44566a">imports go down, or to the left '
        "on one floor: never up, never in a circle</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def rows() -> list[list[str]]:
    """Of each package from the top down: its name, the first sentence of its docstring, and what it imports."""
    found = []
    for package in reversed(order()):
        path = SOURCE / package / "__init__.py" if (SOURCE / package).is_dir() else SOURCE / f"{package}.py"
        text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        sentence = re.split(r"\.\s|\.$", text.replace("\n", " "))[0]
        sentence = sentence if len(sentence) < 140 else sentence.partition(":")[0]
        used = imports(package)
        found.append([f"`{package}`", sentence, ", ".join(name for name in order() if name in used) or "–"])
    return found


if __name__ == "__main__":
    PICTURE.write_text(house(), "utf-8")
