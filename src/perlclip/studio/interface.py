"""The studio over HTTP: the page, what it shows as JSON, pictures, and what it may do.

A page asks for `/api/state` about once a second, which is small, and for the rest when that is new: the table of all
images (nine bytes each), the history, the check of labels. Places of images count in one listing of the folder; a
page that was loaded before the folder changed is told to load again.
"""

import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Semaphore
from typing import Any

import numpy as np

from perlclip.errors import PerlclipError
from perlclip.serve.guard import Refusal, busy, new_app, read_json
from perlclip.studio.project import NONE, Labels
from perlclip.studio.worker import Worker

try:
    from fastapi import FastAPI, Request
    from fastapi.concurrency import run_in_threadpool
    from fastapi.responses import JSONResponse, Response
except ImportError as error:
    raise PerlclipError("the studio needs FastAPI and uvicorn: pip install 'perlclip[studio]'") from error

STATIC = Path(__file__).parent / "static"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
FOREVER = {"cache-control": "private, max-age=31536000, immutable"}  # the address changes with the file
KEYS = 9  # of the keyboard, for as many classes
MOST_PLACES = 100_000  # in one stroke
LOOKS = 4  # into images that may wait for each other: threads that wait are not there for labels
EXPORTED = ("adapter/adapter_config.json", "adapter/adapter_model.safetensors", "adapter/README.md", "labels.csv",
            "report.html")  # fmt: skip


def studio_app(worker: Worker) -> FastAPI:
    """The app of one project, to be run behind a guard."""
    app, project, looks = new_app("perlclip studio", openapi_url=None), worker.project, Semaphore(LOOKS)

    def place_of(place: int) -> int:
        if not 0 <= place < len(project):
            raise Refusal(404, f"there are {len(project)} images, counted from 0")
        return place

    def here(given: Mapping[str, Any]) -> None:
        if given.get("listing") != project.listing:
            raise Refusal(409, "the folder has changed since this page was loaded: load it again")

    @app.get("/")
    @app.get("/static/{name}")
    def static(name: str = "index.html") -> Response:
        if name not in FILES:
            raise Refusal(404, "there is no such file")
        return Response((STATIC / name).read_bytes(), media_type=KINDS[Path(name).suffix])

    @app.get("/api/state")
    def state() -> Any:
        return JSONResponse(_state(worker))

    @app.get("/api/images")
    def images() -> Any:
        names = [_shown(name) for name in project.names]
        return JSONResponse({"listing": project.listing, "names": names, "keys": [key[:10] for key in project.keys]})

    @app.get("/api/table")
    def table() -> Response:
        return Response(_table(worker), media_type="application/octet-stream")

    @app.get("/api/history")
    def history() -> Any:
        return JSONResponse(worker.history[-2000:])

    @app.get("/api/check")
    def check() -> Any:
        return JSONResponse(worker.checked)

    @app.get("/api/unreadable")
    def unreadable() -> Any:
        return JSONResponse([{"place": p, "reason": _shown(why)} for p, why in worker.unreadable.items()])

    @app.get("/api/guess/{place}")
    @app.get("/api/look/{place}")
    def look(place: int, request: Request) -> Any:
        guesses = worker.guesses
        found = {"top": guesses.top(place_of(place), KEYS) if guesses else [], "held": project.is_held_out(place)}
        if request.url.path.startswith("/api/look"):
            if not looks.acquire(blocking=False):
                raise busy("several images are being looked into; come back in a second")
            try:
                found["maps"] = worker.explain(place) if worker.perl else None
            finally:
                looks.release()
        return JSONResponse(found)

    @app.get("/thumbnail/{place}")
    def thumbnail(place: int) -> Response:
        content, kind = worker.thumbnails.get(place_of(place))
        return Response(content, media_type=kind, headers=FOREVER)

    @app.get("/view/{place}")
    def view(place: int) -> Response:
        content, kind = worker.thumbnails.view(place_of(place))
        return Response(content, media_type=kind, headers=FOREVER)

    @app.get("/api/export.zip")
    def archive() -> Response:
        if not worker.exported:
            raise Refusal(404, "nothing has been exported yet")
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
            for name in EXPORTED:
                if (path := worker.out / name).is_file():
                    file.writestr(name, path.read_bytes())
        headers = {"content-disposition": 'attachment; filename="perlclip-export.zip"'}
        return Response(buffer.getvalue(), media_type="application/zip", headers=headers)

    def post(path: str, act: Callable[[dict[str, Any]], Any]) -> None:
        async def handle(request: Request) -> Any:
            given = read_json(await request.body(), MOST_PLACES + 100)
            if not isinstance(given, dict):
                raise PerlclipError("the request must be a JSON object")
            return JSONResponse(await run_in_threadpool(act, given))

        app.post(path)(handle)

    def label(given: dict[str, Any]) -> Any:
        here(given)
        places, value = given.get("places"), given.get("value")
        if type(value) is not int or not isinstance(places, list) or not all(type(p) is int for p in places):
            raise PerlclipError("a label is {places: [number, …], value: number of a class}")
        version = project.label(places, value, stroke=_word(given, "stroke"), by=_word(given, "by"))
        worker.wake()
        return {"version": version}

    def undo(given: dict[str, Any]) -> Any:
        here(given)
        places = project.undo(stroke=_word(given, "stroke"), by=_word(given, "by"))
        worker.wake()
        now = project.labels().of
        return {"version": project.version, "places": places, "values": [now.get(p, NONE) for p in places]}

    def classes(given: dict[str, Any]) -> Any:
        version = given.get("version")
        if type(version) is not int or not project.classes_version <= version <= project.version:
            raise Refusal(409, "somebody has changed the classes meanwhile: open them again, then save")
        pairs, template = given.get("classes"), given.get("template")
        if not isinstance(template, str) or not isinstance(pairs, list) or not all(map(_is_pair, pairs)):
            raise PerlclipError("classes are {classes: [[number or null, name], …], template: text}")
        worker.check_classes([name for _, name in pairs], template)
        project.set_classes([(number, name) for number, name in pairs], template)
        worker.wake()
        return {"version": project.version}

    def ask(given: dict[str, Any]) -> Any:
        what = given.get("what")
        if what not in ("train", "stop", "export"):
            raise PerlclipError("one may ask to train, stop or export")
        worker.ask(what, all=given.get("all") is True, kind=_word(given, "kind"))
        return {}

    for path, act in {"label": label, "undo": undo, "classes": classes, "ask": ask}.items():
        post(f"/api/{path}", act)
    return app


FILES = frozenset(path.name for path in STATIC.iterdir() if path.suffix in KINDS)


def _is_pair(given: Any) -> bool:
    return (
        isinstance(given, list)
        and len(given) == 2
        and (given[0] is None or type(given[0]) is int)
        and isinstance(given[1], str)
    )


def _word(given: Mapping[str, Any], name: str) -> str:
    word = given.get(name, "")
    if not isinstance(word, str) or len(word) > 64:
        raise PerlclipError(f"{name} is a word of 64 letters at most")
    return word


def _shown(text: str) -> str:
    """A file's name may have bytes that are no text."""
    return text.encode("utf-8", "replace").decode()


def _state(worker: Worker) -> dict[str, Any]:
    project, guesses, labels = worker.project, worker.guesses, worker.project.labels()
    queue = [p for p in guesses.queue if p not in labels.of] if guesses else []
    counts = labels.counts()
    return {
        "project": _shown(project.root.resolve().name), "listing": project.listing, "images": len(project),
        "version": labels.version, "classes": list(zip(labels.numbers, labels.names, strict=True)),
        "template": labels.template, "counts": {str(number): count for number, count in counts.items()},
        "looked": int(worker.features.have_N.sum()), "unreadable": len(worker.unreadable), "status": worker.as_json(),
        "guesses": guesses.round if guesses else 0, "guessed": guesses.labels.version if guesses else 0,
        "every": worker.every, "out": _shown(str(worker.out)),
        "queue": [[p, guesses.top(p, KEYS)] for p in queue] if guesses and guesses.labels.names == labels.names else [],
        "refits": len(worker.history), "backbone": worker.backbone.name, "exported": worker.exported or None,
        "perl": worker.perl is not None,
    }  # fmt: skip


def _table(worker: Worker) -> bytes:
    """Of all images the label, then the guess (both as 32 bits), then how sure it is (one byte)."""
    labels: Labels = worker.project.labels()
    guesses, size = worker.guesses, len(worker.project)
    label_N, guess_N, sure_N = np.full(size, NONE, "<i4"), np.full(size, NONE, "<i4"), np.zeros(size, "u1")
    if labels.of:
        label_N[list(labels.of)] = list(labels.of.values())
    if guesses and guesses.labels.numbers:
        p_N, c_N = guesses.p_NC.float().max(1)
        have_N = guesses.have_N.numpy()
        guess_N[have_N] = np.array(guesses.labels.numbers, "<i4")[c_N.numpy()[have_N]]
        sure_N[have_N] = np.round(255 * p_N.numpy()[have_N])
    return label_N.tobytes() + guess_N.tobytes() + sure_N.tobytes()
