"""Draw the picture of the landing page: ``python docs/picture.py`` writes ``docs/_static/split.svg``."""

from __future__ import annotations

from pathlib import Path

OUT = Path(__file__).parent / "_static" / "split.svg"

INK, TRUNK, HEAD, TANGENT = "#24313f", "#d9e7f7", "#fde6c4", "#b3471d"
WIDTH, HEIGHT = 880, 330
CAPTION = "No reverse pass through the trunk: any torch.optim optimizer takes the estimate from here."


def box(x: int, y: int, w: int, h: int, fill: str, title: str, *lines: str) -> str:
    """A rounded box with a bold title and lines below it."""
    texts = [text(x + w // 2, y + 30, title, weight="bold", size=19)]
    texts += [text(x + w // 2, y + 56 + 22 * i, line) for i, line in enumerate(lines)]
    return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="10" fill="{fill}" stroke="{INK}"/>' + "".join(texts)


def text(x: int, y: int, words: str, *, size: int = 16, weight: str = "normal", colour: str = INK) -> str:
    """Centred text."""
    style = f'font-size="{size}" font-weight="{weight}" fill="{colour}" text-anchor="middle"'
    return f'<text x="{x}" y="{y}" {style}>{words}</text>'


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


def picture() -> str:
    """Return the picture as SVG."""
    k, trunk = subscript("k"), subscript("trunk")
    parts = [
        f"<defs>{marker('ink', INK)}{marker('tangent', TANGENT)}</defs>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="14" fill="#ffffff"/>',
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
    ]  # fmt: skip
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    label = "A tangent is pushed through the trunk and scored against u, which the head gives exactly"
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif" role="img">'
    return "\n".join([opening, f"<title>{label}</title>", *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    OUT.write_text(picture(), encoding="utf-8")
