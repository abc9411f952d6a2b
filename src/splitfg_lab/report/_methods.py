"""The method behind a line of a figure, and its colour: one colour per method, the same in every figure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from splitfg_lab.runs.config import to_json

COLOURS: Final = (
    "#1b62a5", "#c2491d", "#12795a", "#8b4aa8", "#9a6b00", "#0d8496", "#b53a6b", "#5c6570", "#6b8e23", "#7a5c3e",
    "#2fa84f", "#4a4fc4",
)  # fmt: skip
"""Line colours on a light page; the page's ``--fig-series-N`` replaces the N-th."""

_BY_METHOD: Final = {
    "split_fg": 0,
    "backprop": 1,
    "direct_path": 2,
    "pure_fg": 3,
    "evolution": 4,
    "predictive_coding": 5,
    "forward_forward": 6,
    "frozen": 7,
    "activity": 8,
    "hopfield": 9,
    "learned_feedback": 10,
    "parallel_pull": 11,
}
_SAME: Final = {
    "es": "evolution",
    "fg": "pure_fg",
    "activity_fg": "activity",
    "ff": "forward_forward",
    "pc": "predictive_coding",
    "knn_lm": "hopfield",
    "unigram": "hopfield",
    "bigram": "hopfield",
    "direct": "direct_path",
    "conditioned": "split_fg",
    "pull": "parallel_pull",
    "learned": "learned_feedback",
    "learned_layers": "learned_feedback",
    "maps": "direct_path",
    "weights": "split_fg",
    "head": "frozen",
    "activity_and_feedback": "activity",
}

_TITLES: Final = {
    "split-fg": "split_fg",
    "backprop": "backprop",
    "direct path": "direct_path",
    "pure fg": "pure_fg",
    "pure forward gradient": "pure_fg",
    "forward gradient": "pure_fg",
    "frozen": "frozen",
}


def method_of(config: Any) -> str:
    """Return the short name of a config's ``method`` field, ``split_fg`` for example; empty if it has none."""
    return _find(config if isinstance(config, Mapping) else to_json(config))


def method_in(name: str) -> str:
    """Return the method that the name of a variant or metric begins with (``mib/split_fg-k4``); empty if none."""
    variant = name.rpartition("/")[2]
    words = sorted((*_BY_METHOD, *_SAME), key=len, reverse=True)
    found = next((word for word in words if re.match(rf"{word}(?![a-z_])", variant)), "")
    return _SAME.get(found, found)


def method_titled(title: str) -> str:
    """Return the method that a title begins with (``Split-FG, K = 4``); empty if none."""
    text = title.lower()
    return next((method for start, method in _TITLES.items() if text.startswith(start)), "")


def colour_of(method: str) -> str | None:
    """Return the colour of a method; ``None`` if it has none of its own."""
    return COLOURS[_BY_METHOD[method]] if method in _BY_METHOD else None


def colour_number(title: str) -> int:
    """Return the number of the custom property that colours a method's title (``Split-FG``), or 0."""
    method = method_titled(title)
    return _BY_METHOD[method] + 1 if method else 0


def _find(data: Mapping[str, Any]) -> str:
    found = data.get("method")
    if isinstance(found, Mapping):
        return _short(str(found.get("type", "")))
    if isinstance(found, str):
        return _SAME.get(found, found)
    inner = (_find(value) for value in data.values() if isinstance(value, Mapping))
    return next((name for name in inner if name), "")


def _short(recipe: str) -> str:
    """``SplitFGMethod`` becomes ``split_fg``."""
    words = re.findall(r"[A-Z]+(?=[A-Z][a-z]|$)|[A-Z][a-z]*", recipe.removesuffix("Method"))
    name = "_".join(word.lower() for word in words)
    return _SAME.get(name, name)
