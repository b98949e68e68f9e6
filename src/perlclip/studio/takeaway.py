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


def write_export(
    project: Project, labels: Labels, adapter: Adapter, tested: Adapter | None, held: Sequence[int], out: Path
) -> list[str]:
    """Write `adapter/`, `labels.csv` and, if any labels were held out, `report.html`; their names come back.

    The adapter may know the labels that were held out: the report is about `tested`, which does not.
    """
    save_adapter(adapter, out / "adapter")
    rows = [(os.path.relpath(project.root / name, out), label) for name, label in project.rows(labels)]
    files = {out / "labels.csv": csv_text(("path", "label"), rows).encode("utf-8", "surrogateescape")}
    if held and tested:
        found = evaluate(tested, project.image_set(labels, held), on_error="skip")
        who = "PERL" if tested.method.name == "perl" else "the quick head"
        title = f"{project.root.resolve().name}: {who} on {found.total} labels that it was not trained on"
        files[out / "report.html"] = mistakes_page(found, title=title).encode("utf-8", "replace")
    write_files(files)
    return ["adapter", *(path.name for path in files)]
