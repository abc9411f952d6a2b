"""The compatibility table as Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from splitfg_lab.compatibility._measure import METHODS
from splitfg_lab.compatibility._record import Row

_INTRODUCTION = """\
# Which models work

Every cell is a measurement. A model class gets random weights and a small batch, and the gradient of every estimator is
compared in float32 with plain autograd's on an untouched copy of the model.

- **✓** exact: the largest relative error, at most 1e-05. For estimators with tangents, the scores are compared with
  the inner product of autograd's gradient and tangents that are drawn again from the seed, relative to the norm of the
  gradient, which is the scores' standard deviation; for `ActivityFG`, with autograd's gradients at the outputs of the
  layers. Inner products of the comparison are summed in float64.
- **(✓)** exact in float64, with a larger rounding error in float32: the error in float32, then the one in float64.
- **≈** approximate: the relative distance of the trunk's gradient from autograd's. `LearnedFeedback` learns its maps
  from {updates} estimates of the batch first; its error falls further with more. In brackets: the parameters of the
  trunk that get a gradient, where some do not.
- **✗** raises an error; the number links to its first sentence.

`EvolutionStrategy` is an approximation by finite differences, `FrozenTrunk` trains the head alone, and `DirectPath`
takes the residual stream that `ResidualPath.find` finds.
"""

_SIGNS = {"exact": "✓", "rounding": "(✓)", "approximate": "≈"}


def page(rows: Sequence[Row], updates: int) -> str:
    """Return the table of recorded rows, grouped by library, with the reasons of errors below."""
    reasons: dict[str, int] = {}
    blocks = [_INTRODUCTION.replace("{updates}", str(updates))]
    for library in dict.fromkeys(str(row["library"]) for row in rows):
        own = [row for row in rows if row["library"] == library]
        blocks += [f"## {library}", _table(own, reasons), _origins(own)]
    listed = [f"{number}. {_escaped(reason)}" for reason, number in reasons.items()]
    if listed:
        blocks += ["## Errors", "\n".join(listed)]
    return "\n\n".join(block.strip() for block in blocks) + "\n"


def _table(rows: Sequence[Row], reasons: dict[str, int]) -> str:
    lines = [f"| model | {' | '.join(METHODS)} |", f"|---|{'---|' * len(METHODS)}"]
    for row in rows:
        cells = [_cell(row["cells"].get(name), reasons) for name in METHODS]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(cell: Row | None, reasons: dict[str, int]) -> str:
    if cell is None:
        return ""
    if cell["status"] in ("refused", "failed"):
        number = reasons.setdefault(_general(cell["reason"]), len(reasons) + 1)
        return f"✗ {number}"
    sign = _SIGNS[cell["status"]]
    reached = f" ({cell['reached'][0]} of {cell['reached'][1]})" if "reached" in cell else ""
    double = f", {cell['double']:.0e} in float64" if "double" in cell else ""
    return f"{sign} {cell.get('error', 0.0):.0e}{double}{reached}"


def _general(reason: str) -> str:
    """Return the first line of a reason."""
    return reason.splitlines()[0]


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|$])", r"\\\1", text)


def _origins(rows: Sequence[Row]) -> str:
    """Return versions and dates of the measurements."""
    found = []
    for row in rows:
        origin = row["origin"]
        versions = ", ".join(f"{name} {number}" for name, number in origin["versions"].items())
        found.append(f"{origin['date']}: {versions}, Python {origin['python']}, {origin['device']}")
    return "Measured on " + "; ".join(dict.fromkeys(found)) + "."
