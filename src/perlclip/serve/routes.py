"""The service's addresses: `/v1/…` are our own, `/v2/…` the Open Inference Protocol's, the others watch over it."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from html import escape
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, Field

import perlclip
from perlclip.errors import PerlclipError
from perlclip.inference.judging import Prediction
from perlclip.serve.counters import Counters
from perlclip.serve.guard import Refusal, new_app
from perlclip.serve.images_in import read_request
from perlclip.serve.open_inference import HEADER, InferRequest, model_metadata
from perlclip.serve.service import Options, Service

EXTENSIONS = ["binary_tensor_data"]
STYLE = """:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
main { max-width: 46rem; margin: 0 auto; padding: 1.5rem 1rem 4rem }
dt { margin-top: 1rem; overflow-wrap: anywhere }
dt b { display: inline-block; min-width: 3.2rem; font-size: .8rem; letter-spacing: .05em }
dd { margin: 0 0 0 3.5rem; opacity: .8 }
@media (max-width: 600px) { dd { margin-left: 0 } }
"""


class PredictRequest(Options):
    """Images, and the adapters to ask; the rest as `Classifier.predict` has it."""

    images: list[str] = Field(description="image files as base64, or data URIs")
    adapters: str | list[str]


class Label(BaseModel):
    """A class and its probability."""

    label: str
    probability: float


class AdapterAnswer(Label):
    """What one adapter says of one image."""

    top: list[Label]
    steps: int | None = None
    rejected: bool | None = None
    labels: list[str] | None = None


class Result(BaseModel):
    """Of one image: the answers by adapter or, with `on_error` "skip", why it cannot be read."""

    answers: dict[str, AdapterAnswer] | None = None
    error: str | None = None


class Results(BaseModel):
    """In the order of the images."""

    results: list[Result]


class Refused(BaseModel):
    """Every answer that is no."""

    error: str


def make_app(service: Service) -> FastAPI:
    """The app; it closes the service when it ends."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    refusals: dict[int | str, dict[str, Any]] = {"4XX": {"model": Refused}, "5XX": {"model": Refused}}
    app = new_app("perlclip", version=perlclip.__version__, lifespan=life, responses=refusals)
    app.add_middleware(Counters, service=service)
    _add_own(app, service)
    _add_open_inference(app, service)
    _add_watching(app, service)
    return app


def _add_own(app: FastAPI, service: Service) -> None:
    schema = PredictRequest.model_json_schema()
    form = {**schema["properties"], "images": {"type": "array", "items": {"type": "string", "format": "binary"}}}
    bodies = {
        "application/json": {"schema": schema},
        "multipart/form-data": {"schema": {"type": "object", "properties": form, "required": schema["required"]}},
    }

    @app.post(
        "/v1/predict",
        responses={200: {"model": Results}},
        openapi_extra={"requestBody": {"required": True, "content": bodies}},
    )
    async def predict(request: Request) -> Response:
        """Ask one or several adapters about one or several images."""
        files, names, rest = await read_request(request, service.config.max_images)
        found = await service.predict(files, names, Options.read(rest))
        results = [
            {"error": str(one)} if isinstance(one, Refusal) else {"answers": {n: _answer(p) for n, p in one.items()}}
            for one in found
        ]
        return JSONResponse({"results": results})

    @app.get("/v1/adapters")
    def adapters() -> dict[str, Any]:
        """All adapters of the folder; those that are loaded with their bytes in memory."""
        loaded = service.shelf.loaded()
        found = [{"name": name, "loaded": name in loaded, "bytes": loaded.get(name)} for name in service.shelf.names()]
        return {"adapters": found, "bytes": service.shelf.bytes, "max_bytes": service.shelf.max_bytes}

    @app.get("/v1/adapters/{name}")
    def adapter(name: str) -> dict[str, Any]:
        """One adapter: its classes, method, and what it can be asked for."""
        info = service.shelf.info(name)
        return {
            "name": name,
            "method": info["method"],
            "backbone": info["base_model_name_or_path"],
            "class_names": info["class_names"],
            "template": info["templates"][0],
            "steps": info["config"].get("steps"),
            "head": "head" in info,
            "adaptive": "adaptive" in info,
            "trust": "trust" in info,
        }


def _answer(found: Prediction) -> dict[str, Any]:
    return {
        "label": found.label,
        "probability": found.probability,
        "top": [{"label": label, "probability": p} for label, p in found.top],
        "steps": found.steps,
        **({} if found.rejected is None else {"rejected": found.rejected}),
        **({} if found.labels is None else {"labels": found.labels}),
    }


def _add_open_inference(app: FastAPI, service: Service) -> None:
    @app.get("/v2")
    def server() -> dict[str, Any]:
        """What this server is."""
        return {"name": "perlclip", "version": perlclip.__version__, "extensions": EXTENSIONS}

    @app.get("/v2/models/{name}")
    @app.get("/v2/models/{name}/versions/1", include_in_schema=False)
    def model(name: str) -> dict[str, Any]:
        """An adapter's inputs and outputs."""
        return model_metadata(name, len(service.shelf.info(name)["class_names"]))

    @app.get("/v2/models/{name}/ready")
    @app.get("/v2/models/{name}/versions/1/ready", include_in_schema=False)
    async def model_ready(name: str) -> dict[str, Any]:
        """Whether the adapter can be asked; loads it."""
        await service.adapter(name)
        return {"name": name, "ready": True}

    @app.post("/v2/models/{name}/infer")
    @app.post("/v2/models/{name}/versions/1/infer", include_in_schema=False)
    async def infer(name: str, request: Request) -> Response:
        """Ask one adapter, by the Open Inference Protocol."""
        if "content-encoding" in request.headers:
            raise Refusal(415, "a compressed request is not unpacked")
        asked = InferRequest.read(await request.body(), request.headers.get(HEADER))
        options = Options.read(asked.parameters)
        if options.coverage is not None or options.multi_label or options.on_error != "stop":
            only = "coverage, multi_label and on_error are for /v1/predict"
            raise PerlclipError(f"{only}: the protocol has no room for their answers")
        found = await service.predict(asked.files, [name], options)
        body, headers = asked.respond(name, [one[name] for one in found if not isinstance(one, Refusal)])
        return Response(body, headers=headers)


def _add_watching(app: FastAPI, service: Service) -> None:
    @app.get("/healthz")
    @app.get("/v2/health/live")
    async def live() -> dict[str, bool]:
        """The process answers."""
        return {"live": True}

    @app.get("/readyz")
    @app.get("/v2/health/ready")
    async def ready(request: Request) -> Response:
        """It takes requests: its engine has warmed up and runs, and it is not about to end."""
        guard = request.scope.get("perlclip.guard")
        up = service.batcher.ready and service.batcher.alive and not (guard and guard.draining)
        return JSONResponse({"ready": up}, 200 if up else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Counters for Prometheus."""
        return Response(request.scope["perlclip.counters"].text(), media_type="text/plain; version=0.0.4")

    @app.get("/page.css", include_in_schema=False)
    def style() -> Response:
        """Of that page; a style within it is forbidden, as everywhere."""
        return Response(STYLE, media_type="text/css")

    @app.get("/docs", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    def page() -> HTMLResponse:
        """What there is."""
        return HTMLResponse(_page(app.openapi()))


def _page(schema: Mapping[str, Any]) -> str:
    """The addresses of an OpenAPI schema, without a script."""
    rows = "".join(
        f"<dt><b>{method.upper()}</b> <code>{escape(path)}</code></dt><dd>{escape(about.get('description', ''))}</dd>"
        for path, methods in schema["paths"].items()
        for method, about in methods.items()
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>perlclip serve</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        '<link rel="stylesheet" href="/page.css"></head><body><main>'
        f"<h1>perlclip serve {escape(perlclip.__version__)}</h1><p>One backbone, many adapters. "
        '<a href="/v1/adapters">Adapters</a> · <a href="/metrics">metrics</a> · '
        f'fields of requests and answers: <a href="/openapi.json">openapi.json</a></p><dl>{rows}</dl>'
        "</main></body></html>"
    )
