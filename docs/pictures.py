"""Draw the pictures of README and landing page: ``python docs/pictures.py`` writes them to ``docs/_static``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

DOCS = Path(__file__).parent
INK, TRUNK, HEAD, TANGENT = "#24313f", "#d9e7f7", "#fde6c4", "#b3471d"
CAPTION = "No reverse pass through the trunk: any torch.optim optimizer takes the estimate from here."

PALE, TENTH, EPOCH = "#d5dbe1", "#3f76ad", TANGENT
LEFT, RIGHT, TOP, ROW = 190, 640, 92, 30
"""The field of the dots of the ladder, and the distance of its rows."""
LOWEST, HIGHEST = 60.0, 1000.0
"""The ends of its axis."""
TIMES, PASSES = 706, 790
"""The places of its columns of numbers."""


def box(x: int, y: int, w: int, h: int, fill: str, title: str, *lines: str) -> str:
    """A rounded box with a bold title and lines below it."""
    texts = [text(x + w // 2, y + 30, title, weight="bold", size=19)]
    texts += [text(x + w // 2, y + 56 + 22 * i, line) for i, line in enumerate(lines)]
    return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="10" fill="{fill}" stroke="{INK}"/>' + "".join(texts)


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 16,
    weight: str = "normal",
    colour: str = INK,
    anchor: str = "middle",
    halo: bool = False,
) -> str:
    """Text at a point; ``halo`` keeps lines behind it away from it."""
    style = f'font-size="{size}" font-weight="{weight}" fill="{colour}" text-anchor="{anchor}"'
    if halo:
        style += ' stroke="#ffffff" stroke-width="5" paint-order="stroke"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{words}</text>'


def subscript(words: str) -> str:
    """Small letters below the line; an empty span brings the line back."""
    return f'<tspan dy="5" font-size="75%">{words}</tspan><tspan dy="-5">\u200b</tspan>'


def arrow(points: str, colour: str = INK, *, dashed: bool = False) -> str:
    """A polyline with an arrow head at its end."""
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    end = "tangent" if colour == TANGENT else "ink"
    return (
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash} marker-end="url(#{end})"/>'
    )


def marker(name: str, colour: str) -> str:
    """The head of an arrow."""
    size = 'viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto"'
    return f'<marker id="{name}" {size}><path d="M0 0 10 5 0 10z" fill="{colour}"/></marker>'


def drawing(width: int, height: int, title: str, *parts: str) -> str:
    """A whole picture on white."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif" role="img">'
    ground = f'<rect width="{width}" height="{height}" rx="14" fill="#ffffff"/>'
    return "\n".join([opening, f"<title>{title}</title>", ground, *parts, "</svg>"]) + "\n"


def split() -> str:
    """Draw how a tangent becomes a score."""
    k, trunk = subscript("k"), subscript("trunk")
    return drawing(
        880, 330, "A tangent is pushed through the trunk and scored against u, which the head gives exactly",
        f"<defs>{marker('ink', INK)}{marker('tangent', TANGENT)}</defs>",
        box(120, 40, 240, 100, TRUNK, "trunk", "runs forward only", "nothing kept for backward"),
        box(500, 40, 200, 100, HEAD, "head", "exact gradient,", "closed form"),
        arrow("50,90 118,90"), text(38, 96, "x", size=20),
        arrow("360,76 498,76"), text(430, 66, "h", size=20),
        arrow("700,90 790,90"), text(820, 96, "loss", size=19),
        arrow("180,230 180,142", TANGENT, dashed=True),
        text(180, 256, f"K random tangents v{k}", colour=TANGENT),
        arrow("360,112 420,112 420,200", TANGENT, dashed=True),
        text(376, 176, f"J v{k}", size=18, colour=TANGENT),
        arrow("600,140 600,172 470,172 470,200"), text(654, 178, "u = dL/dh", size=18),
        box(330, 202, 230, 48, "#ffffff", f"d{k} = ⟨u, J v{k}⟩"),
        arrow("560,226 628,226"),
        text(746, 232, f"ĝ{trunk} = (1/K) Σ d{k} v{k}", size=18, weight="bold"),
        text(440, 300, CAPTION, size=15),
    )  # fmt: skip


def ladder() -> str:
    """Draw the table of the ladder to backprop, ``docs/_parts/ladder.md``, which the tests compare with the records."""
    lines = (DOCS / "_parts" / "ladder.md").read_text(encoding="utf-8").splitlines()
    _, _, *rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    bottom = TOP + ROW * len(rows)
    head = [
        text(LEFT, 30, "Validation perplexity of a GPT, on a logarithmic axis", size=14, anchor="start", weight="bold"),
        *(_key(LEFT + 6, TENTH, "after a tenth of an epoch"), _key(LEFT + 206, EPOCH, "after one epoch")),
        *(text(TIMES, 30, "step time", size=14, weight="bold"), text(TIMES, 48, "over backprop's", size=12)),
        *(text(PASSES, 30, "reverse", size=14, weight="bold"), text(PASSES, 48, "passes", size=14, weight="bold")),
    ]
    drawn = [part for i, row in enumerate(rows) for part in _rung(TOP + ROW * i, *(cell.strip() for cell in row))]
    note = text(PASSES + 30, bottom + 6, "* one inside each block that is pulled", size=12, anchor="end")
    title = "Perplexity, step time and reverse passes of methods between a frozen trunk and backprop"
    return drawing(850, bottom + 24, title, *head, *drawn, note)


def _key(x: int, colour: str, words: str) -> str:
    return _dot(x, 56, colour) + text(x + 14, 61, words, size=14, anchor="start", colour=colour)


def _rung(y: int, name: str, tenth: str, epoch: str, ratio: str, passes: str, *_: str) -> Iterator[str]:
    yield text(LEFT - 14, y + 5, name, size=14, anchor="end")
    yield f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y}" y2="{y}" stroke="{PALE}"/>'
    found = sorted((float(value), value, colour) for value, colour in ((tenth, TENTH), (epoch, EPOCH)) if value)
    for i, (value, shown, colour) in enumerate(found):
        side = 1 if i == len(found) - 1 else -1
        anchor = "start" if side > 0 else "end"
        yield text(_place(value) + 11 * side, y + 4, shown, size=12, anchor=anchor, colour=colour, halo=True)
        yield _dot(_place(value), y, colour)
    yield text(TIMES, y + 5, ratio, size=14)
    yield text(PASSES, y + 5, passes.replace(", inside blocks", "*"), size=14)


def _place(perplexity: float) -> float:
    share = math.log(perplexity / LOWEST) / math.log(HIGHEST / LOWEST)
    return round(LEFT + share * (RIGHT - LEFT), 1)


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="6" fill="{colour}"/>'


PICTURES: dict[str, Callable[[], str]] = {"split": split, "ladder": ladder}
"""How to draw each picture, by the name of its file."""


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (DOCS / "_static" / f"{name}.svg").write_text(draw(), encoding="utf-8")
