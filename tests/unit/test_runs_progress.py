"""What people, logs and machines see of a run, and what TensorBoard is told."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from splitfg_lab.runs import progress
from splitfg_lab.runs.bars import BarView, choose_view, fit_items, shorten
from splitfg_lab.runs.progress import Guarded, JsonView, PlainView, SharedFailures, format_event
from splitfg_lab.runs.tensorboard import TensorBoardLog

RUN = "tiny/adam/seed0"


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "run": RUN, **fields}


def progressed(step: int) -> dict[str, Any]:
    return event("progress", step=step, steps=1000, loss=0.51234, metrics={"error": 0.25})


STORY = [
    event("started", step=0, device="cpu"),
    progressed(100),
    event("metrics", step=100, wall_s=1.0, loss=0.5),
    event("note", text="something worth knowing"),
    event("finished", status="done", metrics={"error": 0.125}, message=""),
]


def test_the_view_fits_the_place() -> None:
    terminal, file = Console(file=io.StringIO(), force_terminal=True), Console(file=io.StringIO())
    bars, lines = (choose_view(console, total=1, as_json=False) for console in (terminal, file))
    assert isinstance(bars, SharedFailures)
    assert isinstance(bars._view, Guarded)
    assert isinstance(bars._view._view, BarView)
    assert isinstance(lines, SharedFailures)
    assert isinstance(lines._view, PlainView)
    assert isinstance(choose_view(terminal, total=1, as_json=True), JsonView)


def test_json_lines_are_the_events() -> None:
    out = io.StringIO()
    with JsonView(out) as view:
        for e in STORY:
            view.show(e)
    assert [json.loads(line) for line in out.getvalue().splitlines()] == STORY


def test_plain_lines_are_few_and_tell_speed_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 20.0, 21.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    with PlainView(out) as view:
        view.show(STORY[0])
        for step in (100, 110, 500, 510):
            view.show(progressed(step))
        view.show(STORY[-1])
    assert out.getvalue().splitlines() == [
        f"{RUN}  started on cpu",
        # 400 steps in 20 s, 500 to go
        f"{RUN}  step 500/1,000  20 steps/s  0:00:25 left  loss 0.5123  error 0.25",
        f"{RUN}  done  error 0.125",
    ]


@pytest.mark.parametrize("steps", [10**23, 10**400])
def test_steps_beyond_all_time_have_no_time_left(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    clock = iter([0.0, 20.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    view = PlainView(out)
    for step in (100, 500):
        view.show(progressed(step) | {"steps": steps})
    assert f"step 500/{steps:,}  20 steps/s  - left" in out.getvalue()


def test_runs_that_share_a_name_have_a_bar_each() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with BarView(console, total=2) as view:
        for e in STORY[:2]:
            for folder in ("here", "there"):
                view.show(e | {"folder": folder})
        for folder, left in (("here", 2), ("there", 1)):
            view.show(progressed(500) | {"folder": folder})
            view.show(STORY[-1] | {"folder": folder})
            assert len(view._bars.tasks) == left  # that of all together among them


def test_a_run_that_goes_on_says_from_where() -> None:
    assert format_event(event("started", step=1200, device="cpu")) == "resumes from step 1,200 on cpu"


def test_bars_show_steps_loss_and_metrics_and_leave_a_line() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with BarView(console, total=2) as view:
        for e in STORY[:2]:
            view.show(e)
        view._bars.refresh()
        drawn = console.file.getvalue()
        for e in STORY[2:]:
            view.show(e)
    for part in ("100/1,000", "loss 0.5123", "error 0.25", "2 runs"):
        assert part in drawn
    text = console.file.getvalue()
    assert "something worth knowing" in text
    assert "done  error 0.125" in text


def drawn_at(width: int, *events: dict[str, Any]) -> list[str]:
    """The lines of the bars after some events, without colours."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, legacy_windows=False)
    with BarView(console, total=1) as view:
        for e in events:
            view.show(e)
        return [line.rstrip() for line in _plain(console, view)]


def _plain(console: Console, view: BarView) -> list[str]:
    recorded = Console(file=io.StringIO(), width=console.width, color_system=None)
    recorded.print(view._bars.get_renderable())
    return recorded.file.getvalue().splitlines()


LONG = "language/split_fg-k4-rho0.03-torch-apart/seed0"


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_bar_keeps_steps_speed_time_left_and_the_end_of_the_name(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.progress import Task

    monkeypatch.setattr(Task, "speed", property(lambda task: 5.31))
    monkeypatch.setattr(Task, "time_remaining", property(lambda task: 43_210.0))
    metrics = {"val_nll": 5.123, "val_ppl": 167.8, "trunk_moved": 0.0123}
    e = {"event": "progress", "run": LONG, "step": 123_456, "steps": 232_588, "loss": 5.4321, "metrics": metrics}
    (line,) = drawn_at(width, {"event": "started", "run": LONG, "step": 0, "device": "cpu"}, e)
    assert len(line) <= width
    assert line.split()[0].endswith("/seed0")
    for part in ("━", "123,456/232,588", "5.31/s", "12:00:10"):
        assert part in line, line
    shown = line.partition("12:00:10")[2]
    items = ("loss 5.432", "val_nll 5.123", "val_ppl 167.8", "trunk_moved 0.0123")
    assert "  ".join(items).startswith(shown.strip()), "items are whole, in order"
    if width >= 80:
        assert "loss 5.432" in shown


def test_an_evaluation_has_its_own_bar() -> None:
    events = [STORY[0], progressed(100), event("phase", name="validation", done=0, total=60)]
    run, phase = drawn_at(80, *events, event("phase", name="validation", done=12, total=60))
    assert "100/1,000" in run
    assert phase.split()[0] == "validation"
    assert "12/60" in phase
    assert len(drawn_at(80, *events, event("phase", name="validation", done=60, total=60))) == 1
    assert len(drawn_at(80, *events, progressed(101))) == 1


def test_plain_lines_show_a_long_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 20.0, 21.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    view = PlainView(out)
    for done in (0, 10, 40, 60):
        view.show(event("phase", name="validation", done=done, total=60))
    assert out.getvalue() == f"{RUN}  validation 40/60  0:00:10 left\n"


def test_a_failure_that_runs_share_is_shown_once() -> None:
    out = io.StringIO()
    with SharedFailures(PlainView(out)) as view:
        for run, message in (("a", "no data"), ("b", "no data"), ("c", "another reason"), ("d", "no data")):
            view.show({"event": "failed", "run": run, "message": message})
    assert out.getvalue().splitlines() == ["a  no data", "c  another reason"]


def test_names_lose_their_beginning_and_items_are_never_cut() -> None:
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("abcdefg", 6) == "…cdefg"
    assert fit_items("loss 1  error 2", 15) == "loss 1  error 2"
    assert fit_items("loss 1  error 2", 14) == "loss 1"
    assert fit_items("loss 1", 3) == ""


def test_messages_are_printed_as_they_are() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    with BarView(console, total=1) as view:
        view.show(event("failed", message="ValueError: expected [bold] and [/nothing]"))
    assert "expected [bold] and [/nothing]" in console.file.getvalue()


def test_steps_of_earlier_sessions_do_not_count_as_speed() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with BarView(console, total=1) as view:
        view.show(event("started", step=900, device="cpu"))
        view.show(progressed(901))
        (task,) = view._bars.tasks
        assert task.completed == 901
        assert not task.speed


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_the_metrics_and_forgets_what_is_written_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, steps in ((0, (1, 2, 3)), (1, (2, 3, 4))):
        log = TensorBoardLog(tmp_path)
        log(event("started", step=start, device="cpu"))
        for step in steps:
            log(event("metrics", step=step, wall_s=0.0, loss=start + step / 10))
        log(event("finished", status="done", metrics={}, message=""))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    values = {e.step: pytest.approx(e.value) for e in events.Scalars("loss")}
    assert values == {1: 0.1, 2: 1.2, 3: 1.3, 4: 1.4}
