"""Matplotlib drawings as SVG that follows the page's colours; the same numbers always give the same bytes."""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from splitfg_lab.report._methods import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

INK, QUIET, GRID = "#22272d", "#69727d", "#dde1e6"
WIDTH, HEIGHT = 5.2, 3.1
"""Inches; narrow, so that text stays readable on a phone."""

# The page can replace the colours of a drawing through these custom properties.
_THEME = {INK: "--fig-ink", QUIET: "--fig-quiet", GRID: "--fig-grid"} | {
    colour: f"--fig-series-{i}" for i, colour in enumerate(COLOURS, start=1)
}
_METADATA = ("Date", "Creator", "Format", "Type")
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 8.5,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
}


def render(draw: Callable[[Canvas], None], *, label: str, salt: str) -> str:
    """Return the SVG of what ``draw`` puts on a canvas.

    Args:
        draw: Draws; it may change the size of the canvas.
        label: A name for screen readers.
        salt: Makes the ids of clip paths differ between figures.
    """
    # imported here: matplotlib takes a while, and only pages need it
    from matplotlib import style
    from matplotlib.figure import Figure as Canvas

    with style.context(_STYLE | {"svg.hashsalt": salt}, after_reset=True), _ignore_missing_glyphs():
        canvas = Canvas(figsize=(WIDTH, HEIGHT), layout="constrained")
        draw(canvas)
        buffer = io.StringIO()
        canvas.savefig(buffer, format="svg", transparent=True, metadata=dict.fromkeys(_METADATA))
    return _themed(_bare(buffer.getvalue()), label)


@contextmanager
def _ignore_missing_glyphs() -> Iterator[None]:
    """Ignore glyphs that matplotlib's font lacks: text stays text in the SVG, and the browser's fonts have them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _bare(svg: str) -> str:
    """Return the ``<svg>`` element alone, sized by its view box, without ids that nothing refers to."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    referenced = set(re.findall(r"#([\w-]+)", svg))
    return _edit_tags(svg, r' id="([^"]+)"', lambda m: m.group(0) if m.group(1) in referenced else "")


def _themed(svg: str, label: str) -> str:
    """Replace colours by custom properties with the light colour as fallback, and add a name for screen readers."""
    svg = _edit_tags(svg, "|".join(_THEME), lambda m: f"var({_THEME[m.group(0)]}, {m.group(0)})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)


def _edit_tags(svg: str, pattern: str, edit: Callable[[re.Match[str]], str]) -> str:
    """Replace a pattern inside tags only; the text between them stays as it is."""
    return re.sub(r"<[^<>]*>", lambda tag: re.sub(pattern, edit, tag.group(0)), svg)
