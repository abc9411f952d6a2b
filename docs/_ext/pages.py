"""What the generators of pages share: writing a page, and tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def replace_page(path: Path, text: str) -> None:
    """Write a page unless it is there already: Sphinx reads changed files again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], *, words: int = 1) -> str:
    """Return a Markdown table whose first columns, ``words`` of them, hold words and the others numbers."""
    lines = [header, ["---"] * words + ["---:"] * (len(header) - words), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
