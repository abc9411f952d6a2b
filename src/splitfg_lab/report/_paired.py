"""Paired t-tests between two presets over the seeds both have run, corrected for the number of tests in a table."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from splitfg_lab.experiments.spec import Paired
from splitfg_lab.report._groups import PresetRuns, metric_values
from splitfg_lab.report._numbers import is_usable

_SMALLEST_P = 1e-4


@dataclass(frozen=True)
class PairedTest:
    """A two-sided paired t-test.

    Attributes:
        lead: The mean difference, positive where the first preset is better.
        t: lead / (s / √n) with the sample deviation s of the differences; ``None`` if there is only one difference or
            they do not vary.
        p: P(|T| ≥ |t|) with n - 1 degrees of freedom if there is no difference; ``None`` where ``t`` is.
        n: The number of pairs.
    """

    lead: float
    t: float | None
    p: float | None
    n: int


def paired_test(cell: Paired, groups: Mapping[str, PresetRuns]) -> PairedTest | None:
    """Test a cell on the runs whose configs are their presets'; ``None`` if no seed has two values."""
    ours, theirs = (metric_values(groups[name].runs, cell.metric) for name in (cell.preset, cell.against))
    pairs = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    usable = [(a, b) if cell.better == "higher" else (b, a) for a, b in pairs if is_usable(a) and is_usable(b)]
    return _test(usable) if usable else None


def _test(pairs: Sequence[tuple[float, float]]) -> PairedTest:
    leads = [a - b for a, b in pairs]
    lead, n = statistics.fmean(leads), len(leads)
    if n < 2 or statistics.stdev(leads) == 0:
        return PairedTest(lead, None, None, n)
    # imported here: scipy and numpy take a while, and most tables have no test
    from scipy import stats

    with warnings.catch_warnings():  # of differences that hardly vary
        warnings.simplefilter("ignore", RuntimeWarning)
        found = stats.ttest_rel([a for a, _ in pairs], [b for _, b in pairs])
    return PairedTest(lead, float(found.statistic), float(found.pvalue), n)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's step-down adjustment: comparing it with α keeps the chance of any false positive below α.

    The i-th smallest of m becomes the largest of (m - j + 1) p_(j) over j ≤ i, at most 1.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, (len(p_values) - rank) * p_values[place])
        adjusted[place] = min(1.0, largest)
    return adjusted


def p_text(p: float) -> str:
    """Return ``p = 0.012``, in two significant digits, or ``p < 0.0001`` below that."""
    return f"p = {p:.2g}" if p >= _SMALLEST_P else f"p < {_SMALLEST_P:.4f}"
