"""Predicted times: once for the steps, once for the evaluations, and only for long runs."""

from __future__ import annotations

import pytest

from splitfg_lab.runs.durations import format_duration
from splitfg_lab.runs.forecast import Forecast


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def forecast(steps: int, evaluations: int = 0) -> tuple[Forecast, Clock, list[str]]:
    clock, said = Clock(), []
    return Forecast(steps, lambda step: evaluations, said.append, clock), clock, said


def test_the_first_step_is_not_timed() -> None:
    told, clock, said = forecast(1001)
    clock.now = 100.0  # compiling
    told.step(1)
    for step in range(2, 30):
        clock.now += 0.5
        told.step(step)
    # the first time 3 s have passed is after step 7, with 994 steps of 0.5 s to go
    assert said == ["about 8 min to go (0.5 s per step)"]


def test_evaluations_are_named_and_timed_once_the_first_is_done() -> None:
    told, clock, said = forecast(1000, evaluations=39)
    told.step(1)
    clock.now = 4.0
    told.step(5)
    assert said == ["about 17 min to go, not counting 39 evaluations (1 s per step)"]
    told.evaluated(25, 360.0)
    told.evaluated(50, 360.0)
    assert said[1:] == ["an evaluation takes 6 min: the 39 to come add about 3 h 54 min"]


def test_time_spent_on_something_else_is_not_counted() -> None:
    told, clock, said = forecast(1000)
    told.step(1)
    clock.now = 500.0  # a checkpoint
    told.restart()
    told.step(2)
    clock.now = 505.0
    told.step(7)
    assert said == ["about 17 min to go (1 s per step)"]


def test_short_runs_are_not_announced() -> None:
    told, clock, said = forecast(10, evaluations=1)
    told.step(1)
    clock.now = 4.0
    told.step(5)
    told.evaluated(5, 10.0)
    assert said == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "0.012 s"),
        (45.4, "45 s"),
        (600, "10 min"),
        (3600, "1 h"),
        (12_000, "3 h 20 min"),
        (86_400, "1 day"),
        (5 * 86_400 + 7300, "5 days 2 h"),
        (float("inf"), "an unknown time"),
    ],
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
