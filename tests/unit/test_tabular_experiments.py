"""The tabular experiments on small made-up tables: every method runs, a seed is a fold, numbers are in place."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from splitfg import SplitError
from splitfg.recipes import Adam, HopfieldMethod
from splitfg.recipes.tables import Network, PlainNetwork, TableRecipe, TableShape, table_methods
from splitfg.sklearn import SplitFGClassifier
from splitfg_lab.experiments.tabular import EXPERIMENT
from splitfg_lab.experiments.tabular._presets import ACTIVITY, FEEDBACK, PLAIN, PLAIN_FEEDBACK, REFERENCES, SELDOM
from splitfg_lab.experiments.tabular._references import BoostingReference, Budget, LinearReference, MLPReference
from splitfg_lab.experiments.tabular._sets import DATA, METHOD_TITLES
from splitfg_lab.experiments.tabular.run import load_fold, run
from splitfg_lab.experiments.tabular_future import EXPERIMENT as FUTURE
from splitfg_lab.experiments.tabular_memory import EXPERIMENT as MEMORY
from splitfg_lab.experiments.tabular_memory.run import run as run_memory
from splitfg_lab.runs import RunError, RunFolder, execute

PAPER = Path(__file__).parents[2].parent / "shared" / "paper" / "split-fg.tex"
COLUMNS = ["longitude", "latitude", "housingMedianAge", "totalRooms", "totalBedrooms", "population", "households"]
CATEGORIES = ["workclass", "education", "marital-status", "occupation", "relationship", "race", "sex", "native-country"]


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A data folder with made-up tables that have the columns of two real ones."""
    rng = np.random.default_rng(0)
    rows = 200
    california = pd.DataFrame(rng.normal(5.0, 2.0, (rows, 8)), columns=[*COLUMNS, "medianIncome"])
    california["medianHouseValue"] = 1e5 * california["medianIncome"] + 2e5
    adult = pd.DataFrame(rng.normal(size=(rows, 6)), columns=[f"n{i}" for i in range(6)])
    for column in CATEGORIES:
        adult[column] = rng.choice(["a", "b", "c"], rows)
    adult["income"] = np.where(adult["n0"] > 0, ">50K", "<=50K")
    folder = tmp_path / "data"
    (folder / "tabular").mkdir(parents=True)
    california.to_parquet(folder / "tabular" / "california.parquet")
    adult.to_parquet(folder / "tabular" / "adult.parquet")
    monkeypatch.setenv("SPLITFG_DATA", str(folder))
    return {"california": california, "adult": adult}


def measure(tmp_path, experiment, preset, *, seed=0, runner=run, **changes):
    config = replace(experiment.preset(preset).config, **changes)
    folder = RunFolder.of(tmp_path / "runs", experiment.name, preset, seed)
    folder.prepare(experiment.name, preset, seed, config)
    return execute(folder, runner, config, device="cpu", emit=lambda event: None)


TINY = {"steps": 3, "network": Network(width=8, members=2)}


@pytest.mark.parametrize("method", METHOD_TITLES)
def test_every_method_runs_on_classes(data, tmp_path, method):
    report = measure(tmp_path, EXPERIMENT, f"adult-{method}", **TINY)
    assert report.status == "done"
    assert 0 < report.metrics["accuracy"] <= 100
    assert report.metrics["rows"] == 200
    assert report.trunk_backward == (1 if method == "backprop" else 0)


@pytest.mark.parametrize("method", [m for m in METHOD_TITLES if m != "forward_forward"])
def test_every_other_method_runs_on_values(data, tmp_path, method):
    report = measure(tmp_path, EXPERIMENT, f"california-{method}", **TINY)
    assert 0 < report.metrics["rmse"] < 5


def test_training_reaches_what_can_be_reached(data, tmp_path):
    report = measure(tmp_path, EXPERIMENT, "california-backprop", steps=200, network=Network(width=32, members=2))
    assert report.metrics["rmse"] < 0.3  # the made-up target is linear in one feature; its deviation is 1
    assert report.metrics["epochs"] == pytest.approx(200 * 160 / 160)


def test_the_readout_records_its_settings(data, tmp_path):
    report = measure(
        tmp_path, EXPERIMENT, "adult-hopfield", method=HopfieldMethod(capacity=100), network=TINY["network"]
    )
    assert report.metrics["stored"] == 100
    assert report.metrics["beta"] > 0
    assert {"standardise", "unit"} <= report.metrics.keys()
    assert report.steps == 1  # 160 training rows are one batch, stored once


def test_a_seed_is_a_fold_and_nothing_else(data, tmp_path):
    results = {
        (seed, place): measure(tmp_path / place, EXPERIMENT, "california-backprop", seed=seed, **TINY).metrics["rmse"]
        for seed in (0, 1)
        for place in ("first", "again")
    }
    assert results[0, "first"] == results[0, "again"] != results[1, "first"]


def test_a_fold_is_scaled_by_its_training_rows(data):
    fold = load_fold("california", 2, 5, torch.device("cpu"))
    assert fold.x.shape == (160, 8)
    assert fold.test_x.shape == (40, 8)
    torch.testing.assert_close(fold.x.mean(0), torch.zeros(8), atol=1e-6, rtol=0)
    torch.testing.assert_close(fold.x.std(0, correction=0), torch.ones(8))
    torch.testing.assert_close(fold.y.std(0, correction=0), torch.ones(1))
    # the target is linear in the last feature, so both are the same once scaled by the same rows
    torch.testing.assert_close(fold.test_y, fold.test_x[:, 7:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("preset", [p.name for p in FUTURE.presets if p.name.startswith(("adult", "california"))])
def test_future_rows_run(data, tmp_path, preset):
    head = FUTURE.preset(preset).config.network.head
    report = measure(tmp_path, FUTURE, preset, steps=3, network=Network(width=8, members=2, head=head))
    assert report.status == "done"
    assert report.trunk_backward == (1 if "backprop" in preset else 0)


def test_a_probed_head_trains_as_the_closed_form_does(data, tmp_path):
    width = {"width": 8, "members": 2}
    exact = measure(tmp_path, FUTURE, "california-gaussian", steps=20, network=Network(**width))
    head = FUTURE.preset("california-probed_head").config.network.head
    probed = measure(tmp_path, FUTURE, "california-probed_head", steps=20, network=Network(**width, head=head))
    assert probed.metrics["rmse"] == pytest.approx(exact.metrics["rmse"], rel=1e-2)


def test_gpu_memory_is_not_measured_on_a_cpu(data, tmp_path):
    with pytest.raises(RunError, match="--device cuda"):
        measure(tmp_path, MEMORY, "california", runner=run_memory, steps=2)


def test_all_pairs_but_forward_forward_on_values_are_there():
    names = {p.name for p in EXPERIMENT.presets}
    assert len(names) == 8 * 7 - 4 + 8 * (
        len(ACTIVITY) + len(FEEDBACK) + len(SELDOM) + len(PLAIN) + len(PLAIN_FEEDBACK) + len(REFERENCES)
    )
    assert {p.seeds for p in EXPERIMENT.presets} == {(0, 1, 2, 3, 4)}
    cells = [cell for table in EXPERIMENT.tables[:2] for row in table.rows for cell in row.cells]
    assert sum(cell is None for cell in cells) == 4
    beyond = {
        f"{row.name}-{name}"
        for row in DATA
        for name in (*ACTIVITY, *FEEDBACK, *SELDOM, *PLAIN, *PLAIN_FEEDBACK, *REFERENCES)
    }
    assert {cell.preset for cell in cells if cell is not None} == names - beyond


def test_split_fg_is_tested_against_every_other_method_on_every_set():
    tests = {
        (cell.preset, cell.against, cell.metric, cell.better)
        for row in EXPERIMENT.tables[2].rows
        for cell in row.cells
        if cell is not None
    }
    expected = {
        (f"{row.name}-split_fg", f"{row.name}-{m}", row.metric, "higher" if row.metric == "accuracy" else "lower")
        for row in DATA
        for m in row.paper
        if m != "split_fg"
    }
    assert tests == expected
    assert len(tests) == 44


@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize(
    ("dataset", "metric", "at_least", "at_most"), [("adult", "accuracy", 90, 100), ("california", "rmse", 0, 0.5)]
)
def test_references_learn_what_is_there_to_learn(data, tmp_path, dataset, metric, at_least, at_most, reference):
    """Both targets are functions of one feature; guessing has 50% and an RMSE of 1."""
    report = measure(tmp_path, EXPERIMENT, f"{dataset}-{reference}")
    assert report.status == "done"
    assert at_least <= report.metrics[metric] <= at_most
    assert report.metrics["rows"] == 200
    assert report.jvps_per_step == 0
    assert report.trunk_backward == (1 if reference == "sklearn_mlp" else 0)


def test_references_read_the_same_rows_as_the_methods(data, tmp_path):
    """Ridge regression has a closed form, solved here on the encoded rows of the fold."""
    fold = load_fold("california", 1, 5, torch.device("cpu"))
    x, y = fold.x.double(), fold.y.double()
    centred = x - x.mean(0)
    weights = torch.linalg.solve(centred.T @ centred + torch.eye(8, dtype=x.dtype), centred.T @ (y - y.mean()))
    predicted = (fold.test_x.double() - x.mean(0)) @ weights + y.mean()
    expected = (predicted - fold.test_y).square().mean().sqrt().item()
    report = measure(tmp_path, EXPERIMENT, "california-linear", seed=1)
    assert report.metrics["rmse"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("reference", "most"), [("linear", 3), ("boosting", 3), ("sklearn_mlp", 3)])
def test_steps_bound_a_reference(data, tmp_path, reference, most):
    """160 training rows are one batch of scikit-learn's MLP, so that its epochs are its steps."""
    assert measure(tmp_path, EXPERIMENT, f"adult-{reference}", steps=most).steps == most


def test_the_mlp_takes_whole_epochs():
    method, shape = MLPReference(), TableShape(4, 2)
    budget = Budget(rows=1_001, steps=13)  # six batches of at most 200 rows an epoch
    model = method.model(shape, budget, seed=0)
    assert model.max_iter == 3
    model.n_iter_ = 3
    assert method.steps_of(model, budget) == 18


@pytest.mark.parametrize("method", [LinearReference(), MLPReference(), BoostingReference()])
def test_a_reference_cannot_train_step_by_step(method):
    recipe = TableRecipe(method, Network(), Adam())
    with pytest.raises(SplitError, match=f"{type(method).__name__} cannot train step by step"):
        recipe.build(TableShape(4, 2), torch.Generator())
    with pytest.raises(SplitError, match="cannot train step by step"):
        SplitFGClassifier(method).fit([[0.0], [1.0]], [0, 1])
    assert method not in table_methods().values()


@pytest.mark.parametrize("preset", PLAIN)
def test_plain_networks_train_an_mlp(data, tmp_path, preset):
    config = EXPERIMENT.preset(f"adult-{preset}").config
    assert config == replace(EXPERIMENT.preset(f"adult-{preset[4:]}").config, network=PlainNetwork())
    report = measure(tmp_path, EXPERIMENT, f"adult-{preset}", steps=3, network=PlainNetwork(width=8))
    assert report.trunk_backward == (1 if preset == "mlp_backprop" else 0)


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's source is not beside the repository")
def test_the_numbers_beside_ours_are_the_papers():
    source = PAPER.read_text(encoding="utf-8")
    table = source[source.index(r"\label{tab:tabular-main}") :]
    lines = [line for line in table[: table.index(r"\end{table}")].splitlines() if r"\pm" in line]
    for row, line in zip(DATA, lines, strict=True):
        printed = [(float(a), float(b)) for a, b in re.findall(r"(\d+\.\d+)\}?_\{\\pm(\d+\.\d+)\}", line)]
        assert [(row.paper[m].mean, row.paper[m].std) for m in METHOD_TITLES if m in row.paper] == printed
