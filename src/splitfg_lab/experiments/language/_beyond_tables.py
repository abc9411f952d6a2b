"""Tables of language results that the paper does not have, or has in part."""

from __future__ import annotations

from dataclasses import replace

from splitfg_lab.experiments.language._paper_results import BEST, FROZEN_PAPER, MAIN, RHO_PAPER, perplexity, table
from splitfg_lab.experiments.language._presets import (
    BACKPROP_OPTIMIZERS,
    BACKPROP_RATES,
    BACKPROP_RHOS,
    DIRECT,
    DIRECT_RHOS,
    OTHER_LOOKUP_RHOS,
    TANGENTS,
    TUNED_RHOS,
    VARIED,
    VARIED_RHOS,
    backprop,
    direct,
    other_lookup,
    split_fg,
    varied,
)
from splitfg_lab.experiments.spec import Cell, Row, Table


def tuned_table() -> Table:
    """Return perplexity by tangents and trunk step scale."""
    return replace(
        table(
            "language-k-tuned",
            "Tangent count K with a tuned rho, 10% budget",
            tuple(f"rho = {rho:g}" for rho in TUNED_RHOS),
            [Row(f"K = {K}", tuple(perplexity(f"{split_fg(K, rho)}-10") for rho in TUNED_RHOS)) for K in TANGENTS],
            "Not in the paper.",
            collapse=True,
        ),
        best_in="table",
    )


def varied_table() -> Table:
    """Return perplexity by initialisation, clipping and lookup."""
    return table(
        "language-varied",
        "Initialisation of linear layers, clipping, and the frozen control's lookup, K = 4",
        (
            "GPT-2's, 10%",
            "GPT-2's, apart, 10%",
            "torch's, 10%",
            "torch's, apart, 10%",
            "GPT-2's, one epoch",
            "torch's, one epoch",
        ),
        [
            _varied_row("Frozen trunk", "frozen", FROZEN_PAPER),
            _varied_row("Frozen trunk and lookup", "frozen-fixed", FROZEN_PAPER),
            *(_varied_row(f"rho = {r:g}", split_fg(4, r), RHO_PAPER[r]) for r in VARIED_RHOS),
        ],
        "The paper clips jointly and names neither its initialisation nor whether its frozen control looks tokens"
        " up in the table that is being trained; apart, trunk and head are clipped each by itself.",
        collapse=True,
    )


def backprop_table() -> Table:
    """Return the screening of tuned backprop."""
    return replace(
        table(
            "language-backprop",
            "Backprop: optimizer, learning rate and trunk step scale, 10% budget",
            tuple(f"rho = {rho:g}" for rho in BACKPROP_RHOS),
            [
                Row(f"{name}, {lr:g}", tuple(perplexity(backprop(name, lr, rho)) for rho in BACKPROP_RHOS))
                for name in BACKPROP_OPTIMIZERS
                for lr in BACKPROP_RATES
            ],
            "Not in the paper, which gives one number for a tuned AdamW at one epoch, 75.5. AdamW's decay is 0.01.",
            collapse=True,
        ),
        best_in="table",
    )


def light_table() -> Table:
    """Return light trunks and conditioned tangents."""
    return table(
        "language-light",
        "Light trunk (46,592 parameters: positions, norms and biases) and conditioned tangents, K = 4",
        ("Val. PPL", "10% budget"),
        [
            Row("Light trunk, rho = 1", (perplexity("light-rho1", 671.6), perplexity("light-rho1-10"))),
            Row("Light trunk, rho = 0.03", (perplexity("light-rho0.03"), perplexity("light-rho0.03-10"))),
            Row("Gaussian tangents, rho = 0.03", (perplexity(MAIN, 386.7), perplexity(f"{MAIN}-10", 623.3))),
            Row(
                "Conditioned tangents, rho = 0.03",
                (perplexity("conditioned-rho0.03"), perplexity("conditioned-rho0.03-10")),
            ),
            Row("Gaussian tangents, rho = 0.1", (perplexity(BEST, 365.0), perplexity(f"{BEST}-10", 541.9))),
            Row(
                "Conditioned tangents, rho = 0.1",
                (perplexity("conditioned-rho0.1"), perplexity("conditioned-rho0.1-10")),
            ),
            Row("Frozen control", (perplexity("frozen", FROZEN_PAPER[1]), perplexity("frozen-10", FROZEN_PAPER[0]))),
        ],
        "The paper gives conditioned tangents no number. One seed: differences of a few percent are not conclusive.",
        collapse=True,
    )


def direct_table() -> Table:
    """Return the direct path by trunk step scale, and with the other lookup."""
    columns = ("Trains the lookup", *(f"rho = {rho:g}, 10%" for rho in DIRECT_RHOS), "rho = 0.03, one epoch")
    names = {**{name: title for name, (title, _) in DIRECT.items()}, "split_fg-k4": "Split-FG, K = 4"}
    rows = []
    for name, title in names.items():
        own = [_unranked(f"{direct(name, rho)}-10") for rho in DIRECT_RHOS]
        other = [
            _unranked(f"{other_lookup(direct(name, r))}-10") if r in OTHER_LOOKUP_RHOS else None for r in DIRECT_RHOS
        ]
        rows += [
            Row(title, (_lookup(trained=name in DIRECT), *own, _unranked(direct(name, 0.03)))),
            Row(title, (_lookup(trained=name not in DIRECT), *other, None)),
        ]
    return table(
        "language-direct",
        "Direct path: trunk gradients from u along the residual stream, by the trunk's step scale",
        columns,
        rows,
        "Not in the paper. The direct path trains everything that writes to the stream (both writers of every block,"
        " positions, and, with tied=include, the token table as lookup) and the final norm; qkv, fc and the blocks'"
        " norms keep their initial values. In all other tables Split-FG does not train the lookup (tied=exclude), so"
        " compare rows with the same entry in the first column. One seed: differences of a few percent are not"
        " conclusive.",
        collapse=True,
    )


def _unranked(preset: str) -> Cell:
    return replace(perplexity(preset), ranked=False)


def _lookup(*, trained: bool) -> str:
    return "yes (tied=include)" if trained else "no (tied=exclude)"


def _varied_row(label: str, preset: str, paper: tuple[float, float]) -> Row:
    names = [varied(preset, init=init, apart=apart) for init, apart in (("gpt2", False), *VARIED)]
    quoted = [None if name.endswith("-apart") else paper for name in names]
    tenths = [perplexity(f"{name}-10", both and both[0]) for name, both in zip(names, quoted, strict=True)]
    full = [perplexity(name, both[1]) for name, both in zip(names, quoted, strict=True) if both]
    return Row(label, (*tenths, *full))
