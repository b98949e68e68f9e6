"""Using adapters, and what there is to know of them and of methods: `perlclip predict | eval | inspect | methods`."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import perlclip
from perlclip.cli.common import (
    CLASS_NAMES,
    FOLDER,
    NATURAL,
    ON_ERROR,
    POSITIVE,
    SHARE,
    check_ending,
    fail_for,
    image_paths,
    options,
    print_table,
)  # fmt: skip
from perlclip.errors import PerlclipError, unknown_name

if TYPE_CHECKING:
    from perlclip.backbone import Backbone
    from perlclip.inference.evaluation import Evaluation
    from perlclip.inference.judging import Prediction

MATRIX = 12  # classes of a confusion matrix on the screen
PAIRS = 10  # of the most confused, on the screen


@click.command()
@click.argument("adapter", type=FOLDER)
@click.argument("images", nargs=-1, required=True)
@click.option("--top-k", type=POSITIVE, default=1, help="Labels for each image.")
@click.option("--json", "form", flag_value="json", help="One JSON object a line.")
@click.option("--csv", "form", flag_value="csv", help="CSV: image,rank,label,probability, and what is asked for.")
@click.option(
    "--out",
    type=FOLDER,
    metavar="FILE|DIR",
    help="Write to FILE.csv, .jsonl or .parquet, whole or not at all; or, without an ending, a job's shards to DIR.",
)
@ON_ERROR
@options("class-names", "template", "backbone")
@click.option("--batch-size", type=POSITIVE, default=32, help="Images at once; 256 for a job on CUDA.")
@options("steps", "max-mean-steps", "head")
@click.option("--max-ms", type=float, metavar="X", help="Milliseconds for a batch; its base pass is always made.")
@click.option("--reject", is_flag=True, help="Say which images are none of the classes.")
@click.option("--reject-rate", type=SHARE, default=0.05, help="Share of images of a class that may be rejected.")
@click.option("--coverage", type=SHARE, metavar="X", help="A set of labels that holds the right one so often: 0.9.")
@click.option("--sets", type=click.Choice(["lac", "raps"]), default="lac", help="The smallest sets, or adaptive ones.")
@click.option("--multi-label", is_flag=True, help="Each class by itself: an image may have several labels, or none.")
@options("device", "dtype", "compile")
@click.option("--workers", type=NATURAL, default=0, help="Processes that decode images; a job has one a processor.")
@click.option("--embeddings", is_flag=True, help="Of a job: also the frozen CLIP's image embeddings, as img_emb_N.npy.")
@click.option(
    "--decode",
    type=click.Choice(["exact", "half", "fast"]),
    default="exact",
    help="Of a job: decode all of a JPEG, or no more than twice, or once, the size that the backbone sees.",
)
@click.option("--shard-size", type=POSITIVE, default=10_000, help="Of a job: rows of a shard, which a kill may cost.")
@click.option(
    "--executor", type=click.Choice(["local", "ray"]), default="local", help="Of a job: processes here, or Ray Data."
)
@click.option("--address", default="", help="Of a job on Ray: the cluster; one on this machine if not given.")
def predict(
    adapter: Path, images: tuple[str, ...], top_k: int, form: str | None, out: Path | None,
    on_error: str, batch_size: int, workers: int, steps: Any, max_mean_steps: float | None, max_ms: float | None,
    reject: bool, reject_rate: float, coverage: float | None, sets: str, multi_label: bool, embeddings: bool,
    decode: str, shard_size: int, executor: str, address: str, **loading: Any,
) -> None:  # fmt: skip
    """Label IMAGES: files, folders, globs in quotes, or - for a path on each line of stdin.

    With --out DIR they may be millions, also in lists, tars, parquet files and at addresses (docs/batch.md); the same
    command goes on after a kill.
    """
    from perlclip.data import Unreadable
    from perlclip.inference.row_files import check_row_file
    from perlclip.progress import progress_bar

    if out and form:
        raise click.UsageError("--json and --csv are for the screen; --out goes by the ending of its name")
    if out and (out.is_dir() or not out.suffix):
        _predict_all(adapter, images, out)
        return
    for name in ("embeddings", "decode", "shard_size", "executor", "address"):
        if _given(name):
            raise click.UsageError(f"--{name.replace('_', '-')} is for a job: --out DIR, a name without an ending")
    paths = image_paths(images)
    if out:
        check_row_file(out)
    classifier = perlclip.Classifier.from_pretrained(adapter.as_posix(), **loading)  # a folder, or one of the hub
    asked = {"steps": any(limit is not None for limit in (steps, max_mean_steps, max_ms))}
    asked |= {"rejected": reject, "labels": coverage is not None or multi_label}
    more = [key for key, wanted in asked.items() if wanted]
    skipped: list[Unreadable] = []
    show = out is not None or not sys.stdout.isatty()
    with _writing(form, out, more) as write, progress_bar("predict", len(paths), show=show) as bar:
        predictions = classifier.predict_iter(
            paths, top_k=top_k, batch_size=batch_size, workers=workers, steps=steps, max_mean_steps=max_mean_steps,
            max_ms=max_ms, reject=reject, reject_rate=reject_rate, coverage=coverage, sets=sets,
            multi_label=multi_label, on_error=on_error,
        )  # fmt: skip
        for path, prediction in zip(paths, predictions, strict=True):
            if isinstance(prediction, Unreadable):
                skipped.append(prediction)
            else:
                write(path, prediction)
            bar()
    if out:
        click.echo(f"{len(paths) - len(skipped):,} images labelled: {out}")
    fail_for(skipped, len(paths))


def _given(name: str) -> bool:
    """Whether an option was said, rather than left at its default."""
    source = click.get_current_context().get_parameter_source(name)
    return source is not click.core.ParameterSource.DEFAULT


def _predict_all(adapter: Path, images: tuple[str, ...], out: Path) -> None:
    """A job by the words of the command line; what they don't say of processes and batches is the job's to choose."""
    from perlclip.batch.job import predict_all
    from perlclip.batch.work import Job

    given = click.get_current_context().params
    said = {name: value for name, value in given.items() if name not in ("adapter", "images", "form", "out")}
    said |= {name: None for name in ("workers", "batch_size") if not _given(name)}
    found = predict_all(Job(adapter=adapter, sources=images, out=out, **said), sys.stdin.buffer)
    rate = f", {found.added:,} of them now, {found.added / found.seconds:,.1f} a second" if found.added else ""
    click.echo(f"{found.images - found.errors:,} images labelled{rate}: {out}")
    if found.errors:
        raise PerlclipError(f"{found.errors:,} of {found.images:,} images cannot be read; the column error says why")


COLUMNS: dict[str, type] = {"image": str, "rank": int, "label": str, "probability": float}
MORE: dict[str, type] = {"steps": int, "rejected": bool, "labels": str}  # what may be asked for


@contextmanager
def _writing(form: str | None, out: Path | None, more: Sequence[str]) -> "Iterator[Callable[[Path, Prediction], None]]":
    """What writes a prediction: to the screen or to a file."""
    from perlclip.inference.row_files import row_file, rows_to

    columns = COLUMNS | {key: MORE[key] for key in more}
    if out is None and form is None:
        yield lambda path, found: click.echo("\t".join(_words(path, found, more)))
        return
    nested = form == "json" or (out is not None and out.suffix.lower() not in (".csv", ".parquet"))
    rows = _record if nested else _rows
    with row_file(out, columns) if out else rows_to(sys.stdout, form or "", columns) as write:

        def each(path: Path, found: "Prediction") -> None:
            for row in rows(path, found, more):
                write(row)

        yield each


def _words(path: Path, found: "Prediction", more: Sequence[str]) -> list[str]:
    words = [f"{label}\t{p:.4f}" for label, p in found.top]
    said = {"steps": f"steps={found.steps}", "rejected": "none of these" if found.rejected else "one of these"}
    said["labels"] = f"labels={_joined(found)}"
    return [str(path), *words, *(said[key] for key in more)]


def _joined(found: "Prediction") -> str:
    """A set of labels in one field; where a name has the sign that parts them, it can be told apart in JSON."""
    return "|".join(found.labels or ())


def _rows(path: Path, found: "Prediction", more: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each label."""
    asked = {key: _joined(found) if key == "labels" else getattr(found, key) for key in more}
    for rank, (label, p) in enumerate(found.top, start=1):
        yield {"image": str(path), "rank": rank, "label": label, "probability": round(p, 6), **asked}


def _record(path: Path, found: "Prediction", more: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One for all labels."""
    labels = [{"label": label, "probability": p} for label, p in found.top]
    yield {"image": str(path), **labels[0], **{key: getattr(found, key) for key in more}, "top": labels}


@click.command("eval")
@click.argument("adapter", type=FOLDER)
@click.argument("data")
@click.option("--split", help="train, val or test, where DATA is split; test if not given.")
@click.option(
    "--class-names", type=CLASS_NAMES, help="Names for DATA's folders, as in fit; they replace the adapter's classes."
)
@options("template", "backbone")
@click.option("--reject", is_flag=True, help="Say how many images would be taken for none of the classes.")
@click.option("--reject-rate", type=SHARE, default=0.05, help="Share of images of a class that may be rejected.")
@click.option("--batch-size", type=POSITIVE, default=64)
@click.option("--json", "as_json", is_flag=True, help="The metrics as one JSON object.")
@click.option("--predictions", type=FOLDER, metavar="FILE", help="Every image's answer: FILE.csv, .jsonl or .parquet.")
@click.option("--page", type=FOLDER, metavar="FILE", help="A page with the mistakes to look at: FILE.html.")
@click.option("--confusion", type=FOLDER, metavar="FILE", help="The confusion matrix as a picture: FILE.png or .svg.")
@click.option("--reliability", type=FOLDER, metavar="FILE", help="The reliability diagram: FILE.png or .svg.")
@ON_ERROR
@options("steps", "max-mean-steps", "head", "data", "device", "dtype", "compile", "workers")
def eval_(
    adapter: Path, data: str, split: str | None, class_names: Any, template: str | None,
    root: Path | None, backbone: str | None, device: str, dtype: str, as_json: bool, predictions: Path | None,
    page: Path | None, confusion: Path | None, reliability: Path | None, **how: Any,
) -> None:  # fmt: skip
    """Accuracy of ADAPTER on the labelled images of DATA: all that `fit` takes, of a split source the test images."""
    from dataclasses import asdict, replace

    from perlclip.data import Unreadable, images_to_test
    from perlclip.inference.row_files import check_row_file
    from perlclip.text.classes import Classes

    if predictions:
        check_row_file(predictions)
    check_ending(page, ".html")
    for picture in (confusion, reliability):
        check_ending(picture, ".png", ".svg")
    loaded = perlclip.load_adapter(adapter.as_posix(), backbone=backbone, device=device, dtype=dtype)
    trained = Classes(loaded.class_names, loaded.template)
    skipped: list[Unreadable] | None = [] if how["on_error"] == "skip" else None
    images = images_to_test(
        data, trained, split=split, class_names=class_names, template=template, data=root, skipped=skipped
    )
    found = perlclip.evaluate(loaded, images, **how)
    found = replace(found, skipped=(*(skipped or ()), *found.skipped))
    if as_json:
        more: dict[str, Sequence[Any]] = {"per_class": found.per_class(), "most_confused": found.most_confused()}
        more["skipped"] = found.skipped
        lists = {key: [asdict(one) for one in several] for key, several in more.items()}
        click.echo(json.dumps(found.metrics() | lists, ensure_ascii=False))
    else:
        _show(found)
    title = f"Mistakes of {adapter.resolve().name} on {data}"
    for path in _write_found(found, title, predictions, page, confusion, reliability):
        click.echo(f"written: {path}", err=as_json)
    fail_for(found.skipped, found.total + len(found.skipped))


def _show(found: "Evaluation") -> None:
    """The tables, the least sure of them first, so that the accuracy stands last."""

    def percent(value: float | None) -> str:
        return "–" if value is None else f"{value:.1f}"

    scores = [score for score in found.per_class() if score.support or score.answered]
    print_table(
        ("class", "images", "precision %", "recall %", "F1 %"),
        ((s.name, f"{s.support:,}", percent(s.precision), percent(s.recall), percent(s.f1)) for s in scores),
    )
    names, counts = [score.name for score in found.per_class()], found.confusion.tolist()
    if 1 < len(names) <= MATRIX:
        rows = ([name, *(str(n) if n else "·" for n in row)] for name, row in zip(names, counts, strict=True))
        print_table(("class \\ answer", *names), rows)
    if pairs := found.most_confused(PAIRS):
        print_table(
            ("most confused", "taken for", "images", "of the class %"),
            ((pair.label, pair.answer, f"{pair.images:,}", f"{pair.share:.1f}") for pair in pairs),
        )
    if len(found.step_accuracy) > 1:
        click.echo("by step k = 0, 1, …: " + "  ".join(f"{accuracy:.1f}" for accuracy in found.step_accuracy))
    if found.mean_steps is not None:
        click.echo(f"{found.mean_steps:.2f} refinement steps per image")
    for what, measured in (("without calibration", found.uncalibrated), ("as answered", found.reliability)):
        if measured:
            click.echo(
                f"{what}: confidence {measured.confidence:.1f} %, calibration error {measured.ece:.1f} % (equal mass "
                f"{measured.ece_equal_mass:.1f} %), Brier score {measured.brier:.3f}, log-loss {measured.nll:.3f}"
            )
    for kind, sets in found.sets.items():
        click.echo(
            f"sets of labels at 90 % ({kind}): {sets.coverage:.1f} % hold the label, {sets.size:.2f} labels each"
        )
    if found.rejected is not None:
        click.echo(f"{found.rejected:.1f} % of the images are taken for none of the classes")
    click.echo(f"accuracy {found.accuracy:.2f} % on {found.total} images")


def _write_found(
    found: "Evaluation", title: str, predictions: Path | None, page: Path | None, confusion: Path | None,
    reliability: Path | None,
) -> Iterator[Path]:  # fmt: skip
    """The files that were asked for, as they are written."""
    from perlclip.files import write_files

    if predictions:
        found.save_predictions(predictions)
        yield predictions
    if page or confusion or reliability:
        from perlclip.viz.mistakes import draw_confusion, draw_reliability, mistakes_page

        for path, draw in ((confusion, draw_confusion), (reliability, draw_reliability)):
            if path:
                drawing = draw(found)
                write_files({path: drawing.svg if path.suffix.lower() == ".svg" else drawing.png})
                yield path
        if page:
            write_files({page: mistakes_page(found, title=title).encode()})
            yield page


@click.command()
@click.argument("pattern", default="*")
@click.option("--backbone", help="Count the parameters on this backbone instead of on ViT-B/16.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def methods(pattern: str, backbone: str | None, as_json: bool) -> None:
    """The methods there are, with their trained parameters."""
    from perlclip.backbone.clip import vit_b16_shape

    names = perlclip.list_methods(pattern)
    if not names:
        raise unknown_name("method", pattern, perlclip.list_methods())
    loaded = perlclip.load_backbone(backbone) if backbone else vit_b16_shape()
    found = [_method(name, loaded) for name in names]
    if as_json:
        for one in found:
            click.echo(json.dumps(one | {"backbone": loaded.name}, ensure_ascii=False))
        return
    rows = []
    for one in found:
        count = one["parameters"]
        shown = "– (too few blocks)" if count is None else f"{count:,}"
        rows.append(
            (one["method"], one["published"], shown, one["trains"], one["where"], ", ".join(one["recipes"]) or "–")
        )
    print_table(("method", "published", f"parameters on {loaded.name}", "trains", "where", "recipes"), rows)


def _method(name: str, backbone: "Backbone") -> dict[str, Any]:
    cls = perlclip.method_class(name)
    try:
        count: int | None = cls(backbone, cls.config_class()).num_trainable
    except PerlclipError:  # defaults made for twelve blocks
        count = None
    return {
        "method": name, "published": cls.venue, "parameters": count, "trains": cls.summary, "where": cls.where,
        "recipes": list(cls.recipes),
    }  # fmt: skip


@click.command()
@click.argument("adapter", type=FOLDER)
@click.option("--json", "as_json", is_flag=True, help="The whole adapter_config.json.")
def inspect(adapter: Path, as_json: bool) -> None:
    """What an ADAPTER is, without loading its backbone."""
    from perlclip.adapters.card import flat, readable_info
    from perlclip.adapters.folder import read_info

    info = read_info(adapter)
    if as_json:
        click.echo(json.dumps(info, indent=2, ensure_ascii=False))
    else:
        print_table(("what", "value"), flat(readable_info(info)))
