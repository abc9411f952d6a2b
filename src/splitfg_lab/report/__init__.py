"""Reports: the tables and figures of the paper with our runs, as a page, as Markdown and in the terminal.

Reports read run folders and recorded results files; they run nothing and do not import torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from splitfg_lab.experiments.spec import Experiment
from splitfg_lab.report._views import ReportView, view_report
from splitfg_lab.runs.storage import make_folder, write_atomic

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["UnreadableWarning", "build_report", "print_report", "report_markdown", "write_figures"]


class UnreadableWarning(UserWarning):
    """A file under ``runs`` or ``results`` could not be read and is missing from the report."""


def build_report(runs: Path, results: Path, out: Path, experiments: Sequence[Experiment] | None = None) -> Path:
    """Write ``report.html``, a self-contained page, and ``report.md`` into a folder.

    Args:
        runs: The folder of run folders; may be missing.
        results: The folder of recorded results files; may be missing.
        out: The folder to write into; created if missing. Both files are replaced.
        experiments: The experiments to report on; all by default.

    Returns:
        The path of the HTML page.

    Raises:
        RunError: The folder cannot be written to.

    Warns:
        UnreadableWarning: Some files could not be read. The report itself lists them too.
    """
    from splitfg_lab.report._html import render_html
    from splitfg_lab.report._markdown import render_markdown

    report = view_report(runs, results, experiments)
    _warn(report)
    make_folder(out)
    page = out / "report.html"
    write_atomic(out / "report.md", render_markdown(report).encode())
    write_atomic(page, render_html(report).encode())
    return page


def report_markdown(
    runs: Path, results: Path, experiments: Sequence[Experiment] | None = None, *, experiment: str | None = None
) -> str:
    """Return the report as one Markdown document.

    Args:
        runs: The folder of run folders; may be missing.
        results: The folder of recorded results files; may be missing.
        experiments: The experiments to report on; all by default.
        experiment: The only one of these to write about; all by default.

    Raises:
        ValueError: There is no experiment of that name.

    Warns:
        UnreadableWarning: Some files could not be read. The report itself lists them too.
    """
    from splitfg_lab.report._markdown import render_markdown

    report = view_report(runs, results, experiments)
    _warn(report)
    return render_markdown(report if experiment is None else report.only(experiment))


def print_report(
    runs: Path,
    results: Path,
    experiment: str | None = None,
    console: Console | None = None,
    experiments: Sequence[Experiment] | None = None,
) -> None:
    """Print the tables, and then the files that could not be read.

    Args:
        runs: The folder of run folders; may be missing.
        results: The folder of recorded results files; may be missing.
        experiment: The only experiment to print; all by default.
        console: The console to print on; by default the standard output, without a width limit for files and pipes.
        experiments: The experiments to report on; all by default.

    Raises:
        ValueError: There is no experiment of that name.
    """
    from splitfg_lab.report._terminal import render_terminal, report_console

    report = view_report(runs, results, experiments)
    render_terminal(report if experiment is None else report.only(experiment), console or report_console())


def write_figures(
    runs: Path, results: Path, out: Path, experiment: str, experiments: Sequence[Experiment] | None = None
) -> list[Path]:
    """Write the figures of one experiment as SVG files, ``<key>.svg``; figures with nothing to draw are skipped.

    Args:
        runs: The folder of run folders; may be missing.
        results: The folder of recorded results files; may be missing.
        out: The folder to write into; created if missing.
        experiment: The name of the experiment.
        experiments: The experiments to read, among them those whose times the figures use; all by default.

    Returns:
        The files written.

    Raises:
        RunError: The folder cannot be written to.
    """
    from splitfg_lab.report._figures import view_figures

    (view,) = view_report(runs, results, experiments).only(experiment).experiments
    make_folder(out)
    written = []
    for drawn in view_figures(view):
        if drawn.svg is not None:
            written.append(out / f"{drawn.figure.key}.svg")
            write_atomic(written[-1], drawn.svg.encode())
    return written


def _warn(report: ReportView) -> None:
    if report.problems:
        lines = "\n".join(("left out of the report:", *report.problems))
        warnings.warn(lines, UnreadableWarning, stacklevel=3)
