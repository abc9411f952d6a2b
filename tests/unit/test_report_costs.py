"""The report's table of costs, and where its numbers come from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from report_runs import groups, run
from report_samples import Config, config_json

from splitfg_lab.experiments.spec import Cell, Row, Table
from splitfg_lab.report._costs import CostRow, CostTable, view_costs
from splitfg_lab.report._groups import PresetRuns
from splitfg_lab.report._provenance import provenance
from splitfg_lab.report._table_view import view_table


class TestProvenance:
    def test_everything_a_number_rests_on(self):
        runs = [
            run("a", 1.0, 0, wall_s=30.0),
            run("a", 1.0, 1, wall_s=30.0, git_dirty=True, side_by_side=10),
            run("a", 1.0, 2, wall_s=30.0, device="cpu: EPYC", versions={"torch": "2.11.0"}),
            run("a", 1.0, 7, wall_s=31.0, git=None, finished="2025-03-04T00:00:00+00:00", source="results/e.json"),
        ]
        found = provenance(runs)
        assert found is not None
        facts = dict(found.facts)
        assert facts["Runs"] == "4 runs, 2 min 1 s in all"
        assert facts["Seeds"] == "0-2, 7"
        assert facts["Device"] == "cuda: NVIDIA H200 (×3), cpu: EPYC (×1)"
        assert facts["Machine"] == "one run at a time (×3), shared by 10 runs (×1)"
        assert facts["Dates"] == "2025-03-01 to 2025-03-04"
        assert facts["Versions"] == "python 3.12.3, torch 2.11.0 and 2.13.0, numpy 2.5.0"
        assert facts["Revision"] == "a1b2c3d4e5 (×2), a1b2c3d4e5 with local changes (×1), unknown (×1)"
        assert facts["Read from"] == "run folders (×3), results/e.json (×1)"

    def test_no_runs_no_claims(self):
        assert provenance([]) is None


def _costs(runs: dict[str, PresetRuns]) -> dict[str, str]:
    """The first row of the costs by column, and the note."""
    table = view_costs(runs)
    assert table is not None
    return dict(zip(table.columns, (c.text for c in table.rows[0].cells), strict=True)) | {"note": table.note}


class TestCosts:
    def test_devices_and_overrides_are_never_averaged_together(self):
        changed = config_json(Config(), K=4)
        table = view_costs(
            groups(
                run("a", 1.0, 0, step_ms=2.0),
                run("a", 1.0, 1, step_ms=4.0),
                run("a", 1.0, 2, step_ms=90.0, device="cpu: EPYC", memory_kind="resident set"),
                run("a", 1.0, 0, step_ms=7.0, config=changed),
            )
        )
        assert table is not None
        assert [row.cells[0].value for row in table.rows] == [3.0, 90.0, 7.0]
        assert [row.changes for row in table.rows] == [(), (), ("K=4 (preset: 8)",)]
        assert table.columns[-1] == "Where"
        assert [row.cells[-1].text for row in table.rows[:2]] == ["cuda: NVIDIA H200", "cpu: EPYC"]
        assert "cuda: NVIDIA H200, memory: GPU memory allocated; cpu: EPYC, memory: resident set." in table.note

    def test_kinds_of_memory_of_one_device_have_names(self):
        table = view_costs(groups(run("a", 1.0, 0), run("a", 1.0, 1, memory_kind="reserved")))
        assert table is not None
        assert [row.cells[-1].text.partition(", ")[2] for row in table.rows] == [
            "memory: GPU memory allocated",
            "memory: reserved",
        ]

    def test_long_tables_of_costs_are_folded(self):
        short, long = CostTable((), (), ""), CostTable((), (CostRow("a", (), ()),) * 13, "")
        assert (short.is_long, long.is_long) == (False, True)
        assert long.summary.startswith("13 rows: ")

    def test_what_all_rows_share_is_said_once(self):
        table = view_costs(groups(run("a", 1.0), run("b", 1.0)))
        assert table is not None
        assert "Where" not in table.columns
        assert table.note.startswith("All on cuda: NVIDIA H200, memory: GPU memory allocated. Times are")

    def test_what_was_not_measured_is_a_dash_and_a_zero_is_a_zero(self):
        texts = _costs(groups(run("a", 1.0, step_ms=None, jvps_per_step=0.0), run("b", 1.0)))
        assert (texts["Step (ms)"], texts["JVPs per step"]) == ("–", "0")
        assert texts["note"].endswith("–: not measured.")

    def test_a_column_that_no_run_measured_is_left_out(self):
        texts = _costs(groups(run("a", 1.0, step_ms=None)))
        assert "Step (ms)" not in texts
        assert "not measured" not in texts["note"]

    @pytest.mark.parametrize("count", [None, 2, 10])
    def test_times_of_runs_that_did_not_have_their_machine_alone_are_left_out(self, count):
        shared, alone = run("a", 1.0, side_by_side=count), run("b", 1.0)
        texts = _costs(groups(shared))
        assert not {"Step (ms)", "Wall time"} & texts.keys()
        assert {"Peak memory (MiB)", "JVPs per step", "Steps"} <= texts.keys()
        assert "shared their machine" in texts["note"]
        assert _costs(groups(shared, alone))["Step (ms)"] == "–"
        table = Table("t", "T", ("ms",), (Row("r", (Cell("a", "step_ms"), Cell("b", "step_ms"))),))
        first, second = view_table(table, groups(shared, alone)).rows[0].cells
        assert (first.text, first.value) == ("not timed", None)
        assert second.value == 4.25

    def test_no_memory_and_no_steps_are_not_measured_and_never_zero(self):
        runs = groups(run("a", 1.0, peak_memory_mib=0.0, steps=0), run("b", 1.0))
        assert _costs(runs)["Peak memory (MiB)"] == "–"
        assert _costs(runs)["Steps"] == "–"
        table = Table("t", "T", ("MiB",), (Row("r", (Cell("a", "peak_memory_mib"),)),))
        assert view_table(table, runs).rows[0].cells[0].state == "missing"

    def test_averages_over_several_methods_are_left_out(self):
        several = {"ms/backprop": 1.0, "ms/split_fg": 9.0, "ratio/split_fg": 9.0}
        found = _costs(groups(run("a", None, metrics=several, wall_s=30.0, steps=200), run("b", 1.0)))
        averages = ("Step (ms)", "Peak memory (MiB)", "JVPs per step", "Reverse passes through the trunk")
        assert {found[column] for column in averages} == {"–"}
        assert (found["Steps"], found["Wall time"]) == ("200", "30 s")
        assert "is in the tables" in found["note"]
        assert _costs(groups(run("a", None, metrics=several, steps=0), run("b", 1.0)))["Steps"] == "–"

    def test_one_method_with_several_metrics_is_still_one(self):
        found = _costs(groups(run("a", None, metrics={"ms/split_fg": 9.0, "mib/split_fg": 9.0, "accuracy": 1.0})))
        assert found["Step (ms)"] == "4.25"
        assert "is in the tables" not in found["note"]

    def test_nothing_run_no_table(self):
        assert view_costs(groups()) is None
