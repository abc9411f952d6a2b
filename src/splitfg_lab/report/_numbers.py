"""Format numbers: means over seeds, the paper's value, and the difference between the two."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

from splitfg_lab.experiments.spec import Paper

MINUS = "\N{MINUS SIGN}"
_LARGEST = 1e100
_LONGEST = 1e12
_SHARES = frozenset({"accuracy", "share", "percent"})


@dataclass(frozen=True)
class Summary:
    """One metric over the runs of one preset.

    Attributes:
        values: The finite values, one per run that finished.
        diverged: How many runs ended without a finite value.
    """

    values: tuple[float, ...]
    diverged: int = 0

    @property
    def n(self) -> int:
        """The number of values behind the mean."""
        return len(self.values)

    @property
    def mean(self) -> float | None:
        """The mean; ``None`` without values."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        """The sample standard deviation (n - 1); ``None`` below two values."""
        return statistics.stdev(self.values) if self.n > 1 else None


def summarise(values: Iterable[float]) -> Summary:
    """Collect values; values that are not finite or are huge count as diverged."""
    values = tuple(values)
    usable = tuple(v for v in values if is_usable(v))
    return Summary(usable, len(values) - len(usable))


def is_usable(value: float) -> bool:
    """Return whether a value is finite and small enough to square and sum."""
    return abs(value) < _LARGEST


def number(value: float, decimals: int) -> str:
    """Return a number with thousands separated and a real minus sign: ``−1,234.5``; scientific beyond 1e12."""
    text = f"{value:,.{decimals}f}" if abs(value) < _LONGEST else f"{value:.3e}"
    return text.lstrip("-") if _is_zero(text) else text.replace("-", MINUS)


def plus_minus(mean: float, std: float | None, decimals: int) -> str:
    """Return ``61.9 ± 0.3``, or the mean alone without a standard deviation."""
    text = number(mean, decimals)
    return text if std is None else f"{text} ± {number(std, decimals)}"


def quoted(paper: Paper, decimals: int) -> str:
    """Return the paper's value with no more digits than it prints: 2.4 does not become 2.4000."""
    printed = max(_decimals(value) for value in (paper.mean, paper.std) if value is not None)
    return plus_minus(paper.mean, paper.std, min(decimals, printed))


def measured(summary: Summary, decimals: int) -> str:
    """Return ``61.9 ± 0.3 (5)``: mean, standard deviation and number of runs."""
    if summary.mean is None:
        raise ValueError("There is no value to print: ask for `summary.mean` first.")
    return f"{plus_minus(summary.mean, summary.std, decimals)} ({summary.n})"


def difference(ours: float, paper: Paper, decimals: int, *, relative: bool) -> str:
    """Return ours minus the paper's, absolute and, if ``relative`` and defined, relative: ``+12.3 (+3.2%)``.

    A percentage of a percentage misleads: see :func:`is_share`.
    """
    text = signed(ours - paper.mean, decimals)
    if not relative or paper.mean == 0:
        return text
    return f"{text} ({_percent((ours - paper.mean) / abs(paper.mean))})"


def is_share(metric: str) -> bool:
    """Return whether a metric is a fraction or a percentage: differences of these are in points.

    Accuracies are, and metrics with such a name: ``memsave_percent``, ``trunk_share``, ``saved/METHOD``.
    """
    kind = metric.partition("/")[0]
    return kind == "saved" or not _SHARES.isdisjoint(kind.split("_"))


def signed(value: float, decimals: int) -> str:
    """Return a number with a plus or minus sign; without a sign if it rounds to zero."""
    text = number(value, decimals)
    return text if text.startswith(MINUS) or _is_zero(text) else f"+{text}"


def significant(value: float, digits: int = 3) -> str:
    """Return a number in about ``digits`` significant digits; scientific below 1e-4 only."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4:
        return f"{value:.{digits - 1}e}".replace("-", MINUS)
    return number(value, max(0, digits - 1 - magnitude))


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: ``3 min 20 s``."""
    if seconds < 60:
        return f"{significant(seconds, 2)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def _decimals(value: float) -> int:
    if abs(value) >= _LONGEST:
        return 0
    exponent = Decimal(repr(value)).as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _percent(ratio: float) -> str:
    return f"{signed(100 * ratio, 0 if abs(ratio) >= 1 else 1)}%"


def _is_zero(text: str) -> bool:
    return not text.strip("-+,.0")
