"""`make docs`, second half: what was built is whole. Every link within the site leads somewhere, nothing is fetched.

    python -m scripts.site build/site

Links, pictures, scripts and styles of every page are looked up, with the place behind the #. Pages may link to other
sites; they may not load anything from them.
"""

import re
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src"), ("object", "data")}


class Page(HTMLParser):
    """The places of a page, and where it leads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: list[tuple[str, bool]] = []  # the address, and whether it is loaded with the page
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect."""
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.places.add(value)
            elif name in ("href", "src", "data") and value:
                self.links.append((value, (tag, name) in LOADED))


@cache
def page(path: Path) -> Page:
    """Of a file, read once."""
    return Page(path.read_text("utf-8"))


def wrong_links(path: Path) -> list[str]:
    """What a page leads to that is not there, or loads from elsewhere."""
    wrong = []
    for link, loaded in page(path).links:
        parts = urlsplit(link)
        if parts.scheme in ("http", "https", "mailto") or parts.netloc:
            wrong += [f"{link}: loaded from elsewhere"] if loaded else []
            continue
        if parts.scheme:  # data:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if not target.is_file():
            wrong.append(f"{link}: no such file")
        elif parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in page(target).places:
            wrong.append(f"{link}: no such place")
    return wrong


def wrong_styles(path: Path) -> list[str]:
    """What a style sheet loads from elsewhere."""
    return [
        f"{found}: loaded from elsewhere"
        for found in re.findall(r"(?:url\(|@import )['\"]?(https?:[^'\")]+)", path.read_text("utf-8"))
    ]


def main(folder: Path) -> int:
    """Say what is wrong; 1 if anything is."""
    pages = sorted(folder.rglob("*.html"))
    found = {path: wrong_links(path) for path in pages}
    found |= {path: wrong_styles(path) for path in sorted(folder.rglob("*.css"))}
    for path, wrong in found.items():
        for each in wrong:
            print(f"{path.relative_to(folder)}: {each}")
    links = sum(len(page(path).links) for path in pages)
    print(f"{len(pages)} pages, {links} links, {sum(map(len, found.values()))} wrong")
    return int(any(found.values()) or not pages)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
