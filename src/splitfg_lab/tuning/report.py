"""The report of a tuning: before and after, confusion, cost; as text and as one HTML page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TuneReport:
    """Results of a tuning on held-out rows.

    Attributes:
        source: The network.
        target: The saved file.
        method: The method.
        score_name: ``accuracy`` or ``R²``.
        scores: Held-out scores by stage, in order.
        steps: Steps taken.
        rows: Rows trained on, and held out.
        inferences: Rows run forward, evaluations included.
        engine_seconds: Seconds inside the engine.
        seconds: Seconds in all.
        classes: Names of the classes; empty for values.
        confusion: Rows by true class, columns by predicted class.
        curve: Validation scores by evaluation.
    """

    source: str
    target: str
    method: str
    score_name: str
    scores: dict[str, float]
    steps: int
    rows: tuple[int, int]
    inferences: int
    engine_seconds: float
    seconds: float
    classes: Sequence[str]
    confusion: NDArray[np.int64]
    curve: Sequence[float]

    def facts(self) -> list[tuple[str, str]]:
        """Return labels and values, in order."""
        scores = [
            (f"{self.score_name}, {stage}", _score(value, self.score_name)) for stage, value in self.scores.items()
        ]
        return [
            ("network", self.source),
            ("saved as", self.target),
            ("method", self.method),
            ("rows", f"{self.rows[0]:,} trained on, {self.rows[1]:,} held out"),
            *scores,
            ("steps", f"{self.steps:,}"),
            ("inferences", f"{self.inferences:,} rows run forward"),
            ("seconds", f"{self.seconds:.1f}, of which {self.engine_seconds:.1f} in the engine"),
        ]


def as_text(report: TuneReport) -> str:
    """Return the report as lines for a terminal."""
    width = max(len(label) for label, _ in report.facts())
    lines = [f"{label:<{width}}  {value}" for label, value in report.facts()]
    if 0 < len(report.classes) <= 12:
        lines += ["", "true class by row, predicted class by column:"]
        names = [name[:10] for name in report.classes]
        column = max(6, *(len(name) + 1 for name in names))
        lines.append(" " * 11 + "".join(f"{name:>{column}}" for name in names))
        for name, row in zip(names, report.confusion, strict=True):
            lines.append(f"{name:<11}" + "".join(f"{count:>{column}}" for count in row))
    return "\n".join(lines)


def as_html(report: TuneReport) -> str:
    """Return the report as one self-contained page."""
    facts = "".join(f"<tr><th>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>" for a, b in report.facts())
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{html.escape(report.target)}</title><style>{_STYLE}</style>"
        f"<h1>Tuned network</h1><table>{facts}</table>{_curve(report)}{_matrix(report)}</html>"
    )


def _curve(report: TuneReport) -> str:
    values = list(report.curve)
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    points = " ".join(
        f"{10 + 480 * i / (len(values) - 1):.1f},{110 - 100 * (v - low) / span:.1f}" for i, v in enumerate(values)
    )
    title = f"Validation {report.score_name}: {low:.3f} to {high:.3f}; the first is the head alone"
    return (
        f"<h2>{html.escape(title)}</h2><svg viewBox='0 0 500 120' role=img aria-label='{html.escape(title)}'>"
        f"<polyline points='{points}' fill=none stroke=currentColor stroke-width=2 /></svg>"
    )


def _matrix(report: TuneReport) -> str:
    if not report.classes:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in report.classes)
    rows = ""
    for i, (name, row) in enumerate(zip(report.classes, report.confusion, strict=True)):
        total = max(1, int(row.sum()))
        cells = "".join(
            f"<td class={'right' if i == j else 'wrong'} style='--share:{count / total:.2f}'>{count}</td>"
            for j, count in enumerate(row)
        )
        rows += f"<tr><th>{html.escape(name)}</th>{cells}</tr>"
    return (
        f"<h2>Held-out rows: true class by row, predicted by column</h2><table><tr><th></th>{head}</tr>{rows}</table>"
    )


def _score(value: float, name: str) -> str:
    return f"{100 * value:.1f}%" if name == "accuracy" else f"{value:.3f}"


_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;display:block;overflow-x:auto}
th{text-align:left;font-weight:600;padding:.2rem 1rem .2rem 0}
td{padding:.2rem .6rem}td.right{background:rgb(0 128 60/calc(var(--share)*.6))}
td.wrong{background:rgb(200 0 0/calc(var(--share)*.6))}svg{width:100%;max-width:40rem}
"""
