"""One page that needs nothing but itself: style, script and figures inline, and no request to anywhere."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from splitfg_lab.report._figures import FigureView, view_figure
from splitfg_lab.report._views import ExperimentView, ReportView


def render_html(report: ReportView) -> str:
    """The report as one HTML document; all text in it is escaped."""
    # imported here, so that terminal tables need no template engine
    from jinja2 import Environment, PackageLoader, StrictUndefined

    script = resources.files("splitfg_lab.report").joinpath("templates/report.js").read_text(encoding="utf-8")
    environment = Environment(
        loader=PackageLoader("splitfg_lab.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("report.html").render(
        report=report,
        figures={view.experiment.name: _figures(view) for view in report.experiments},
        script=script,
        # the page's own script is the only one that a browser will run
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _figures(view: ExperimentView) -> list[FigureView]:
    return [view_figure(figure, view.experiment, view.groups) for figure in view.experiment.figures]
