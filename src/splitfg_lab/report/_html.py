"""A self-contained page: style, script and figures inline, no requests."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from splitfg_lab.experiments.spec import SUMMARY_COLUMNS
from splitfg_lab.report._figures import view_figures
from splitfg_lab.report._methods import COLOURS, colour_number
from splitfg_lab.report._table_view import PINNED
from splitfg_lab.report._views import ReportView
from splitfg_lab.report._words import AUTHORS, PAPER


def render_html(report: ReportView) -> str:
    """Return the report as one HTML document; all text in it is escaped."""
    # imported here: terminal tables need no template engine
    from jinja2 import Environment, PackageLoader, StrictUndefined

    script = resources.files("splitfg_lab.report").joinpath("templates/report.js").read_text(encoding="utf-8")
    environment = Environment(
        loader=PackageLoader("splitfg_lab.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("report.html").render(
        report=report,
        figures={view.experiment.name: view_figures(view) for view in report.experiments},
        colours=COLOURS,
        paper=PAPER,
        authors=AUTHORS,
        columns=[(name, colour_number(name), name == PINNED) for name in SUMMARY_COLUMNS],
        script=script,
        # browsers run no script but the page's own
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
