"""`analyze`: a data set under one adapter, from chunks to numbers, figures and a page."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import perlclip
from perlclip.adapters.folder import Adapter
from perlclip.analysis.cases import Case, Wanted, image_name, instructive, look_into
from perlclip.analysis.chunks import measure_all, spread
from perlclip.analysis.drift import Drift, drift
from perlclip.analysis.figures import draw_curves, draw_drift, draw_grid
from perlclip.analysis.gallery import gallery
from perlclip.analysis.trajectories import Curve, Trajectories, curves, require_perl
from perlclip.data.sets import ImageSet
from perlclip.files import require_writable, write_files
from perlclip.methods.base import config_dict
from perlclip.text.classes import are_novel
from perlclip.viz.dynamics import QUANTILES
from perlclip.viz.markup import csv_text
from perlclip.viz.pages import page

MAX_IMAGES = 1000
CASES = 6  # of each transition


@dataclass(frozen=True, kw_only=True)
class Analysis:
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

    @property
    def sentence(self) -> str:
        """What was analysed."""
        about, config = self.about, self.about["config"]
        part = "" if about["images"] == about["images_in_all"] else f" of {about['images_in_all']}"
        kind = "classes that were not trained on" if about["novel_classes"] else "classes"
        readout = f", readout {config['readout']}" if "readout" in config else ""
        return (
            f"{about['images']}{part} images, {about['classes']} {kind}; PERL with K = {config['steps']}, rank "
            f"{config['rank']}{readout}, on {about['backbone']}; adapter {about['adapter']}; "
            f"perlclip {about['perlclip']}."
        )

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
    adapter: Adapter, images: ImageSet, out: str | Path, *, max_images: int = MAX_IMAGES, cases: int = CASES,
    how: str = "gradient", workers: int = 0, title: str = "",
) -> Analysis:  # fmt: skip
    """Measure, pick cases, map their evidence, and write everything to `out`; OUT/chunks makes it resumable."""
    method, out = require_perl(adapter.method), Path(out)
    require_writable(out)
    chosen, novel = spread(images, max_images), are_novel(images.class_names, adapter.class_names)
    found = measure_all(adapter, chosen, out / "chunks", novel=novel, workers=workers)
    wanted = []
    for transition, i in instructive(found, cases):
        image, label = chosen.images[i], chosen.classes.names[chosen.labels[i]]
        wanted.append(Wanted(image=image, name=image_name(image, i), label=label, transition=transition))
    state = method.class_state(chosen.classes, novel=novel)
    looked = look_into(method, wanted, chosen.classes.names, state, how=how, head=adapter.head) if wanted else []
    done = Analysis(
        title=title or f"How the adapter thinks about {chosen.name or 'these images'}",
        about=_about(adapter, images, chosen, how, novel),
        found=found, curves=curves(found), drift=drift(found), cases=looked,
    )  # fmt: skip
    _write(done, out)
    return done


def _about(adapter: Adapter, images: ImageSet, chosen: ImageSet, how: str, novel: bool) -> dict[str, Any]:
    return {
        "adapter": adapter.fingerprint[:12], "config": config_dict(adapter.method),
        "backbone": adapter.method.backbone.name, "data": images.name, "classes": len(images.class_names),
        "novel_classes": novel, "images": len(chosen), "images_in_all": len(images), "maps": how,
        "perlclip": perlclip.__version__,
    }  # fmt: skip


def findings(done: Analysis) -> list[str]:
    """The paper's claims as sentences about this data, whichever way they turn out."""
    accuracy, jacobian = done.curves["accuracy"].mean, done.curves["jacobian"].mean
    gains = [b - a for a, b in pairwise(accuracy)]
    best = max(range(len(gains)), key=lambda k: gains[k])
    sentences = [
        f"Accuracy goes from {accuracy[0]:.1f} % at step 0 to {accuracy[-1]:.1f} % at step {len(gains)}. "
        f"Changes by step: {', '.join(f'{gain:+.1f}' for gain in gains)}; the largest gain is at step {best + 1}."
        if gains[best] > 0
        else f"Accuracy goes from {accuracy[0]:.1f} % to {accuracy[-1]:.1f} %; no step gains."
    ]
    medians = {row.transition: row.quantiles[-1][2] for row in done.drift if row.count}
    if medians:
        listed = ", ".join(f"{value:.3g} for {name}" for name, value in medians.items())
        sentences.append(f"Median drift KL(p₀ ‖ p_K) in nats: {listed}.")
    change = Curve.of_means((done.found.jacobian_KB - done.found.jacobian_KB[0]).numpy())
    low, high = change.low[-1], change.high[-1]
    verb = "falls" if high < 0 else "rises" if low > 0 else "does not clearly change"
    sentences.append(
        f"The Jacobian norm {verb}: {jacobian[0]:.3g} at step 0, {jacobian[-1]:.3g} at step {len(gains)}, a change of "
        f"{change.mean[-1]:+.2g} an image (95 %: {low:+.2g} to {high:+.2g})."
    )
    corrected = [case.maps_KMGG.clamp(min=0).sum((-1, -2)) for case in done.cases if case.transition == "wrong→correct"]
    if corrected:
        (first_0, final_0), *_, (first_K, final_K) = torch.stack(corrected).mean(0).tolist()
        sentences.append(
            f"Positive evidence ({done.about['maps']}) in the {len(corrected)} corrected cases shown, summed over "
            f"patches, from step 0 to step {len(gains)}: for the first answer {first_0:.2f} → {first_K:.2f}, for the "
            f"final one {final_0:.2f} → {final_K:.2f}."
        )
    return sentences


# ---- files ----


def _curve_rows(found: dict[str, Curve]) -> Iterable[list[Any]]:
    """metric, step, mean, low, high."""
    for name, curve in found.items():
        for k, numbers in enumerate(zip(curve.mean, curve.low, curve.high, strict=True)):
            yield [name, k, *numbers]


def _drift_rows(rows: Sequence[Drift]) -> Iterable[list[Any]]:
    for row in rows:
        for k, (mean, quantiles) in enumerate(zip(row.mean, row.quantiles, strict=True)):
            yield [row.transition, row.count, k, mean, *quantiles]


def _image_rows(found: Trajectories) -> Iterable[list[Any]]:
    labels_B, *values = found.tensors().values()
    for b in range(len(found)):
        for k in range(found.steps + 1):
            yield [b, k, int(labels_B[b]), *(value_KB[k, b].item() for value_KB in values)]


def _write(done: Analysis, out: Path) -> None:
    caption = "Averages over the images at every step, with 95 % bands; the arrow says which way is better."
    boxes = "Boxes: the middle half of the images, with the median; whiskers: 5 to 95 %; small marks: the mean."
    curved, drifted = draw_curves("curves", caption, done.curves, done.counts), draw_drift({"": done.drift}, boxes)
    drawings = [curved, drifted]
    for transition in done.counts:
        cases = [case for case in done.cases if case.transition == transition]
        if cases:
            drawings.append(draw_grid(f"cases-{transition.replace('→', '-to-')}", cases))
    quantiles = [f"q{round(100 * q):02}" for q in QUANTILES]
    measured = [name.removesuffix("_KB") for name in done.found.tensors() if name != "labels_B"]
    tables = {
        "curves": (["metric", "step", "mean", "low", "high"], _curve_rows(done.curves)),
        "drift": (["transition", "images", "step", "mean", *quantiles], _drift_rows(done.drift)),
        "images": (["image", "step", "label", *measured], _image_rows(done.found)),
    }
    shown = page(
        "analysis.html", title=done.title, about=done.sentence, findings=findings(done),
        figures=[("Step by step", curved), ("Drift from the first answer", drifted)], gallery=gallery(done.cases),
        steps=done.found.steps,
    )  # fmt: skip
    contents = {out / f"{name}.csv": csv_text(head, rows, digits=6).encode() for name, (head, rows) in tables.items()}
    for drawing in drawings:
        contents |= drawing.files(out)
    contents[out / "cases.json"] = _json([case.numbers() for case in done.cases])
    contents[out / "analysis.json"] = _json(done.numbers())
    contents[out / "index.html"] = shown.encode()
    write_files(contents)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
