"""Every method at ViT-B/16 size: a training step and the evaluation of 1,000 images, ours against the plain form.

    python -m benchmarks.methods_speed                        # all methods; C = 10, 100, 500 classes
    python -m benchmarks.methods_speed --methods coop mmrl --classes 100 --budget 480

Random weights, random pixels already on the device, names of 2 to 7 tokens ("a photo of a {}." has 9 to 14), the
methods' default settings, eager mode; float32 on the CPU, bfloat16 on CUDA. The plain forms are those of
`perlclip.reference`: `transformers`' own layers, 77 positions, every row of every block. Variants of a case are run in
turn.
A case is given up before it is timed if the two forms' loss or logits differ by more than `TOLERANCE`, relative to the
plain form's largest value.

Training step: the loss of a batch and the gradients of all parameters. Ours has its class state made beforehand, since
training does not change it.

Evaluation: 1,000 images in batches of 100. "ours" makes the class state and encodes the text once; both are in its
time. "plain" encodes the text for every batch, as the released codes of CoOp, KgCoOp, TCP, MaPLe and PromptSRC do;
"plain, text once" is for comparison with those that do it once: MMA, MMRL, MMRL++, ProVP and zero-shot CLIP (PERL's
code is not known to us). Fewer images than 1,000 (`--eval-batches`, 1 on the CPU) are scaled up: text and images are
then timed apart, and the images, whose side does not depend on the classes, once per method for all C. CoCoOp's text
depends on the image: `--cocoop-images` of them are timed and scaled, and there is no "text once". The notes in the rows
say what was scaled.

What the plain forms are spared, because the authors' codes do it once, when the model is built: the tokenizer; the
frozen text of KgCoOp, TCP, MMRL, MMRL++ and, in training, ProVP; PromptSRC's teacher (it has one template here instead
of sixty, in both forms, as its making is not timed). MaPLe's coupled prompts are made once a pass. None of that is
taken from our evaluation: its time includes the tokenizer and the frozen text. The teachers' image passes belong to the
step, in both forms.

bfloat16: both forms have bfloat16 towers. Ours keeps its parameters in float32, as it does in use; the plain form gets
a bfloat16 copy of them and computes in bfloat16 up to the embeddings, whose unit length and cosines are float32,
without autocast: its fastest way, and what the fp16 modes of most released codes amount to. (Plain PERL has float32
projectors, as ours.)

ms: median; quartile_range_ms: of the runs, scaled and added up like the times; peak_MiB: the CUDA allocator's, above
what was there before; kept_MiB: what autograd holds for the backward pass. A variant without a time says why in `note`.
"""

import argparse
import copy
import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import CLIPModel

from benchmarks.common import (
    RESULTS,
    Clock,
    Reading,
    Work,
    build,
    file_name,
    frozen_storages,
    gradients,
    kept_for_backward,
    machine,
    remember,
    write_csv,
)
from perlclip.methods import Method, create_method, list_methods
from perlclip.reference import plain_form
from perlclip.text.classes import Classes
from perlclip.text.templates import DEFAULT_TEMPLATE

COLUMNS = (
    "work", "method", "classes", "variant", "ms", "quartile_range_ms", "runs", "peak_MiB", "kept_MiB",
    "time_over_plain", "note",
)  # fmt: skip
STEP, EVALUATION = "training step", "evaluation of 1,000"
IMAGES, PER_BATCH = 1000, 100
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-1}
# The teacher is made before the clock starts, so that one of its sixty templates will do.
SETTINGS = {"promptsrc": {"templates": (DEFAULT_TEMPLATE,)}}
TEXT_ONCE_BY_AUTHORS = ("zero-shot", "provp", "mma", "mmrl", "mmrl++")
# Sentences a plain training step holds on a CPU: about 25 MiB each in float32.
CPU_CLASSES, CPU_SENTENCES = 150, 450


def names(count: int) -> Classes:
    """Distinct names of 2 to 7 letters, which are as many tokens."""
    assert count <= 6 * 26**2
    return Classes(tuple(f"{chr(97 + i // 6 // 26)}{chr(97 + i // 6 % 26)}{'x' * (i % 6)}" for i in range(count)))


class Plain:
    """A method's plain form for one list of classes, without what the authors' code does only once."""

    def __init__(self, clip: CLIPModel, ours: Method, classes: Classes, *, training: bool) -> None:
        self.words = list(classes.names), classes.template
        self.method = ours if ours.backbone.dtype == torch.float32 or ours.name == "perl" else lowered(ours)
        self.form = form = plain_form(ours.name)(clip, ours.backbone.tokenizer, self.method)
        form.tokenise, form.frozen_text = remember(form.tokenise), remember(form.frozen_text)
        if training and ours.name == "provp":  # whose text is frozen; an evaluation has no other, and encodes it
            form.text = remember(form.text)
        if ours.name == "promptsrc":
            form.teacher_text = remember(form.teacher_text)

    @property
    def parameters(self) -> list[Tensor]:
        """What a step takes gradients of."""
        return list(self.method.parameters())

    def text(self) -> Tensor:
        """(C, E) class embeddings."""
        return self.form.text(*self.words)

    def logits(self, pixels: Tensor, text: Tensor | None = None) -> Tensor:
        """(B, C), with the text encoded now unless it is given."""
        return self.now(text).logits(pixels, *self.words)

    def loss(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """The training objective."""
        return self.now().loss(pixels, labels, *self.words)

    def now(self, text: Tensor | None = None):
        """The form for one call."""
        form = copy.copy(self.form)
        if text is not None:
            form.text = lambda *_: text
        if isinstance(form, plain_form("maple")):
            form.prompts = remember(self.form.prompts)
        return form


def lowered(method: Method) -> Method:
    """A copy whose parameters have the towers' number format; the backbone is the same."""
    return copy.deepcopy(method, {id(method.backbone): method.backbone}).to(method.backbone.dtype)


@dataclass
class Outcome:
    """What came of a case: readings, and reasons where there are none."""

    readings: dict[str, Reading] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


class Bench:
    """All cases on one random backbone."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device, self.dtype, self.batch = options.device, getattr(torch, options.dtype), options.batch
        self.size, self.batches, self.cocoop_images = options.eval_batch, options.eval_batches, options.cocoop_images
        self.clip, self.backbone = build(self.device, self.dtype, words=("photo", "of"))
        # As ours has it; in float32, since bfloat16 would make it 99.
        self.clip.logit_scale.data = torch.tensor(self.backbone.logit_scale, device=self.device).log()
        self.clock = Clock(self.device, options.seconds)
        self.images: dict[tuple[str, str], Reading] = {}  # readings that hold for every number of classes

    def method(self, name: str) -> Method:
        return create_method(name, self.backbone, **SETTINGS.get(name, {}))

    def plain(self, ours: Method, classes: Classes, *, training: bool) -> Plain:
        return Plain(self.clip, ours, classes, training=training)

    def pixels(self, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(count, 3, 224, 224, generator=generator).to(self.device, self.dtype)

    def too_large(self, name: str, count: int, work: str) -> bool:
        """What the plain form is spared on a CPU: minutes a run, and more memory than there is."""
        sentences = count * self.batch if (name, work) == ("cocoop", STEP) else count
        return self.device == "cpu" and (count > CPU_CLASSES or sentences > CPU_SENTENCES)

    # The two works.

    def step(self, name: str, count: int) -> Outcome:
        ours, classes = self.method(name), names(count)
        pixels, labels = self.pixels(self.batch), torch.arange(self.batch, device=self.device) % count
        outcome, losses, parameters = Outcome(), {}, {}
        if self.too_large(name, count, STEP):
            outcome.notes["plain"] = "skipped: too large for a CPU"
        else:
            plain = self.plain(ours, classes, training=True)
            losses["plain"], parameters["plain"] = partial(plain.loss, pixels, labels), plain.parameters
        state = ours.class_state(classes)
        losses["ours"] = lambda: ours.loss(pixels, labels, state)
        parameters["ours"] = list(ours.parameters())
        if name == "promptsrc":  # makes the teacher, before memory is counted
            with torch.no_grad():
                losses["ours"]()
        values: dict[str, Tensor | None] = {}
        kept: dict[str, float] = {}
        frozen = frozen_storages(self.clip, self.backbone)
        for variant, loss in losses.items():

            def noted(variant: str = variant, loss: Callable[[], Tensor] = loss) -> Tensor:
                value = loss()
                values[variant] = value.detach()
                return value

            result = self.attempt(partial(kept_for_backward, noted, frozen), variant, outcome)
            if result is not None:
                kept[variant] = result
        if not self.agree(values, outcome):
            return outcome
        steps = {v: partial(gradients, losses[v], parameters[v]) for v in kept}
        self.time(steps, {v: {v: 1} for v in losses}, outcome)
        for variant, reading in outcome.readings.items():
            reading["kept_MiB"] = kept[variant]
        return outcome

    def evaluation(self, name: str, count: int) -> Outcome:
        ours = self.method(name)  # text is not kept for parameters made in inference mode
        with torch.inference_mode():
            return self.evaluate(ours, count)

    def evaluate(self, ours: Method, count: int) -> Outcome:
        name, classes, outcome = ours.name, names(count), Outcome()
        conditional = name == "cocoop"
        size, batches = (self.cocoop_images, 1) if conditional else (self.size, self.batches)
        pixels, scale = self.pixels(size), IMAGES / (size * batches)
        plain = None
        if self.too_large(name, count, EVALUATION):
            outcome.notes["plain"] = "skipped: too large for a CPU"
        else:
            plain = self.plain(ours, classes, training=False)
            few, values = pixels[:4], {}
            values["plain"] = self.attempt(lambda: plain.logits(few), "plain", outcome)
            values["ours"] = self.attempt(lambda: ours.logits(few, ours.class_state(classes)), "ours", outcome)
            if not self.agree(values, outcome):
                return outcome
            plain = None if values["plain"] is None else plain
        # What is timed, and how much of each is in 1,000 images.
        pieces: dict[str, Work] = {}
        parts: dict[str, dict[str, float]] = {}

        def text():
            state = ours.class_state(classes)
            if not conditional:
                ours.class_embeddings(state)  # which keeps it
            return state

        def images(state) -> None:
            for _ in range(batches):
                ours.logits(pixels, state)

        def plain_images(text_CE: Tensor | None = None) -> None:
            for _ in range(batches):
                plain.logits(pixels, text_CE)

        whole = size == PER_BATCH and scale == 1
        if plain and (whole or conditional):
            pieces["plain"], parts["plain"] = plain_images, {"plain": scale}
        if plain and whole and not conditional:
            pieces["plain, text once"] = lambda: plain_images(plain.text())
            parts["plain, text once"] = {"plain, text once": 1}
        elif plain and not conditional:
            pieces["plain text"], pieces["plain images"] = plain.text, partial(plain_images, plain.text())
            parts["plain"] = {"plain text": IMAGES / PER_BATCH, "plain images": scale}
            parts["plain, text once"] = {"plain text": 1, "plain images": scale}
        if whole:
            pieces["ours"], parts["ours"] = lambda: images(text()), {"ours": 1}
        else:
            pieces["ours text"], pieces["ours images"] = text, partial(images, text())
            parts["ours"] = {"ours text": 1, "ours images": scale}
        self.time(pieces, parts, outcome, shared="" if conditional else name)
        for variant in parts:
            said = [outcome.notes.get(variant, "")]
            said += [f"{size * batches} images measured, scaled to 1,000"] if scale != 1 else []
            said += ["the authors encode the text once"] if variant == "plain" and name in TEXT_ONCE_BY_AUTHORS else []
            outcome.notes[variant] = "; ".join(filter(None, said))
        return outcome

    # What both need.

    def time(
        self, pieces: dict[str, Work], parts: dict[str, dict[str, float]], outcome: Outcome, shared: str = ""
    ) -> None:
        """Time the pieces and put them together; `shared` names a method whose image pieces hold for all C."""
        known = {p: self.images[shared, p] for p in pieces if (shared, p) in self.images}
        failed = Outcome()
        gc.collect()
        for piece in [p for p in pieces if p not in known]:
            self.attempt(pieces[piece], piece, failed)
        fit = {p: work for p, work in pieces.items() if p not in known and p not in failed.notes}
        readings = known | (self.clock.measure(fit) if fit else {})
        if shared:
            self.images |= {(shared, p): reading for p, reading in readings.items() if p.endswith(" images")}
        for variant, shares in parts.items():
            missing = [failed.notes.get(p) or outcome.notes.get(p, "") for p in shares if p not in readings]
            if missing:
                outcome.notes[variant] = missing[0]
            else:
                outcome.readings[variant] = combined([(share, readings[p]) for p, share in shares.items()])

    def attempt(self, work: Callable, variant: str, outcome: Outcome):
        """What `work` returns, or None and a note if the memory does not suffice."""
        try:
            return work()
        except torch.OutOfMemoryError:
            outcome.notes[variant] = "out of memory"
        gc.collect()
        torch.cuda.empty_cache()
        return None

    def agree(self, values: dict[str, Tensor | None], outcome: Outcome) -> bool:
        """Whether both forms give the same, as far as both could be run."""
        if values.get("ours") is None or values.get("plain") is None:
            return True
        ours, plain = values["ours"].float(), values["plain"].float()
        apart = ((ours - plain).abs().max() / plain.abs().max().clamp_min(1e-6)).item()
        print(f"{'':19} forms differ by {apart:.1e}", flush=True)
        if apart <= TOLERANCE[self.dtype]:
            return True
        outcome.notes |= dict.fromkeys(values, f"given up: the forms differ by {apart:.1e} of the largest value")
        return False


def combined(weighted: list[tuple[float, Reading]]) -> Reading:
    """Several readings as one: times added up, the fewest runs, the highest peak."""
    reading = {key: sum(share * part[key] for share, part in weighted) for key in ("ms", "quartile_range_ms")}
    reading["runs"] = min(part["runs"] for _, part in weighted)
    if all("peak_MiB" in part for _, part in weighted):
        reading["peak_MiB"] = max(part["peak_MiB"] for _, part in weighted)
    return reading


def rows_of(work: str, method: str, classes: int, outcome: Outcome) -> list[dict]:
    reference = outcome.readings.get("plain", {}).get("ms")
    rows = []
    for variant in ("plain", "plain, text once", "ours"):
        reading, note = outcome.readings.get(variant, {}), outcome.notes.get(variant, "")
        if reading or note:
            ratio = f"{reading['ms'] / reference:.3f}" if reading and reference else ""
            rows.append(
                {"work": work, "method": method, "classes": classes, "variant": variant}
                | reading
                | {"time_over_plain": ratio, "note": note}
            )
    return rows


def cases(options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    for count in options.classes:
        for work in options.works:
            for method in options.methods:
                if method != "zero-shot" or work == "evaluation":
                    yield STEP if work == "step" else EVALUATION, method, count


def table(rows: list[dict], options: argparse.Namespace) -> str:
    """Ratios in Markdown: ours over plain, in brackets over plain with the text encoded once."""
    found = {(r["work"], r["method"], r["classes"], r["variant"]): r for r in rows}
    works = [(STEP, "step"), (EVALUATION, "evaluation")]
    columns = [(work, short, c) for work, short in works if short in options.works for c in options.classes]

    def cell(work: str, method: str, count: int) -> str:
        ours = found.get((work, method, count, "ours"), {}).get("ms")
        others = [found.get((work, method, count, v), {}) for v in ("plain", "plain, text once")]
        ratios = [f"{ours / other['ms']:.2f}" if ours and "ms" in other else "" for other in others]
        if not ratios[0]:
            return "–" if "out of memory" not in others[0].get("note", "") else "plain out of memory"
        return ratios[0] + (f" ({ratios[1]})" if ratios[1] else "")

    lines = ["| ours / plain | " + " | ".join(f"{short}, C = {c}" for _, short, c in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for method in options.methods:
        lines.append(f"| {method} | " + " | ".join(cell(work, method, c) for work, _, c in columns) + " |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32", choices=["float32", "bfloat16"])
    parser.add_argument("--methods", nargs="+", default=list_methods(), choices=list_methods(), metavar="NAME")
    parser.add_argument("--classes", type=int, nargs="+", default=[10, 100, 500])
    parser.add_argument("--works", nargs="+", default=["step", "evaluation"], choices=["step", "evaluation"])
    parser.add_argument("--batch", type=int, default=4, help="of a training step")
    parser.add_argument("--eval-batches", type=int, default=10 if cuda else 1, help="measured, then scaled to 1,000")
    parser.add_argument("--eval-batch", type=int, default=PER_BATCH, help="images in each of them")
    parser.add_argument("--cocoop-images", type=int, default=50 if cuda else 2, help="measured, then scaled to 1,000")
    parser.add_argument("--seconds", type=float, default=3.0 if cuda else 10.0, help="per case, at least 3 rounds")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no case is begun")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", RESULTS)))
    return parser.parse_args()


def main() -> None:
    began = time.monotonic()
    options = parse()
    bench, rows, left = Bench(options), [], 0
    path = options.out / file_name("methods-speed", machine(options.device), bench.dtype)
    for work, method, count in cases(options):
        if time.monotonic() - began > options.budget:
            left += 1
            continue
        outcome = (bench.step if work == STEP else bench.evaluation)(method, count)
        if options.device == "cuda":
            torch.cuda.empty_cache()
        new = rows_of(work, method, count, outcome)
        rows += new
        write_csv(path, rows, COLUMNS)
        for row in new:
            values = (
                f"{k} {v:.4g}" if isinstance(v, float | int) else f"{k} {v}" for k, v in list(row.items())[4:] if v
            )
            print(f"{work:19} {method:9} {count:4} {row['variant']:16}", "  ".join(values), flush=True)
    print(f"\n{table(rows, options)}\n\nwritten to {path}, {time.monotonic() - began:.0f} s")
    if left:
        print(f"{left} cases were not begun: the budget of {options.budget:.0f} s was spent")


if __name__ == "__main__":
    main()
