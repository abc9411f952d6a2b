"""The image experiments: the paper's networks, budgets and numbers; methods learn; captured steps are eager ones."""

from __future__ import annotations

import functools
import math
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from splitfg.errors import DataError
from splitfg.learners import CapturedLearner
from splitfg.recipes import Adam, AdamL2, AdamW, ForwardForwardMethod
from splitfg_lab.data import load_images
from splitfg_lab.data.augment import ChannelScale
from splitfg_lab.experiments._peaks import savings
from splitfg_lab.experiments.images import ABLATION, EXPERIMENT, FULL, SMOKE, PlainMLP, _report_tables as numbers
from splitfg_lab.experiments.images._build import (
    TrainingBatches,
    load_data,
    make_learner,
    make_split,
    precision,
)
from splitfg_lab.experiments.images._presets import CIFAR10, CIFAR100, METHOD_TITLES, SETTINGS, screened
from splitfg_lab.experiments.images.run import accuracy, run
from splitfg_lab.experiments.images_cost import EXPERIMENT as COST, NETWORKS as COST_NETWORKS
from splitfg_lab.experiments.images_cost.run import run as run_cost
from splitfg_lab.experiments.images_memory import (
    EXPERIMENT as MEMORY,
    PAPER as MEMORY_PAPER,
    REFERENCE_DIFFERENCE,
    VARIANTS,
)
from splitfg_lab.experiments.images_memory.run import make_step, run as run_memory
from splitfg_lab.experiments.spec import Cell, Paired
from splitfg_lab.runs import RunError, RunFolder, execute, override, to_json

CPU = torch.device("cpu")
BESIDE = Path(__file__).parents[2].parent / "shared"
SOURCE = BESIDE / "paper" / "split-fg.tex"
DATA = Path(os.environ.get("SPLITFG_DATA", BESIDE / "data"))


def tiny(preset, **changes):
    return replace(override(EXPERIMENT.preset(preset).config, SMOKE), **changes)


def measure(tmp_path, preset, *, seed=0, **changes):
    config = tiny(preset, **changes)
    folder = RunFolder.of(tmp_path, EXPERIMENT.name, preset, seed)
    folder.prepare(EXPERIMENT.name, preset, seed, config)
    return execute(folder, run, config, device="cpu", emit=lambda event: None)


def sizes(network, classes):
    generator = torch.Generator().manual_seed(0)
    parts = network.trunk((3, 32, 32), generator), network.head((3, 32, 32), classes, generator)
    return tuple(sum(p.numel() for p in part.parameters()) for part in parts)


class TestNetworks:
    def test_light_trunks_and_two_layer_heads(self):
        assert sizes(CIFAR10.light, 10) == (5_136, 16_384 * 64 + 64 + 64 * 10 + 10)
        assert sizes(CIFAR100.light, 100) == (75_840, 65_536 * 128 + 128 + 128 * 100 + 100)

    def test_the_papers_shares(self):
        trunk, head = sizes(CIFAR10.light, 10)
        assert round((trunk + head) / 1e6, 2) == 1.05
        assert head / (trunk + head) == pytest.approx(0.995, abs=5e-4)
        trunk, head = sizes(CIFAR100.light, 100)
        assert trunk < 0.01 * head

    def test_single_head(self):
        single = EXPERIMENT.preset("flat-split_fg-single").config.network
        assert sizes(single, 10) == (5_136, 16_384 * 10 + 10)

    def test_backbones(self):
        assert sum(sizes(CIFAR10.backbone, 10)) == 272_474
        assert sizes(CIFAR10.backbone, 10)[0] == 271_824  # what the ablation's table says of the naive split
        assert round(sum(sizes(CIFAR100.backbone, 100)) / 1e6, 1) == 11.2

    def test_the_mlp_of_the_local_rules(self):
        trunk, _ = sizes(PlainMLP(), 10)
        assert trunk == 3072 * 2000 + 2000 + 2000 * 2000 + 2000
        assert round(trunk / 1e6) == 10


class TestPresets:
    def test_budgets_are_the_papers(self):
        assert FULL == 60 * 50_000 // 128
        assert round(ABLATION * 128 / 50_000, 1) == 15.4
        steps = {p.name: p.config.steps for p in EXPERIMENT.presets}
        assert {n: steps[f"cifar100-{n}"] for n in ("pure_fg", "es", "forward_forward", "predictive_coding")} == {
            "pure_fg": 2000,
            "es": 400,
            "forward_forward": 3000,
            "predictive_coding": 3000,
        }
        trained = {n for n in METHOD_TITLES if n != "hopfield"}
        assert {steps[f"cifar10-{n}"] for n in trained} == {FULL}
        assert steps["cifar100-backprop"] == steps["cifar100-split_fg"] == FULL

    def test_settings_are_the_papers(self):
        for preset in EXPERIMENT.presets:
            config = preset.config
            norm = 1e6 if preset.name.endswith("-unclipped") else 1.0
            assert (config.batch, config.max_norm, config.optimizer.lr) == (128, norm, 1e-3)
            assert config.warmup == (300 if config.dataset == "cifar100" else 200)
            assert config.horizon == (ABLATION if preset.name.startswith(("flat", "naive", "resnet20")) else FULL)
        assert EXPERIMENT.preset("cifar100-split_fg").config.optimizer == AdamW(lr=1e-3, weight_decay=5e-4)
        assert EXPERIMENT.preset("cifar100-split_fg-l2").config.optimizer == AdamL2(lr=1e-3, weight_decay=5e-4)
        assert {EXPERIMENT.preset(f"{s.dataset}-split_fg").config.rho for s in SETTINGS} == {1.0}

    def test_seeds_are_the_papers_and_fewer_for_long_runs(self):
        """Five on CIFAR-10 and in the ablation; three on CIFAR-100."""
        fewer = {"cifar10-pure_fg": 2, "cifar10-es": 2, "cifar10-forward_forward": 3}
        five = {f"cifar10-{m}" for m in METHOD_TITLES} | {"flat-split_fg", "flat-split_fg-single"}
        expected = dict.fromkeys(five, 5) | fewer | {f"cifar100-{m}": 3 for m in METHOD_TITLES}
        assert {name: EXPERIMENT.preset(name).seeds for name in expected} == {
            name: tuple(range(count)) for name, count in expected.items()
        }
        assert {EXPERIMENT.preset(f"flat-{m}").seeds for m in ("backprop", "pure_fg", "es")} == {(0, 1)}

    def test_no_two_are_the_same_run(self):
        configs = Counter(str(to_json(p.config)) for p in EXPERIMENT.presets)
        assert [c for c, count in configs.items() if count > 1] == []

    def test_learned_feedback_in_one_row_is_measured_in_one_way(self):
        (table,) = [t for t in EXPERIMENT.tables if t.key == "images-feedback"]
        rows = [[c.preset for c in row.cells if c] for row in table.rows if row.label.startswith("Learned feedback")]
        methods = [{EXPERIMENT.preset(preset).config.method for preset in row} for row in rows]
        assert [len(found) for found in methods] == [1, 1, 1, 1]

    def test_every_preset_stands_in_a_table(self):
        cells = [c for t in EXPERIMENT.tables for r in t.rows for c in r.cells if isinstance(c, Cell | Paired)]
        assert {c.preset for c in cells} == {p.name for p in EXPERIMENT.presets}
        assert {c.against for c in cells if isinstance(c, Paired)} <= {p.name for p in EXPERIMENT.presets}

    def test_timed_steps_are_those_of_the_presets(self):
        (figure,) = (f for f in EXPERIMENT.figures if f.key == "images-cifar10-time")
        assert [name for name, _ in figure.step_ms] == list(figure.presets)
        for name, cell in figure.step_ms:
            config, timed = (EXPERIMENT.preset(n).config for n in (name, cell.metric.removeprefix("ms/")))
            budget = {field: getattr(config, field) for field in ("steps", "horizon", "checkpoints")}
            assert replace(timed, **budget) == config

    def test_tangents_that_ride_together_fill_512_mib(self):
        for setting, width in ((CIFAR10, 16_384), (CIFAR100, 65_536)):
            assert setting.together * 128 * width * 4 == 512 * 2**20
        chunks = {K: EXPERIMENT.preset(screened(CIFAR10, K, 1.0)).config.method.chunk for K in (4, 16, 64, 256)}
        assert chunks == {4: None, 16: None, 64: None, 256: 64}


class TestTraining:
    def test_captured_steps_are_the_eager_steps(self):
        config = tiny("flat-split_fg", steps=6, horizon=6)
        data, losses = load_data(config, CPU), {}
        for step in ("eager", "captured"):
            split, batches = make_split(config, data, 0), TrainingBatches(config, data.train, 0)
            learner = make_learner(replace(config, step=step), split, batches)
            given = learner.batch if isinstance(learner, CapturedLearner) else batches
            generator = torch.Generator().manual_seed(0)
            losses[step] = [learner.step(*given(i), generator=generator).loss.item() for i in range(6)]
        assert losses["captured"] == pytest.approx(losses["eager"], rel=1e-5)
        assert len(set(losses["eager"])) == 6

    @pytest.mark.parametrize("preset", ["flat-split_fg", "flat-backprop"])
    def test_compiled_estimates_are_the_eager_ones(self, preset):
        # the whole of torch.compile but the code generation, which takes a minute
        aot_eager = functools.partial(torch.compile, fullgraph=True, dynamic=False, backend="aot_eager")
        config = tiny(preset)
        data = load_data(config, CPU)
        batches = TrainingBatches(config, data.train, 0)
        learner = make_learner(replace(config, step="eager"), make_split(config, data, 0), batches)
        fast = CapturedLearner(learner, horizon=2, batches=batches, compile_=aot_eager)
        fast.check(*fast.batch(0), generator=torch.Generator().manual_seed(0))  # refuses where they differ
        torch.compiler.reset()

    def test_an_mlp_reads_rows_of_pixels(self):
        config = tiny("cifar10-predictive_coding")
        data = load_data(config, CPU)
        x, y = TrainingBatches(config, data.train, 0)(0)
        assert x.shape == (4, 3 * 8 * 8)
        assert y.shape == (4,)

    def test_the_network_starts_alike_for_every_method_and_differently_for_every_seed(self):
        config = tiny("flat-split_fg")
        data = load_data(config, CPU)
        first, again, other = (make_split(config, data, seed).trained_params() for seed in (0, 0, 1))
        assert all(torch.equal(first[n], again[n]) for n in first)
        assert not torch.equal(first["trunk.stem.conv.weight"], other["trunk.stem.conv.weight"])

    def test_accuracy_is_the_share_of_all_test_images(self):
        config = tiny("flat-split_fg")
        data = load_data(config, CPU)

        class Constant:
            def predict(self, x):
                return torch.nn.functional.one_hot(torch.full((len(x),), 3), 10)

        share = (data.test.labels == 3).double().mean().item()
        assert 0 < share < 1
        assert accuracy(Constant(), config, data) == {"accuracy": pytest.approx(100 * share)}

    @pytest.mark.parametrize("preset", ["flat-split_fg", "cifar10-forward_forward", "cifar10-hopfield"])
    def test_a_run_records_its_confusion_matrix(self, tmp_path, preset):
        report = measure(tmp_path, preset)
        matrix = report.matrices["confusion"]
        labels = load_data(tiny(preset), CPU).test.labels
        assert [sum(row) for row in matrix] == torch.bincount(labels, minlength=10).tolist()
        right = sum(matrix[i][i] for i in range(10))
        assert report.metrics["accuracy"] == pytest.approx(100 * right / len(labels))

    def test_a_run_with_seed_0_records_its_filters(self, tmp_path):
        trained, frozen = (measure(tmp_path, f"flat-{m}").matrices for m in ("split_fg", "frozen"))
        start = make_split(tiny("flat-split_fg"), load_data(tiny("flat-split_fg"), CPU), 0).trunk.stem.conv.weight
        assert torch.tensor(trained["filters_before"]).allclose(start[:16].flatten(1), rtol=0, atol=5.1e-4)
        assert trained["filters_after"] != trained["filters_before"]
        assert frozen["filters_after"] == frozen["filters_before"] == trained["filters_before"]
        assert not {"filters_before", "filters_after"} & measure(tmp_path, "flat-split_fg", seed=1).matrices.keys()

    @pytest.mark.parametrize(
        "preset",
        ["flat-backprop", "flat-split_fg", "flat-frozen", "cifar10-forward_forward", "cifar10-predictive_coding"],
    )
    def test_learns_what_can_be_learned(self, tmp_path, preset):
        # brightness tells the class: chance is 10% of 128 images, give or take 2.7
        small = {"network": PlainMLP((64, 64)), "optimizer": Adam(lr=1e-2)} if preset.startswith("cifar10") else {}
        report = measure(tmp_path, preset, steps=120, horizon=120, warmup=20, batch=32, **small)
        assert report.metrics["accuracy"] > 30
        assert report.trunk_backward == (1 if preset == "flat-backprop" else 0)

    def test_a_seed_says_everything(self, tmp_path):
        found = {
            (seed, place): measure(tmp_path / place, "flat-split_fg", seed=seed, steps=5, horizon=5).metrics
            for seed in (0, 1)
            for place in ("first", "again")
        }
        assert found[0, "first"] == found[0, "again"]
        assert found[0, "first"]["trunk_moved"] != found[1, "first"]["trunk_moved"]

    def test_a_run_stopped_early_follows_the_longer_schedule(self):
        config = tiny("flat-split_fg", steps=2, horizon=100, warmup=10)
        data = load_data(config, CPU)
        learner = make_learner(
            replace(config, step="eager"), make_split(config, data, 0), TrainingBatches(config, data.train, 0)
        )
        assert learner.update.optimizer.schedule(10) == 1.0
        assert learner.update.optimizer.schedule(55) == pytest.approx(0.5)

    def test_the_readout_stores_every_image_once(self, tmp_path):
        report = measure(tmp_path, "cifar10-hopfield", steps=100)
        assert report.metrics["stored"] == 64
        assert report.steps == 16
        assert {"beta", "standardise", "unit"} <= report.metrics.keys()
        assert report.metrics["accuracy"] > 10

    def test_forward_forward_wants_an_mlp(self, tmp_path):
        with pytest.raises(RunError, match="Forward-Forward trains a PlainMLP, not a FlatNetwork"):
            measure(tmp_path, "flat-split_fg", method=ForwardForwardMethod())

    def test_precision_is_put_back(self):
        before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
        with precision("highest"):
            assert (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()) == (False, "highest")
        with precision("high"):
            assert (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()) == (True, "high")
        assert (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()) == before


class TestMemory:
    def test_is_not_measured_on_a_cpu(self, tmp_path):
        folder = RunFolder.of(tmp_path, MEMORY.name, "cifar10", 0)
        config = override(MEMORY.preset("cifar10").config, MEMORY.smoke)
        folder.prepare(MEMORY.name, "cifar10", 0, config)
        with pytest.raises(RunError, match="can only be measured on a GPU"):
            execute(folder, run_memory, config, device="cpu", emit=lambda event: None)

    def test_an_unknown_variant_is_refused(self, tmp_path):
        folder = RunFolder.of(tmp_path, MEMORY.name, "cifar10", 0)
        config = replace(MEMORY.preset("cifar10").config, variants=("backprop", "magic"))
        folder.prepare(MEMORY.name, "cifar10", 0, config)
        with pytest.raises(RunError, match="no variants are called magic; there are backprop,"):
            execute(folder, run_memory, config, device="cpu", emit=lambda event: None)

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_every_variant_takes_its_step(self, variant):
        config = override(MEMORY.preset("cifar10").config, MEMORY.smoke)
        step = make_step(variant, config, 0, CPU)
        stats = step()
        assert math.isfinite(stats.loss.item())
        assert stats.metrics["trunk_backward"] == ("backprop" in variant or "checkpointed" in variant)
        assert stats.metrics["jvps"] == (4 if "chunk" in variant else "learned" in variant)

    def test_savings_are_against_backprop_on_the_whole_backbone(self):
        found = savings({"mib/backprop": 1520.0, "mib/split_fg-chunk1": 1282.0, "beyond/backprop": 9.0})
        assert found == pytest.approx({"saved/backprop": 0, "saved/split_fg-chunk1": 15.66}, abs=0.01)
        assert savings({"mib/frozen": 1.0}) == {}


@pytest.mark.skipif(not SOURCE.exists(), reason="the paper's source is not beside the repository")
class TestThePapersNumbers:
    @staticmethod
    def rows(label):
        source = SOURCE.read_text(encoding="utf-8")
        table = source[source.index(rf"\label{{{label}}}") :]
        return [line for line in table[: table.index(r"\end{table}")].splitlines() if "&" in line]

    @staticmethod
    def printed(line):
        return tuple((float(a), float(b)) for a, b in re.findall(r"(\d+\.\d+)_\{\\pm(\d+\.\d+)\}", line))

    def test_main_table(self):
        _, *lines = self.rows("tab:image-main")
        assert {s.dataset: self.printed(line) for s, line in zip(SETTINGS, lines, strict=True)} == numbers.MAIN

    def test_ablation(self):
        _, *lines = self.rows("tab:image-ablation")
        papers = [paper for *_, paper in numbers.ABLATION_ROWS if paper is not None]
        assert [(p.mean, p.std) for p in papers] == [pair for line in lines for pair in self.printed(line)]

    def test_memory(self):
        _, *lines = self.rows("tab:image-memory")
        for setting, line in zip(SETTINGS, lines, strict=True):
            mib = [float(value) for value in re.findall(r"\$(\d{4})\$", line)]
            paper = MEMORY_PAPER[setting.dataset]
            assert [paper["backprop"], paper["split_fg-chunk1"]] == mib
            assert f"+{REFERENCE_DIFFERENCE[setting.dataset]}" in line

    def test_control_and_claims_in_the_text(self):
        source = " ".join(SOURCE.read_text(encoding="utf-8").split())
        for frozen, ours in numbers.FROZEN.values():
            assert re.search(rf"\${ours}\\%\$ vs\.\\ \${frozen}\\%\$", source)
        assert "paired $t(4)=6.93$, $p<0.01$" in source
        assert r"peaks at $2668$\,MiB" in source


def _cifar10():
    try:
        return load_images("cifar10", DATA)
    except DataError as error:
        pytest.skip(f"no CIFAR-10: {error}")


@pytest.mark.realdata
def test_cifar10_has_the_known_mean_and_deviation():
    scale = ChannelScale.fit(_cifar10().train_x)
    assert (scale.mean / 255).tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)
    assert (scale.deviation / 255).tolist() == pytest.approx([0.2470, 0.2435, 0.2616], abs=1e-4)


class TestCost:
    @staticmethod
    def measure(tmp_path, **changes):
        config = replace(override(COST.preset("compiled").config, COST.smoke), **changes)
        folder = RunFolder.of(tmp_path, COST.name, "compiled", 0)
        folder.prepare(COST.name, "compiled", 0, config)
        return execute(folder, run_cost, config, device="cpu", emit=lambda event: None)

    def test_every_variant_is_timed_against_backprop_on_its_network(self, tmp_path):
        metrics = self.measure(tmp_path).metrics
        assert metrics["ms/cifar10-split_fg"] > 0
        ratio = metrics["ms/cifar10-split_fg"] / metrics["ms/flat-backprop"]
        assert metrics["ratio/cifar10-split_fg"] == pytest.approx(ratio)
        assert metrics["ratio/flat-backprop"] == 1
        assert metrics["ms/cifar10-forward_forward"] > 0
        assert "ratio/cifar10-forward_forward" not in metrics, "the MLP has no backprop preset"

    def test_networks_are_those_of_their_references(self):
        for reference, group in COST_NETWORKS.items():
            networks = {EXPERIMENT.preset(name).config.network for name in group}
            light = {replace(n, inner=None) if hasattr(n, "inner") else n for n in networks}
            assert len(light) == 1
            assert not reference or EXPERIMENT.preset(reference).config.network in networks

    def test_an_unknown_variant_is_an_error(self, tmp_path):
        with pytest.raises(RunError, match="not presets of images: magic"):
            self.measure(tmp_path, variants=("magic",))
