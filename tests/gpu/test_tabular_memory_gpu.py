"""The memory table of tabular training, on a made-up table."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from splitfg_lab.experiments.tabular_memory import EXPERIMENT
from splitfg_lab.experiments.tabular_memory.run import run
from splitfg_lab.runs import RunFolder, execute

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

COLUMNS = ["longitude", "latitude", "housingMedianAge", "totalRooms", "totalBedrooms", "population", "households"]


@pytest.fixture
def metrics(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(1000, 9)), columns=[*COLUMNS, "medianIncome", "medianHouseValue"])
    (tmp_path / "data" / "tabular").mkdir(parents=True)
    table.to_parquet(tmp_path / "data" / "tabular" / "california.parquet")
    monkeypatch.setenv("SPLITFG_DATA", str(tmp_path / "data"))
    config = replace(EXPERIMENT.preset("california").config, steps=3)
    folder = RunFolder.of(tmp_path / "runs", EXPERIMENT.name, "california", 0)
    folder.prepare(EXPERIMENT.name, "california", 0, config)
    return execute(folder, run, config, device="cuda", emit=lambda event: None).metrics


def test_peaks_are_those_of_the_arrays_that_must_be_alive(metrics):
    # 256 rows, 8 members, 128 wide, float32: one array of activations is 1 MiB
    assert metrics["backprop_beyond_mib"] > 4  # two products, two scaled and shifted, kept for the way back
    assert metrics["checkpointed_beyond_mib"] <= metrics["backprop_beyond_mib"]
    # each of the seven tangents more that ride along has at least an activation of its own
    assert metrics["split_fg_at_once_beyond_mib"] > metrics["split_fg_beyond_mib"] + 7


def test_a_peak_holds_what_is_resident_and_leaves_nothing_of_split_fg_behind(metrics):
    for name in ("split_fg", "split_fg_at_once", "backprop", "checkpointed"):
        assert metrics[f"{name}_mib"] > metrics["resident_mib"] + metrics[f"{name}_beyond_mib"]
    assert metrics["split_fg_left_mib"] == metrics["split_fg_at_once_left_mib"] == 0
    assert metrics["epochs"] == pytest.approx(3 * 256 / 700)
