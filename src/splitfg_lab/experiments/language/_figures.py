"""The figures of the language experiments, and their rows in the report's summary."""

from __future__ import annotations

from splitfg_lab.experiments.language._ladder import rung
from splitfg_lab.experiments.language._ladder_tables import ladder_figures
from splitfg_lab.experiments.language._paper_results import BEST, FROZEN_PAPER, MAIN, NAIVE, PURE_PAPER, perplexity
from splitfg_lab.experiments.language._presets import PAPER_TANGENTS, RHOS, TANGENTS, split_fg, tenth
from splitfg_lab.experiments.spec import Cell, Curves, Headline, Sweep


def figures() -> tuple[Curves | Sweep, ...]:
    """Return all figures: frozen control, tangent counts, and distance moved by the trunk."""
    control = ("frozen", NAIVE, MAIN, BEST)
    tangents = ("frozen", *(split_fg(K, 0.03) for K in PAPER_TANGENTS))
    tuned = tuple(f"{split_fg(K, 0.1)}-10" for K in TANGENTS)
    paper = (("frozen control in the paper", 667.6),)
    return (
        Curves("language-control", "Frozen control, naive and scaled trunk step", control, "val_ppl", log_y=True),
        Curves("language-moved", "How far the trunk has moved", control, "trunk_moved", log_y=True),
        Curves("language-k-steps", "Tangent count, by step", tangents, "val_ppl", log_y=True, references=paper),
        Curves(
            "language-k-time",
            "Tangent count, by time",
            tangents,
            "val_ppl",
            log_y=True,
            references=paper,
            step_ms=_step_times(),
        ),
        Curves(
            "language-k-tuned-steps",
            "Tangent count at rho = 0.1, 10% budget: over training",
            tuned,
            "val_ppl",
            log_y=True,
        ),
        Sweep(
            "language-k-tuned",
            "Tangent count at rho = 0.1, 10% budget: at the end",
            tuned,
            "method.K",
            ("val_ppl",),
            "validation perplexity",
            labels=("Split-FG",),
        ),
        Sweep(
            "language-rho-sweep",
            "The basin of rho, 10% budget",
            tuple(f"{split_fg(4, rho)}-10" for rho in (*RHOS, 1.0)),
            "rho",
            ("val_ppl",),
            "validation perplexity",
            labels=("Split-FG, K = 4",),
        ),
        *ladder_figures(),
    )


def _step_times() -> tuple[tuple[str, Cell], ...]:
    """Return where the steps of the frozen trunk and of K tangents at once were timed."""
    variants = {split_fg(K, 0.03): f"split_fg-k{K}-chunk{K}" for K in PAPER_TANGENTS}
    return tuple(
        (name, Cell("language_cost/compiled", f"ms/{variant}"))
        for name, variant in {"frozen": "frozen", **variants}.items()
    )


def headlines() -> tuple[Headline, ...]:
    """Return the rows of the report's summary."""
    return (
        Headline(
            "WikiText-103, GPT small8, one epoch, backprop tuned: validation perplexity",
            {
                "Backprop": perplexity(rung("tuned", budget=""), 75.5),
                "Frozen trunk": perplexity("frozen", FROZEN_PAPER[1]),
                "Pure FG": perplexity("fg-adam-k4", 2884.97),
                "Split-FG": perplexity(BEST, 365.0),
                "Beyond the paper": perplexity("learned-layers-rho0.3"),
            },
            "lower",
            "learned feedback, which also trains the lookup",
        ),
        Headline(
            "WikiText-103, GPT small8, 10% budget, backprop tuned: validation perplexity",
            {
                "Backprop": perplexity(rung("tuned")),
                "Frozen trunk": perplexity("frozen-10", FROZEN_PAPER[0]),
                "Pure FG": perplexity(tenth("fg-adam-k4") or "", PURE_PAPER[4.5e-4]),
                "Split-FG": perplexity(f"{BEST}-10", 541.9),
                "Beyond the paper": perplexity(rung("learned-layers")),
            },
            "lower",
            "learned feedback, which also trains the lookup",
        ),
    )
