"""Image files as they come in requests: base64, data URIs, parts of a form. An address is never fetched."""

import base64
import binascii
import logging
from typing import Any

from starlette.datastructures import UploadFile
from starlette.requests import Request

from perlclip.errors import PerlclipError
from perlclip.serve.guard import Refusal, read_json

# It has a line for every form that is none, and who sends such forms could fill the disk.
logging.getLogger("python_multipart").setLevel(logging.ERROR)
FIELDS = 64  # of a form, beside its files
FIELD_BYTES = 4096


def image_bytes(text: Any) -> bytes:
    """From base64, alone or as a data URI."""
    if not isinstance(text, str):
        raise PerlclipError("an image is a string: its file as base64, or a data URI")
    if text[:5].lower() == "data:":
        head, comma, text = text.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise PerlclipError("a data URI of an image begins with data:image/…;base64,")
    elif text[:8].lower().startswith(("http:", "https:", "file:", "ftp:")):
        raise PerlclipError("this service fetches nothing: send the image itself, as base64 or in a form")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PerlclipError("an image is not valid base64") from error


async def read_request(request: Request, most: int) -> tuple[list[bytes], list[str], dict[str, Any]]:
    """The images, the adapters' names and the other fields of a predict request, as JSON or as a form."""
    if "content-encoding" in request.headers:
        raise Refusal(415, "a compressed request is not unpacked")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        given = read_json(await request.body())
        if not isinstance(given, dict):
            raise PerlclipError("the request must be a JSON object")
        images, names = given.pop("images", None), given.pop("adapters", None)
        names = [names] if isinstance(names, str) else names
        if not isinstance(images, list) or not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise PerlclipError("'images' must be a list of strings, 'adapters' a name or a list of names")
        if len(images) > most:
            raise Refusal(413, f"a request has at most {most} images, not {len(images)}")
        return [image_bytes(text) for text in images], names, given
    if kind != "multipart/form-data":
        raise Refusal(415, "send JSON (application/json) or a form with files (multipart/form-data)")
    async with request.form(max_files=most, max_fields=FIELDS, max_part_size=FIELD_BYTES) as form:
        files, names, rest = [], [], {}
        for key, value in form.multi_items():
            if key == "images":
                if not isinstance(value, UploadFile):
                    raise PerlclipError("'images' of a form are files")
                files.append(await value.read())
            elif isinstance(value, UploadFile):
                raise PerlclipError("files of a form are called 'images'")
            elif key == "adapters":
                names += [name.strip() for name in value.split(",")]
            else:
                rest[key] = value
        return files, names, rest
