"""From image files and adapters' names to answers: what all routes ask."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from perlclip.adapters.folder import CONFIG, load_adapter
from perlclip.backbone import Backbone, load_backbone
from perlclip.errors import PerlclipError
from perlclip.files import MIB
from perlclip.inference.judging import AnswerForm, Prediction, check_several
from perlclip.serve.batching import Batcher
from perlclip.serve.decode_pool import Decoders
from perlclip.serve.engine import Engine, ImageRow, Loaded
from perlclip.serve.guard import Refusal, as_refusal
from perlclip.serve.shelf import Shelf
from perlclip.thinking.limits import check_limits, clock
from perlclip.trust.conformal import KIND
from perlclip.trust.rejection import RATE

LABELS = 100_000  # of all answers to a request
WARMED = 8  # adapters that are looked at for a PERL to warm up with


class Options(BaseModel):
    """What `Classifier.predict` takes, under the same names."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    top_k: Annotated[int, Field(ge=1, le=1000)] = 1
    steps: int | Literal["adaptive"] | None = None
    max_mean_steps: float | None = None
    max_ms: float | None = None
    reject: bool = False
    reject_rate: float = RATE
    coverage: float | None = None
    sets: str = KIND
    multi_label: bool = False
    on_error: Literal["stop", "skip"] = "stop"

    @classmethod
    def read(cls, values: dict[str, Any]) -> "Options":
        """From JSON or a form; one sentence for what is wrong."""
        try:
            found = cls.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            known = ", ".join(cls.model_fields) if first["type"] == "extra_forbidden" else ""
            what = str(first["loc"][0])[:40] if first["loc"] else "the request"
            said = f"{what!r} is not one of {known}" if known else f"{what}: {first['msg']}"
            raise PerlclipError(said) from error
        check_limits(found.max_mean_steps, found.max_ms)
        limits = found.steps, found.max_mean_steps, found.max_ms
        check_several(found.multi_label, found.reject, found.coverage, *limits)
        return found


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """How much a service does at once, and keeps."""

    batch_size: int = 32
    max_wait_ms: float = 2.0
    max_rows: int = 1024
    max_images: int = 64  # of one request
    workers: int = 2
    max_pixels: int = 50_000_000
    decode_seconds: float = 10.0
    cache_bytes: int = 1024 * MIB


Answers = dict[str, Prediction]  # by adapter


class Service:
    """Adapters of a folder on one backbone, ready to be asked."""

    def __init__(self, folder: str | Path, backbone: Backbone, config: ServiceConfig | None = None) -> None:
        self.config = config = config or ServiceConfig()
        self.backbone = backbone
        self.shelf = Shelf(folder, backbone, max_bytes=config.cache_bytes)
        self.decoders = Decoders(
            backbone.preprocess, backbone.preprocess.size, device=backbone.device, workers=config.workers,
            max_pixels=config.max_pixels, seconds=config.decode_seconds,
        )  # fmt: skip
        engine = Engine(backbone)
        self.batcher = Batcher(
            engine, batch_size=config.batch_size, max_wait_ms=config.max_wait_ms, max_rows=config.max_rows,
            first=partial(self._warm_up, engine),
        )  # fmt: skip
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="loader")

    def close(self) -> None:
        """What is being answered is answered first."""
        self.batcher.close()
        self.decoders.close()
        self._loader.shutdown(cancel_futures=True)

    def _warm_up(self, engine: Engine) -> None:
        """With the first PERL there is: others of its depth, rank and steps are then as quick."""
        for name in self.shelf.names()[:WARMED]:
            with suppress(Refusal):  # one that cannot be loaded
                adapter = self.shelf.get(name)
                engine.warm_up(adapter, self.config.batch_size)
                if adapter.shape:
                    return

    async def predict(self, files: Sequence[bytes], names: Sequence[str], options: Options) -> list[Answers | Refusal]:
        """Each image's answer by each adapter; with `on_error="skip"` a refusal in the place of an unreadable one's."""
        came = clock()
        names = list(dict.fromkeys(names))
        if not files or not names:
            raise PerlclipError("a request has at least one image and names at least one adapter")
        if len(files) > self.config.max_images:
            raise Refusal(413, f"a request has at most {self.config.max_images} images, not {len(files)}")
        with self.batcher.reserve(len(files) * len(names)):
            asked = [await self._asked(name, options) for name in names]
            sets = options.coverage is not None or options.multi_label
            said = sum(len(one.classifier.class_names) if sets else form.top_k for one, form in asked)
            if said * len(files) > LABELS:
                raise Refusal(413, f"an answer has at most {LABELS:,} labels: ask for fewer images, adapters or top_k")
            views = await self._views(files, options)
            until = None if options.max_ms is None else came + options.max_ms / 1000
            rows = [
                ImageRow(
                    pixels=view, adapter=adapter, wanted=wanted, steps=options.steps,
                    max_mean_steps=_account(options, adapter), until=until,
                )
                for view in views if isinstance(view, Tensor) for adapter, wanted in asked
            ]  # fmt: skip
            for row in rows[: len(asked)]:
                row.plan()  # refused now, not among others
            found = iter(await self.batcher.answer(rows)) if rows else iter(())
        answers: list[Answers | Refusal] = []
        for view in views:
            if isinstance(view, Refusal):
                answers.append(view)
                continue
            mine = {name: next(found) for name in names}
            for one in mine.values():
                if isinstance(one, PerlclipError):
                    raise Refusal(500, str(one))
            answers.append({name: one for name, one in mine.items() if isinstance(one, Prediction)})
        return answers

    async def adapter(self, name: str) -> Loaded:
        """Loaded if need be, which others do not wait for."""
        return self.shelf.known(name) or await self._later(self.shelf.get, name)

    async def _asked(self, name: str, options: Options) -> tuple[Loaded, AnswerForm]:
        adapter = await self.adapter(name)
        check = partial(
            adapter.classifier.judge.wanted, top_k=options.top_k, reject=options.reject,
            reject_rate=options.reject_rate, coverage=options.coverage, sets=options.sets,
            multi_label=options.multi_label,
        )  # fmt: skip
        if not options.reject:
            return adapter, check()
        wanted = await self._later(check)  # which encodes words when it is first asked
        self.shelf.weigh(name)
        return adapter, wanted

    async def _views(self, files: Sequence[bytes], options: Options) -> list[Tensor | Refusal]:
        tasks = [asyncio.ensure_future(self.decoders.decode(data)) for data in files]
        try:
            if options.on_error == "stop":
                return list(await asyncio.gather(*tasks))
            found = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for task in tasks:
                task.cancel()
        return [one if isinstance(one, Tensor) else _reason(one) for one in found]

    async def _later(self, work: Any, *inputs: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._loader, work, *inputs)


def _account(options: Options, adapter: Loaded) -> float | None:
    """The budget, of which an adapter keeps an account for each: to the hundredth, and no more than there are steps."""
    mean = options.max_mean_steps
    return None if mean is None else min(round(mean, 2), float(adapter.steps or 0))


def _reason(error: BaseException) -> Refusal:
    if isinstance(error, Exception):
        return as_refusal(error)
    raise error


def find_backbone(folder: str | Path, name: str | None, *, device: str, dtype: str) -> Backbone:
    """By name, or the one of the first adapter that can be loaded."""
    if name is not None:
        return load_backbone(name, device=device, dtype=dtype)
    why: PerlclipError | None = None
    for path in islice(sorted(Path(folder).glob(f"*/{CONFIG}")), 100):
        try:
            return load_adapter(path.parent, device=device, dtype=dtype).method.backbone
        except PerlclipError as error:
            why = why or error
    raise why or PerlclipError(f"there is no adapter in {folder} to take the backbone of: name it with --backbone")
