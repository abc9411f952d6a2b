"""Write one page for every experiment with recorded runs: notes, tables and figures from ``results/``, protocol.

Pages go to ``docs/results/<experiment>.md``, which git ignores. The notes are hand-written, in ``docs/notes/``; the
tests compare every number in them with the records.
"""

from __future__ import annotations

import re
import tempfile
from importlib import import_module
from pathlib import Path

from pages import replace_page
from sphinx.application import Sphinx

from splitfg_lab.compatibility import UPDATES, page as compatibility_page, read_rows
from splitfg_lab.experiments import EXPERIMENTS, Cell, Curves, Experiment
from splitfg_lab.report import report_markdown, write_figures

DOCS = Path(__file__).parents[1]
RESULTS = DOCS.parent / "results"
PAGES = DOCS / "results"
FIGURES = DOCS / "_static" / "figures"
COMPATIBILITY = DOCS.parent / "benchmarks" / "compatibility.json"

_LEGEND = """\
Numbers are means ± sample standard deviations, with the number of runs in brackets. Below them are the paper's value
and the difference, ours minus the paper's. **Bold**: the best of those compared. ★: the best with no backward pass
through the trunk. †: a run with another config, never part of a mean."""


def write_pages(app: Sphinx) -> None:  # noqa: ARG001
    """Write the pages of all shipped experiments that have recorded runs."""
    for experiment in EXPERIMENTS:
        if experiment.runner.startswith("splitfg_lab.") and _records(experiment).exists():
            replace_page(PAGES / f"{experiment.name}.md", page(experiment))
    table = compatibility_page(read_rows(COMPATIBILITY), UPDATES)
    replace_page(PAGES / "compatibility.md", f"---\nhide-toc: true\n---\n\n{table}")


def page(experiment: Experiment) -> str:
    """Return the Markdown page of one experiment."""
    notes = DOCS / "notes" / f"{experiment.name}.md"
    blocks = [
        "---\nhide-toc: true\n---",
        f"# {experiment.title}",
        f"{_origin(experiment)}. Run it with `splitfg run {experiment.name}`.",
    ]
    figures = _figures(experiment)
    parts = ["Figures", "Recorded tables", "Protocol"] if figures else ["Recorded tables", "Protocol"]
    blocks += ["On this page: " + ", ".join(f"[{part}](#{part.lower().replace(' ', '-')})" for part in parts) + "."]
    blocks += [notes.read_text(encoding="utf-8").strip()] if notes.exists() else []
    blocks += figures
    blocks += [
        "## Recorded tables",
        _LEGEND,
        *filter(None, [experiment.note]),
        _tables(experiment),
    ]
    blocks += ["## Protocol", _protocol(experiment)]
    return "\n\n".join(blocks) + "\n"


def _origin(experiment: Experiment) -> str:
    """Return a sentence on the experiment's place in the paper, without its full stop."""
    return f"In the paper: {experiment.source}" if experiment.source.startswith("Section") else experiment.source


def _borrowed(experiment: Experiment) -> list[Experiment]:
    """Return the other experiments whose numbers the tables and figures of this one show."""
    cells = [cell for table in experiment.tables for row in table.rows for cell in row.cells if isinstance(cell, Cell)]
    cells += [cell for figure in experiment.figures if isinstance(figure, Curves) for _, cell in figure.step_ms]
    names = {cell.preset.partition("/")[0] for cell in cells if "/" in cell.preset}
    return [other for other in EXPERIMENTS if other.name in names]


def _records(experiment: Experiment) -> Path:
    return RESULTS / f"{experiment.name}.json"


def _tables(experiment: Experiment) -> str:
    """The report's Markdown below the experiment's own heading; reads no results but those that its page shows."""
    shown = [experiment, *_borrowed(experiment)]
    with tempfile.TemporaryDirectory() as folder:
        for path in filter(Path.exists, map(_records, shown)):
            (Path(folder) / path.name).symlink_to(path.resolve())
        text = report_markdown(Path(folder) / "no-runs", Path(folder), shown, experiment=experiment.name)
    _, _, below = text.partition("\n### ")
    if not below:
        raise ValueError(f"the report on {experiment.name} has no table")
    return "### " + below.strip()


def _figures(experiment: Experiment) -> list[str]:
    shown = [experiment, *_borrowed(experiment)]
    drawn = write_figures(Path("no-runs"), RESULTS, FIGURES, experiment.name, shown)
    titles = {figure.key: figure.title for figure in experiment.figures}
    figures = [
        f"```{{figure}} /_static/figures/{path.name}\n:alt: {titles[path.stem]}\n\n{titles[path.stem]}\n```"
        for path in drawn
    ]
    return ["## Figures", *figures] if figures else []


def _protocol(experiment: Experiment) -> str:
    """The experiment's own README, its headings two levels down and its title dropped."""
    package = import_module(experiment.runner.partition(":")[0].rpartition(".")[0])
    readme = Path(next(iter(package.__path__))) / "README.md"
    _, _, body = readme.read_text(encoding="utf-8").partition("\n")
    return re.sub(r"^#+ ", lambda found: "#" + found[0], body.strip(), flags=re.MULTILINE)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
