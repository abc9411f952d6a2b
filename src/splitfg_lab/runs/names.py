"""Names: validity as folders, suggestions for misspelt ones, natural order."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def unknown(name: str, allowed: Iterable[str], *, kind: str) -> str:
    """Return the error message for an unknown name, with the nearest allowed one as a suggestion."""
    allowed = list(allowed)
    near = difflib.get_close_matches(name, allowed, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unknown {kind}{hint} (allowed: {', '.join(allowed) or 'none'})"


def natural(text: str) -> list[tuple[int, str]]:
    """Return a sort key under which ``seed10`` comes after ``seed9``."""
    parts = re.split(r"([0-9]+)", text)
    return [(int(part), "") if i % 2 else (-1, part) for i, part in enumerate(parts)]


def is_plain(name: str) -> bool:
    """Return whether a name can be a folder or file: no slashes, no leading dot."""
    return re.fullmatch(r"\w[\w.=-]*", name) is not None
