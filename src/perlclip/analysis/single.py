"""`analyze`: a data set under one adapter, from chunks to numbers, figures and a page."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import perlclip
from perlclip.adapters.folder import Adapter
from perlclip.analysis.cases import Case, Wanted, instructive, look_into
from perlclip.analysis.chunks import measure_all, spread
from perlclip.analysis.drawings import Drawing, draw_curves, draw_drift, draw_grid
from perlclip.analysis.drift import QUANTILES, Drift, drift
from perlclip.analysis.page import study_page
from perlclip.analysis.trajectories import METRICS, Curve, Trajectories, curves, require_perl
from perlclip.data.sets import ImageSet, ImageSource
from perlclip.files import require_writable, write_files
from perlclip.text.classes import are_novel

MAX_IMAGES = 1000
CASES = 6  # of each transition


@dataclass(frozen=True, kw_only=True)
class Study:
    """What an analysis found."""

    title: str
    about: dict[str, Any]
    found: Trajectories
    curves: dict[str, Curve]
    drift: list[Drift]
    cases: list[Case]

    @property
    def counts(self) -> dict[str, int]:
        """Images of each transition."""
        return {row.transition: row.count for row in self.drift}

    def numbers(self) -> dict[str, Any]:
        """What stands behind the figures, but for single images."""
        return {
            "about": self.about,
            "findings": findings(self),
            "steps": self.found.steps,
            "curves": {name: asdict(curve) for name, curve in self.curves.items()},
            "quantiles": QUANTILES,
            "drift": [asdict(row) for row in self.drift],
            "cases": [{key: case.numbers()[key] for key in ("image", "transition", "label")} for case in self.cases],
        }


def analyze(
    adapter: Adapter,
    images: ImageSet,
    out: Path,
    *,
    max_images: int = MAX_IMAGES,
    cases: int = CASES,
    how: str = "gradient",
    workers: int = 0,
    title: str = "",
) -> Study:
    """Measure, pick cases, map their evidence, and write everything to `out`; OUT/chunks makes it resumable."""
    method = require_perl(adapter.method)
    require_writable(out)
    chosen, novel = spread(images, max_images), are_novel(images.class_names, adapter.class_names)
    found = measure_all(adapter, chosen, out / "chunks", novel=novel, workers=workers)
    wanted = [
        Wanted(image=chosen.images[i], name=_name(chosen.images[i], i), label=_label(chosen, i), transition=transition)
        for transition, i in instructive(found, cases)
    ]
    state = method.class_state(chosen.classes, novel=novel)
    looked = look_into(method, wanted, chosen.classes.names, state, how=how) if wanted else []
    study = Study(
        title=title or f"How the adapter thinks about {chosen.name or 'these images'}",
        about=_about(adapter, images, chosen, how, novel),
        found=found,
        curves=curves(found),
        drift=drift(found),
        cases=looked,
    )
    _write(study, out)
    return study


def _label(images: ImageSet, i: int) -> str:
    return images.classes.names[images.labels[i]]


def _name(image: ImageSource, i: int) -> str:
    return Path(image).name if isinstance(image, str | Path) else f"image {i}"


def _about(adapter: Adapter, images: ImageSet, chosen: ImageSet, how: str, novel: bool) -> dict[str, Any]:
    return {
        "adapter": adapter.info["weights_sha256"][:12],
        "config": adapter.info["config"],
        "backbone": adapter.info["base_model_name_or_path"],
        "data": images.name,
        "classes": len(images.class_names),
        "novel_classes": novel,
        "images": len(chosen),
        "images_in_all": len(images),
        "maps": how,
        "perlclip": perlclip.__version__,
    }


def findings(study: Study) -> list[str]:
    """The paper's claims as sentences about this data, whichever way they turn out."""
    accuracy, jacobian = study.curves["accuracy"].mean, study.curves["jacobian"].mean
    gains = [b - a for a, b in pairwise(accuracy)]
    best = max(range(len(gains)), key=lambda k: gains[k])
    sentences = [
        f"Accuracy goes from {accuracy[0]:.1f} % at step 0 to {accuracy[-1]:.1f} % at step {len(gains)}. "
        f"Changes by step: {', '.join(f'{gain:+.1f}' for gain in gains)}; the largest gain is at step {best + 1}."
        if gains[best] > 0
        else f"Accuracy goes from {accuracy[0]:.1f} % to {accuracy[-1]:.1f} %; no step gains."
    ]
    medians = {row.transition: row.quantiles[-1][2] for row in study.drift if row.count}
    if medians:
        listed = ", ".join(f"{value:.3g} for {name}" for name, value in medians.items())
        sentences.append(f"Median drift KL(p₀ ‖ p_K) in nats: {listed}.")
    change = Curve.of_means((study.found.jacobian_KB - study.found.jacobian_KB[0]).numpy())
    low, high = change.low[-1], change.high[-1]
    verb = "falls" if high < 0 else "rises" if low > 0 else "does not clearly change"
    sentences.append(
        f"The Jacobian norm {verb}: {jacobian[0]:.3g} at step 0, {jacobian[-1]:.3g} at step {len(gains)}, a change of "
        f"{change.mean[-1]:+.2g} an image (95 %: {low:+.2g} to {high:+.2g})."
    )
    corrected = [
        case.maps_KMGG.clamp(min=0).sum((-1, -2)) for case in study.cases if case.transition == "wrong→correct"
    ]
    if corrected:
        (first_0, final_0), *_, (first_K, final_K) = torch.stack(corrected).mean(0).tolist()
        sentences.append(
            f"Positive evidence ({study.about['maps']}) in the {len(corrected)} corrected cases shown, summed over "
            f"patches, from step 0 to step {len(gains)}: for the first answer {first_0:.2f} → {first_K:.2f}, for the "
            f"final one {final_0:.2f} → {final_K:.2f}."
        )
    return sentences


# ---- files ----


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    """A CSV file's bytes."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row] for row in rows)
    return buffer.getvalue().encode()


def _curve_rows(found: dict[str, Curve]) -> Iterable[list[Any]]:
    """metric, step, mean, low, high."""
    for metric in METRICS:
        if metric.name in found:
            curve = found[metric.name]
            for k, numbers in enumerate(zip(curve.mean, curve.low, curve.high, strict=True)):
                yield [metric.name, k, *numbers]


def _drift_rows(rows: Sequence[Drift]) -> Iterable[list[Any]]:
    for row in rows:
        for k, (mean, quantiles) in enumerate(zip(row.mean, row.quantiles, strict=True)):
            yield [row.transition, row.count, k, mean, *quantiles]


_PER_IMAGE = ("answers_KB", "target_KB", "top_KB", "first_KB", "final_KB", "brier_KB", "drift_KB", "jacobian_KB")


def _image_rows(found: Trajectories) -> Iterable[list[Any]]:
    tensors = found.tensors()
    for b in range(len(found)):
        for k in range(found.steps + 1):
            yield [b, k, int(found.labels_B[b]), *(tensors[name][k, b].item() for name in _PER_IMAGE)]


def _write(study: Study, out: Path) -> None:
    drawings = [draw_curves("curves", {"": study.curves}, study.counts), draw_drift(study.drift)]
    grids = []
    for transition in study.counts:
        cases = [case for case in study.cases if case.transition == transition]
        if cases:
            grids.append(draw_grid(f"cases-{transition.replace('→', '-to-')}", cases))
    head = [f"q{round(100 * q):02}" for q in QUANTILES]
    contents = {
        out / "curves.csv": table(["metric", "step", "mean", "low", "high"], _curve_rows(study.curves)),
        out / "drift.csv": table(["transition", "images", "step", "mean", *head], _drift_rows(study.drift)),
        out / "images.csv": table(
            ["image", "step", "label", *(name.removesuffix("_KB") for name in _PER_IMAGE)], _image_rows(study.found)
        ),
        out / "cases.json": _json([case.numbers() for case in study.cases]),
        **pictures(out, [*drawings, *grids]),
        out / "analysis.json": _json(study.numbers()),
        out / "index.html": study_page(study.title, study.about, findings(study), drawings, study.cases).encode(),
    }
    write_files(contents)


def pictures(folder: Path, drawings: Iterable[Drawing]) -> dict[Path, bytes]:
    """Each as PNG and SVG."""
    kinds = ("png", "svg")
    return {folder / f"{drawn.name}.{kind}": getattr(drawn, kind) for drawn in drawings for kind in kinds}


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
