"""HTML pages that need no other file and no network: style, script and pictures are in them."""

import base64
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def page(template: str, **values: Any) -> str:
    """`templates/TEMPLATE` with these values; text is escaped, and a value that is missing is an error."""
    return _TEMPLATES.get_template(template).render(values)


def data_url(content: bytes, kind: str) -> str:
    """A file as the address of itself."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


_TEMPLATES = Environment(
    loader=PackageLoader("perlclip.viz"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
    lstrip_blocks=True, keep_trailing_newline=True,
)  # fmt: skip
_TEMPLATES.filters["data_url"] = data_url
