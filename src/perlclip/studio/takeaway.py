"""What one takes home: the adapter, the labels as a list that `perlclip fit` reads, and a report to look at."""

import os
from collections.abc import Sequence
from pathlib import Path

from perlclip.adapters.folder import Adapter, save_adapter
from perlclip.files import write_files
from perlclip.inference.evaluation import evaluate
from perlclip.studio.project import Labels, Project
from perlclip.viz.markup import csv_text
from perlclip.viz.mistakes import mistakes_page


def write_export(project: Project, labels: Labels, adapter: Adapter, held: Sequence[int], out: Path) -> list[str]:
    """Write `adapter/`, `labels.csv` and, if any labels were held out, `report.html`; their names come back."""
    save_adapter(adapter, out / "adapter")
    rows = [(os.path.relpath(project.root / name, out), label) for name, label in project.rows(labels)]
    files = {out / "labels.csv": csv_text(("path", "label"), rows).encode("utf-8", "surrogateescape")}
    if held:
        found = evaluate(adapter, project.image_set(labels, held), on_error="skip")
        title = f"{project.root.resolve().name}: {found.total} labels held out"
        files[out / "report.html"] = mistakes_page(found, title=title).encode("utf-8", "replace")
    write_files(files)
    return ["adapter", *(path.name for path in files)]
