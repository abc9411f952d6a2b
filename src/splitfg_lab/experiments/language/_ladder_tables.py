"""Tables and figures of the ladder to backprop."""

from __future__ import annotations

from splitfg_lab.experiments.language._ladder import (
    ADAPTIVE,
    BEST_EPS,
    BUDGETS,
    CONTROLS,
    EPSILONS,
    GROUPED,
    LONGER,
    RUNGS,
    SIZED,
    SIZED_RHOS,
    SIZES,
    adaptive,
    epsilon,
    grouped,
    rung,
    sized,
)
from splitfg_lab.experiments.language._presets import ACTIVITY_RHOS
from splitfg_lab.experiments.spec import Cell, Curves, Row, Sweep, Table

EARLIER: tuple[tuple[str, str, str | None, str], ...] = (  # label, preset with the 10% budget and one epoch, waits
    ("Frozen trunk, exact head", "frozen-10", "frozen", "n"),
    ("Split-FG, K = 4, rho = 0.1", "split_fg-k4-rho0.1-10", "split_fg-k4-rho0.1", "2n"),
    ("Activity tangents, K = 8, rho = 0.01", "activity-k8-rho0.01-10", None, "2n"),
    ("Direct path, rho = 0.03, eps 1e-08", "direct-rho0.03-10", "direct-rho0.03", "n"),
    ("Maps to the writers, rho = 0.03, eps 1e-08", "direct-maps-rho0.03-10", "direct-maps-rho0.03", "2n"),
)
TIMED = {
    "frozen-10": "frozen",
    "split_fg-k4-rho0.1-10": "split_fg-k4-chunk4",
    "direct-rho0.03-10": "direct",
    "direct-maps-rho0.03-10": "maps",
    rung("tuned"): "backprop",
    **{
        rung(name): name
        for name in (
            "maps",
            "pull-identity",
            "pull-maps",
            "pull2-maps",
            "pull-maps-blocks",
            "pull2-maps-blocks",
            "pull4-maps",
            "learned",
            "learned-layers",
            "learned-every4",
        )
    },
}
"""Variants of ``language_cost/ladder`` that take the step of a preset."""
_COLUMNS = (
    "PPL, 10% budget",
    "Over the bigram's",
    "Over backprop's",
    "PPL, one epoch",
    "Step over backprop's",
    "Peak, MiB",
    "JVPs",
    "Reverse passes inside blocks",
    "Reverse passes through the trunk",
    "Critical path",
)


def ladder_tables() -> tuple[Table, ...]:
    """Return the ladder, its steps by rho and budget, other sizes of the trunk, and Adam's eps."""
    return _ladder(), _by_rho(), _by_budget(), _by_size(), _by_eps()


def _ladder() -> Table:
    rows = [_row(label, tenth, full, waits) for label, tenth, full, waits in EARLIER]
    for name, found in RUNGS.items():
        label = f"{found.title}, rho = {found.rhos[0]:g}"
        full = rung(name, budget="") if name in LONGER else None
        rows.append(_row(label, rung(name), full, found.waits, every=found.every))
    return Table(
        "language-ladder",
        "The ladder to backprop: GPT small8, from the frozen trunk to tuned backprop",
        _COLUMNS,
        tuple(rows),
        "lower",
        note="Not in the paper. Adam's eps is 1e-06 (maps to the writers: 1e-05) where the row does not name it. All"
        " but the frozen trunk, Split-FG and activity tangents train the token table as lookup too, and activity"
        " tangents do not train positions. Over the bigram's divides by the"
        " perplexity of the interpolated bigram on the same corpus, over backprop's by that of the last row. Costs are"
        " per step of the runs with the 10% budget; times are those of language_cost/ladder, compiled and captured"
        " steps that take turns in one process. The critical path counts what must wait for what, for n blocks on as"
        " many devices: a forward pass through a block"
        " takes 1, with a tangent 2, a pull 2. JVPs are a mean over steps: some rows measure their maps at some steps"
        " only.",
        collapse=True,
    )


def _row(label: str, tenth: str, full: str | None, waits: str, *, every: int = 1) -> Row:
    cost = ("peak_memory_mib", "jvps_per_step", "block_backward", "trunk_backward")
    fraction = 0 if every == 1 else 2
    decimals = (0, fraction, 0, fraction)
    timed = f"ratio/{TIMED[tenth]}" if tenth in TIMED else None
    return Row(
        label,
        (
            Cell(tenth, "val_ppl"),
            Cell(tenth, "val_ppl", decimals=2, over="bigram", ranked=False),
            Cell(tenth, "val_ppl", decimals=3, over=rung("tuned"), ranked=False),
            None if full is None else Cell(full, "val_ppl"),
            None if timed is None else Cell("language_cost/ladder", timed, decimals=2, ranked=False),
            *(Cell(tenth, metric, decimals=d, ranked=False) for metric, d in zip(cost, decimals, strict=True)),
            waits,
        ),
    )


def _by_rho() -> Table:
    rhos = sorted({*ACTIVITY_RHOS, *(rho for found in RUNGS.values() for rho in found.rhos)})
    screened = {"split_fg-k4": {*rhos} - {0.06}, "activity-k8": {*ACTIVITY_RHOS}}
    rows = [
        Row(
            ADAPTIVE[name][0],
            (*(Cell(f"{name}-rho{r:g}-10", "val_ppl") if r in run else None for r in rhos), *_searched(name)),
        )
        for name, run in screened.items()
    ]
    rows += [
        Row(
            found.title,
            (*(Cell(rung(name, rho), "val_ppl") if rho in found.rhos else None for rho in rhos), *_searched(name)),
        )
        for name, found in RUNGS.items()
    ]
    decayed = (Cell("tuned-adamw-10", "val_ppl") if rho == 0.3 else None for rho in rhos)
    rows.append(Row("Backprop, AdamW", (*decayed, None, None, None)))
    columns = (*(f"rho = {rho:g}" for rho in rhos), "Line search", "Fast line search", "Line search by groups")
    title = "The ladder by trunk step scale, 10% budget: validation perplexity"
    note = "The fast line search begins at rho = 0.3 and has a calm of 100."
    return Table("language-ladder-rho", title, columns, tuple(rows), "lower", "row", note=note, collapse=True, fewest=2)


def _searched(name: str) -> tuple[Cell | None, ...]:
    """Return the cells of the line searches: by default, fast, and with several scales."""
    return (
        *(Cell(adaptive(name, fast=fast), "val_ppl") if name in ADAPTIVE else None for fast in (False, True)),
        Cell(grouped(name), "val_ppl") if name in GROUPED else None,
    )


def _by_budget() -> Table:
    budgets = {"-3": "3%", "-10": "10%", "-30": "30%", "": "one epoch"}
    rows = [
        Row(
            f"{RUNGS[name].title}, rho = {rho:g}",
            tuple(Cell(rung(name, rho, budget), "val_ppl") for budget in budgets),
        )
        for name in LONGER
        for rho in RUNGS[name].rhos
    ]
    title = "The ladder by budget: validation perplexity, each run annealed over its own budget"
    return Table("language-ladder-budget", title, tuple(budgets.values()), tuple(rows), "lower", collapse=True)


def _by_size() -> Table:
    rows = [Row("Frozen trunk", tuple(Cell(sized(size, "frozen"), "val_ppl") for size in SIZES))]
    rows += [
        Row(f"{RUNGS[name].title}, rho = {rho:g}", tuple(Cell(sized(size, name, rho), "val_ppl") for size in SIZES))
        for name in SIZED
        for rho in SIZED_RHOS
    ]
    columns = tuple(f"{title}, {steps:,} steps" for _, steps, title in SIZES.values())
    title = "The ladder for other trunks: validation perplexity"
    return Table("language-ladder-size", title, columns, tuple(rows), "lower", collapse=True)


def _by_eps() -> Table:
    rows = [
        Row(title, (*(Cell(epsilon(name, eps), "val_ppl") for eps in EPSILONS), _best_eps(name)))
        for name, (title, *_) in CONTROLS.items()
    ]
    return Table(
        "language-eps",
        "Adam's eps and clipping, 10% budget: validation perplexity",
        (*(f"eps {eps:g}" for eps in EPSILONS), "One epoch"),
        tuple(rows),
        "lower",
        "row",
        note="Joint clipping shrinks the head's gradient beside the trunk's noise; a large eps makes Adam's steps"
        " smaller where gradients are small. One epoch has the eps that is the best at the 10% budget, for learned"
        " feedback 1e-06.",
        collapse=True,
    )


def _best_eps(name: str) -> Cell | None:
    return Cell(BEST_EPS[name], "val_ppl", ranked=False) if name in BEST_EPS else None


def ladder_figures() -> tuple[Curves | Sweep, ...]:
    """Return the ladder as curves over training, with the 10% budget."""
    names = ("maps", "own-maps", "pull-identity", "pull-maps", "pull2-maps", "learned", "tuned")
    shown = ("frozen-10", "split_fg-k4-rho0.1-10", "direct-rho0.03-10", *(rung(name) for name in names))
    return (
        Curves(
            "language-ladder",
            "The ladder to backprop, 10% budget: perplexity over tuned backprop's at the same step",
            shown,
            "val_ppl",
            log_y=True,
            y_label="perplexity / backprop's",
            over=rung("tuned"),
        ),
        _gap_by_budget(),
    )


def _gap_by_budget() -> Sweep:
    names = tuple(name for name in LONGER if name != "tuned")
    lines = tuple(tuple(rung(name, budget=budget) for budget in BUDGETS) for name in names)
    backprop = tuple(rung("tuned", budget=budget) for budget in BUDGETS)
    return Sweep(
        "language-ladder-budget",
        "The gap to backprop by budget, each run annealed over its own",
        tuple(name for line in lines for name in line),
        "steps",
        ("val_ppl",),
        "perplexity / backprop's",
        x_label="training steps",
        labels=tuple(f"{RUNGS[name].title}, rho = {RUNGS[name].rhos[0]:g}" for name in names),
        lines=lines,
        over=backprop,
        most=3.0,
    )
