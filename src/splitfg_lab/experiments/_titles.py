"""The methods that the paper compares."""

from __future__ import annotations

METHOD_TITLES = {
    "backprop": "Backprop",
    "pure_fg": "Pure FG",
    "es": "ES",
    "forward_forward": "FF",
    "predictive_coding": "PC",
    "hopfield": "Hop.",
    "split_fg": "Split-FG",
}
"""The methods in the order of the paper's columns."""

ABBREVIATIONS = (
    "FG: forward gradient. ES: evolution strategy. FF: Forward-Forward. PC: predictive coding. Hop.: modern-Hopfield"
    " readout."
)
"""The abbreviations among the titles, for the notes of tables."""
