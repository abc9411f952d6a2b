"""Show the indented equations of docstrings as literal blocks, with their line breaks."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx


def literal_equations(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:  # noqa: ARG001
    """Put ``::`` before paragraphs that are indented under unindented prose and hold no directive or list."""
    found = [i for i in range(len(lines)) if _begins_equation(lines, i)]
    for i in reversed(found):
        lines[i:i] = ["::", ""]


def _begins_equation(lines: list[str], i: int) -> bool:
    if i < 2 or lines[i - 1].strip() or not lines[i].startswith("    "):
        return False
    before = next((line for line in reversed(lines[: i - 1]) if line.strip()), "")
    directive = before.startswith((".. ", ":")) or before.rstrip().endswith("::") or before.startswith(" ")
    return not directive and not lines[i].lstrip().startswith((">>>", ".. ", "- ", ":"))


def setup(app: Sphinx) -> dict[str, bool]:
    # before napoleon, which turns sections into directives at priority 500
    app.connect("autodoc-process-docstring", literal_equations, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
