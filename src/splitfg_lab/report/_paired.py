"""Paired t-tests between two presets over the seeds both have run, corrected for how many a table holds."""

from __future__ import annotations

import math
import statistics
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
        t: lead / (s / √n) with the sample deviation s of the differences; ``None`` where they do not vary or where
            there is one only.
        n: How many pairs there are.
    """

    lead: float
    t: float | None
    n: int

    @property
    def p(self) -> float | None:
        """Of |T| at least this large with n - 1 degrees of freedom, if there were no difference."""
        return None if self.t is None else two_sided_p(self.t, self.n - 1)


def paired_test(cell: Paired, groups: Mapping[str, PresetRuns]) -> PairedTest | None:
    """The test of a cell on the runs made as their presets say; ``None`` where no seed has two values."""
    ours, theirs = (metric_values(groups[name].runs, cell.metric) for name in (cell.preset, cell.against))
    sign = 1.0 if cell.better == "higher" else -1.0
    pairs = ((ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys()))
    leads = [sign * (a - b) for a, b in pairs if is_usable(a) and is_usable(b)]
    return _test(leads) if leads else None


def _test(leads: Sequence[float]) -> PairedTest:
    lead, n = statistics.fmean(leads), len(leads)
    deviation = statistics.stdev(leads) if n > 1 else 0.0
    return PairedTest(lead, lead * math.sqrt(n) / deviation if deviation > 0 else None, n)


def two_sided_p(t: float, freedom: int) -> float:
    """P(|T| ≥ |t|) for Student's T with a whole number ν of degrees of freedom.

    With θ = atan(|t| / √ν), P(|T| < |t|) is sin θ (1 + 1/2 cos²θ + (1·3)/(2·4) cos⁴θ + ...), up to the power ν - 2, for
    even ν, and 2/π (θ + sin θ (cos θ + 2/3 cos³θ + (2·4)/(3·5) cos⁵θ + ...)), up to ν - 2 too, for odd ν.
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    odd = freedom % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
    inside = math.sin(angle) * total
    return max(0.0, 1.0 - (2 / math.pi * (angle + inside) if odd else inside))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment: comparing these with α keeps the chance of any false positive below α.

    The i-th smallest of m becomes the largest of (m - j + 1) p_(j) over j ≤ i, at most 1.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, (len(p_values) - rank) * p_values[place])
        adjusted[place] = min(1.0, largest)
    return adjusted


def p_text(p: float) -> str:
    """``p = 0.012``, in two significant digits; ``p < 0.0001`` below that."""
    return f"p = {p:.2g}" if p >= _SMALLEST_P else f"p < {_SMALLEST_P:.4f}"
