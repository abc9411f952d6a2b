"""Values of the recorded runs on tables, for the claims of README and notes."""

from __future__ import annotations

from collections.abc import Callable

from docs_records import Value, by_seed, paper, recorded, reports

from splitfg_lab.experiments.tabular._sets import DATA


def behind(metric: str) -> Value:
    """How far learned feedback is behind backprop on tables, at most."""

    def gap() -> float:
        sets = [d for d in DATA if d.metric == metric]
        pairs = [[recorded("tabular", f"{d.name}-{m}", metric) for m in ("backprop", "learned_layers")] for d in sets]
        return max(b - a if metric == "accuracy" else a - b for b, a in pairs)

    return gap


SELDOM = ("adult", "otto", "california", "house_16h", "diamond")
"""The sets on which maps were also measured at every eighth step only."""


def table_mean(data: str, method: str) -> Value:
    metric = next(d.metric for d in DATA if d.name == data)
    return lambda: recorded("tabular", f"{data}-{method}", metric)


def covertype_leads() -> list[float]:
    """By how many points ours is better than the paper's, to the digits of both."""
    methods = ("backprop", "pure_fg", "es", "split_fg")
    presets = [f"covertype-{m}" for m in methods]
    return sorted(
        round(recorded("tabular", p, "accuracy"), 1) - next(iter(paper("tabular", p, "accuracy"))) for p in presets
    )


def diamond_folds() -> list[float]:
    return sorted(by_seed("tabular", "diamond-backprop", "rmse"))


def diamond_other_seeds() -> list[float]:
    found = [r for r in reports("tabular") if r.preset == "diamond-backprop" and r.config["training_seed"] != 0]
    assert len(found) == 4
    return sorted(r.metrics["rmse"] for r in found)


def gap_closed() -> list[float]:
    """How much of the distance from Split-FG to backprop activity tangents close, in %, by set."""

    def of(method: str, data: str, metric: str) -> float:
        return recorded("tabular", f"{data}-{method}", metric)

    distances = [
        (of("split_fg", d.name, d.metric), of("activity_fg", d.name, d.metric), of("backprop", d.name, d.metric))
        for d in DATA
    ]
    return sorted(100 * (activity - split) / (backprop - split) for split, activity, backprop in distances)


def memory_runs(*, backprop_first: bool) -> list[dict[str, float]]:
    """Backprop was measured first where no ``*_beyond_mib`` was recorded."""
    runs = [r.metrics for r in reports("tabular_memory")]
    return [m for m in runs if ("split_fg_beyond_mib" not in m) == backprop_first]


def memory(metric: str, which: Callable[[list[float]], float]) -> Value:
    return lambda: which([m[metric] for m in memory_runs(backprop_first=False)])


def saved(which: Callable[[list[float]], float]) -> Value:
    return lambda: which([m["backprop_mib"] - m["split_fg_mib"] for m in memory_runs(backprop_first=False)])


def above(which: Callable[[list[float]], float]) -> Value:
    return lambda: which([-m["memsave_percent"] for m in memory_runs(backprop_first=True)])


def future_gain(data: str, metric: str) -> Value:
    def value() -> float:
        plain = recorded("tabular_future", f"{data}-gaussian", metric)
        return abs(recorded("tabular_future", f"{data}-nonlinear_head", metric) - plain)

    return value


STEP_METHODS = ("split_fg", "activity_fg", "learned_feedback")


STEP_TABLES = {"otto": "accuracy", "california": "rmse", "house_16h": "rmse", "diamond": "rmse"}


def step_scale(data: str, method: str, how: str) -> float:
    """Result of the line search (``adaptive``), or the ``grid``'s best."""
    metric = STEP_TABLES[data]
    if how != "grid":
        return recorded("tabular_step", f"{data}-{method}-{how}", metric)
    return (max if metric == "accuracy" else min)(grid_scales(data, method).values())


def grid_scales(data: str, method: str) -> dict[str, float]:
    names = ("0.01", "0.03", "0.1", "0.3", "1")
    return {r: recorded("tabular_step", f"{data}-{method}-rho{r}", STEP_TABLES[data]) for r in names}


def step_result(data: str, method: str, *hows: str) -> tuple[Value, ...]:
    return tuple(lambda how=how: step_scale(data, method, how) for how in hows)  # type: ignore[misc]


def search_gains() -> list[float]:
    """Gain of the line search over the grid's best in every row, in percent of the latter."""
    gains = []
    for data, metric in STEP_TABLES.items():
        sign = 1 if metric == "accuracy" else -1
        for method in STEP_METHODS:
            best = step_scale(data, method, "grid")
            gains.append(100 * sign * (step_scale(data, method, "adaptive") - best) / best)
    return gains


def searches_at_least_as_good() -> float:
    return sum(gain >= 0 for gain in search_gains())


def search_behind(rank: int) -> Value:
    """How far the line search is behind the grid's best, in percent, in the worst row (0), the next (1), and so on."""
    return lambda: -sorted(search_gains())[rank]


def best_at_one() -> float:
    pairs = [(d, m) for d in STEP_TABLES for m in STEP_METHODS]
    return sum(grid_scales(d, m)["1"] == step_scale(d, m, "grid") for d, m in pairs)


def holm_p() -> list[float]:
    """P of activity tangents against Split-FG, by set, corrected for the eight tests by Holm's method."""
    from scipy.stats import ttest_rel

    raw = []
    for d in DATA:
        pair = [by_seed("tabular", f"{d.name}-{m}", d.metric) for m in ("activity_fg", "split_fg")]
        raw.append(float(ttest_rel(*pair).pvalue))
    order = sorted(range(len(raw)), key=raw.__getitem__)
    corrected, worst = [0.0] * len(raw), 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, (len(raw) - rank) * raw[i]))
        corrected[i] = worst
    return corrected


def rows_of(data: str) -> Value:
    return lambda: recorded("tabular", f"{data}-backprop", "rows")


def gains(methods: tuple[str, ...], sets: tuple[str, ...]) -> list[float]:
    """By how much methods are better than in the paper, in points of accuracy or in RMSE, smallest first."""
    rows = [row for row in DATA if row.name in sets]
    sign = {"higher": 1, "lower": -1}
    return sorted(
        sign[row.better] * (recorded("tabular", f"{row.name}-{method}", row.metric) - row.paper[method].mean)
        for row in rows
        for method in methods
        if method in row.paper
    )


def diamond_rmse(training_seeds: tuple[int, ...]) -> list[float]:
    """Of backprop on the second fold, smallest first."""
    runs = [r for r in reports("tabular") if r.preset == "diamond-backprop" and r.seed == 1]
    return sorted(r.metrics["rmse"] for r in runs if r.config["training_seed"] in training_seeds)


CLASSES = tuple(row.name for row in DATA if row.metric == "accuracy")


REGRESSION = tuple(row.name for row in DATA if row.metric != "accuracy")


LOCAL = ("forward_forward", "predictive_coding", "hopfield")


TANGENT = ("backprop", "pure_fg", "es", "split_fg")
