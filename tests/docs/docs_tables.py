"""Values of the tables in notes."""

from __future__ import annotations

from docs_networks import best_top1, mean_top1, ppl, searched, seeds, top1
from docs_records import Value, runs_of

from splitfg_lab.experiments.language._ladder import EPSILONS, epsilon

FLAT = {
    "Backprop": ("backprop", 70.7),
    "Learned feedback, measured by a second pass": ("learned", None),
    "One pull, reverse mode inside a block only": ("pull", None),
    "Direct path": ("direct-rho1", None),
    "Direct path with learned maps": ("maps-rho1", None),
    **{f"Split-FG, K = {K}": (f"k{K}-rho1", None) for K in (256, 64, 16)},
    "Split-FG, K = 4": ("split_fg", 56.9),
    "Activity tangents, K = 8": ("activity-rho1", None),
    "Split-FG, K = 4, single linear head": ("split_fg-single", 54.4),
    "Frozen trunk": ("frozen", None),
    "Split-FG, K = 1": ("k1-rho1", None),
    "ES": ("es", 21.7),
    "Pure FG": ("pure_fg", 22.6),
}
"""The flat head: preset and the paper's number."""
FLAT_RHOS = ("1", "0.3", "0.1", "0.03")
FLAT_SEARCHED = {
    "Split-FG, K = 4": ("split_fg", best_top1("flat-split_fg", *(f"flat-k4-rho{r}" for r in FLAT_RHOS[1:]))),
    "Split-FG, K = 64": ("k64", best_top1(*(f"flat-k64-rho{r}" for r in FLAT_RHOS[:3]))),
    "Direct path": ("direct", best_top1(*(f"flat-direct-rho{r}" for r in FLAT_RHOS))),
    "Learned feedback": ("learned", top1("flat-learned")),
    "Activity tangents, K = 8": ("activity", best_top1(*(f"flat-activity-rho{r}" for r in FLAT_RHOS))),
}
"""The line search on the flat head: preset and the best step scale."""


def _flat(name: str, paper: float | None) -> tuple[Value, ...]:
    preset = f"flat-{name}"
    return (lambda: len(runs_of("images", preset)), mean_top1(preset), *([] if paper is None else [paper]))


def _flat_searched(name: str, best: Value) -> tuple[Value, ...]:
    presets = [p for p in (f"flat-{name}-adaptive", f"flat-{name}-adaptive-fast") if runs_of("images", p)]
    return (*map(top1, presets), best)


TABLES: dict[str, tuple[dict[str, tuple[Value, ...]], ...]] = {
    "docs/notes/images.md": (
        {label: _flat(*found) for label, found in FLAT.items()},
        {label: _flat_searched(*found) for label, found in FLAT_SEARCHED.items()},
    ),
    "docs/notes/language.md": (
        {
            "Frozen trunk": tuple(ppl(epsilon("frozen", eps)) for eps in EPSILONS),
            "Split-FG, K = 4, rho = 0.1": tuple(ppl(epsilon("split_fg", eps)) for eps in EPSILONS),
            "Learned feedback, rho = 0.3": (*seeds(epsilon("learned", 1e-6), 1), ppl(epsilon("learned", 1e-5))),
            "Backprop, rho = 0.3": tuple(seeds(epsilon("backprop", eps), 1)[0] for eps in EPSILONS),
        },
        {
            "Learned feedback": searched("learned", 2),
            "Maps to the writers": searched("maps"),
            "Backprop": searched("tuned", 2),
            "Split-FG, K = 4": searched("split_fg-k4"),
            "Maps, one pull": searched("pull-maps", 3),
        },
    ),
}
"""The tables of notes: by row, the values of its numbers in order."""
