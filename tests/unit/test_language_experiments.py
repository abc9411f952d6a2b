"""The language experiments: the paper's sizes and budgets, validation in chunks, references, and what a step costs."""

from __future__ import annotations

import math
import os
import pickle
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _made_up import measure_made_up
from _toolkit import generator

from splitfg import (
    Backprop,
    CheckpointedBackprop,
    EvolutionStrategy,
    ForwardGradient,
    ForwardMode,
    FrozenTrunk,
    SplitError,
    SplitFG,
)
from splitfg.learners import CapturedLearner
from splitfg.models import PRESETS
from splitfg.recipes import SGD, FrozenMethod, PureFGMethod, SplitFGMethod
from splitfg.splitting import Role
from splitfg_lab.data import Windows, load_tokens
from splitfg_lab.experiments._peaks import in_processes, savings
from splitfg_lab.experiments._training import Displacement, matmul_precision
from splitfg_lab.experiments.language import EPOCH, EXPERIMENT, SMOKE, TENTH, Language, Sizes
from splitfg_lab.experiments.language._build import load_corpus, make_learner, make_split
from splitfg_lab.experiments.language._ladder import SIZES
from splitfg_lab.experiments.language._ladder_tables import TIMED
from splitfg_lab.experiments.language._memory import explaining_memory, fitting_chunk
from splitfg_lab.experiments.language._validate import Validation, perplexity
from splitfg_lab.experiments.language_cost import LADDER, VARIANTS, Cost
from splitfg_lab.experiments.language_cost.run import Variant, parse, slowdowns
from splitfg_lab.experiments.language_energy.run import energy
from splitfg_lab.runs import RunContext, RunError, RunFolder, override, to_json

CPU = torch.device("cpu")
DATA = Path(os.environ.get("SPLITFG_DATA", Path(__file__).parents[3] / "shared" / "data"))
TINY = override(Language(SplitFGMethod(K=2)), SMOKE)
real_data = pytest.mark.skipif(not (DATA / "text" / "wiki.valid.raw").exists(), reason=f"no WikiText in {DATA}")


class TestTheModel:
    def test_has_the_papers_sizes(self):
        assert asdict(Sizes()) == asdict(PRESETS["small8"])
        split = make_split(Language(FrozenMethod()), 0, CPU)
        assert split.count(Role.TRUNK) == 3_192_320
        assert split.count(Role.HEAD, Role.TIED) == 12_916_049

    def test_has_a_light_trunk_of_positions_norms_and_biases(self):
        split = make_split(Language(FrozenMethod(), light=True), 0, CPU)
        assert split.count(Role.TRUNK) == 46_592
        assert split.count(Role.HEAD, Role.TIED) == 12_916_049
        assert {n for n, role in split.roles.items() if role is Role.FROZEN} == {
            f"trunk.blocks.{i}.{layer}.weight"
            for i in range(4)
            for layer in ("attention.qkv", "attention.proj", "mlp.fc", "mlp.out")
        }

    def test_starts_alike_for_every_method_and_differently_for_every_seed(self):
        first, again, other = (make_split(TINY, seed, CPU).trained_params() for seed in (0, 0, 1))
        assert all(torch.equal(first[n], again[n]) for n in first)
        assert not torch.equal(first["trunk.position"], other["trunk.position"])

    @pytest.mark.parametrize("tied", ["exclude", "include", "fixed"])
    def test_looks_tokens_up_in_the_trained_table_unless_that_is_fixed(self, tied):
        config = replace(TINY, tied=tied, step="eager")
        split = make_split(config, 0, CPU)
        lookup, readout = split.trunk.token.weight, split.head.layers[0].weight
        start = lookup.clone()
        assert torch.equal(readout, start)
        learner, batches = make_learner(config, split, load_corpus(config).train, CPU)
        for i in range(2):
            learner.step(*batches(i), generator=generator())
        assert torch.equal(lookup, start) == (tied == "fixed")
        assert not torch.equal(readout, start)


class TestPresets:
    def test_the_budgets_are_the_papers(self):
        assert EPOCH == (119_085_169 - 1) // 128 // 4
        assert TENTH == EPOCH // 10
        steps = Counter(p.config.steps for p in EXPERIMENT.presets)
        others = {f"-{share}": EPOCH * share // 100 for share in (3, 30)}
        sizes = {steps for _, steps, _ in SIZES.values()}
        assert set(steps) == {1, TENTH, EPOCH, *others.values(), *sizes}
        assert all(p.name.endswith("-10") == (p.config.steps == TENTH) for p in EXPERIMENT.presets)
        for end, count in others.items():
            assert {p.config.steps for p in EXPERIMENT.presets if p.name.endswith(end)} == {count}

    def test_no_two_are_the_same_run(self):
        configs = Counter(str(to_json(p.config)) for p in EXPERIMENT.presets)
        assert [c for c, count in configs.items() if count > 1] == []

    def test_a_lean_run_is_a_run_of_the_preset(self):
        preset = EXPERIMENT.preset("split_fg-k4-rho0.1")
        lean, other = (replace(preset.config, method=SplitFGMethod(K=4, **c)) for c in ({"lean": True}, {"chunk": 1}))
        assert lean.method.build() == SplitFG(4, lean=True)
        assert EXPERIMENT.changes(preset, to_json(lean)) == ()
        assert EXPERIMENT.changes(preset, to_json(other)) == ("method.chunk=1 (preset: None)",)

    def test_tangents_beyond_32_ride_in_chunks(self):
        chunks = {p.config.method.K: p.config.method.chunk for p in EXPERIMENT.presets if "k128" in p.name}
        assert chunks == {128: 32}


class TestTraining:
    def test_step_i_reads_windows_4i_to_4i_plus_3_at_the_annealed_rate(self):
        config = replace(TINY, batch=4, steps=20, warmup=2)
        corpus = load_corpus(config)
        _, batches = make_learner(replace(config, step="eager"), make_split(config, 0, CPU), corpus.train, CPU)
        x, y = batches(3)
        tokens = torch.from_numpy(corpus.train.tokens.astype(np.int64))
        assert torch.equal(x.flatten(), tokens[12 * 8 : 16 * 8])
        assert torch.equal(y.flatten(), tokens[12 * 8 + 1 : 16 * 8 + 1])

    def test_is_captured_unless_the_config_says_eager(self):
        split, windows = make_split(TINY, 0, CPU), load_corpus(TINY).train
        assert isinstance(make_learner(TINY, split, windows, CPU)[0], CapturedLearner)
        assert not isinstance(make_learner(replace(TINY, step="eager"), split, windows, CPU)[0], CapturedLearner)

    def test_precision_is_put_back(self):
        before = torch.get_float32_matmul_precision()
        with matmul_precision("medium"):
            assert torch.get_float32_matmul_precision() == "medium"
        assert torch.get_float32_matmul_precision() == before


class TestValidation:
    def test_in_chunks_is_the_mean_over_all_complete_windows(self):
        split, windows = make_split(TINY, 0, CPU), load_corpus(TINY).valid
        covered = len(windows) * 8
        tokens = torch.from_numpy(windows.tokens[: covered + 1].astype(np.int64))
        logits = split.predict(tokens[:covered].view(-1, 8))
        expected = F.cross_entropy(logits.flatten(0, 1), tokens[1 : covered + 1]).item()
        assert Validation(windows, CPU).nll(split) == pytest.approx(expected, rel=1e-6)

    def test_perplexity(self):
        assert perplexity(math.log(386.7)) == pytest.approx(386.7)
        assert perplexity(1e6) == math.inf

    def test_displacement_is_relative_to_the_initial_norm(self):
        split = make_split(TINY, 0, CPU)
        moved = Displacement(split)
        assert moved() == 0
        with torch.no_grad():
            for p in split.trunk_params().values():
                p.mul_(1.25)
        assert moved() == pytest.approx(0.25, rel=1e-6)


class TestMemory:
    @pytest.mark.parametrize(("limit", "chunk"), [(100, 16), (16, 16), (5, 4), (1, 1), (0, None)])
    def test_the_largest_chunk_that_fits(self, limit, chunk):
        assert fitting_chunk(32, lambda c: c <= limit) == chunk

    @pytest.mark.parametrize(
        ("method", "advice"),
        [
            (SplitFGMethod(K=8), "method.chunk=4 fits.*4 of 8 tangents"),
            (PureFGMethod(K=8), "method.chunk=4 fits.*4 of 8 tangents"),
            (SplitFGMethod(K=8, chunk=1), "method.chunk=1 with method.lean=true fits"),
            (SplitFGMethod(K=8, chunk=1, lean=True), "Not even chunk=1 fits: use a smaller batch"),
            (PureFGMethod(K=8, chunk=1), "Not even chunk=1 fits: use a smaller batch"),
            (FrozenMethod(), "block"),
        ],
    )
    def test_running_out_says_what_fits(self, method, advice):
        config = replace(TINY, method=method)
        split, windows = make_split(config, 0, CPU), load_corpus(config).train
        said = pytest.raises(RunError, match=rf"(?s)tried to allocate 3 GiB.*{advice}")
        with said, explaining_memory(config, split, windows):
            raise torch.OutOfMemoryError("tried to allocate 3 GiB\nand more")


class TestEnergy:
    def test_is_the_mean_share_of_the_trunk(self):
        split, windows = make_split(TINY, 0, CPU), load_corpus(TINY).train
        shares = []
        for i in range(3):
            grads = Backprop()(split, *windows.step(i, 2)).grads
            squares = {n: g.double().square().sum().item() for n, g in grads.items()}
            shares.append(sum(squares[n] for n in split.trunk_params()) / sum(squares.values()))
        found = energy(split, windows, 2, 3)
        assert found["trunk_share"] == pytest.approx(sum(shares) / 3, rel=1e-5)
        assert found["trunk_share"] < found["trunk_share_readout"] < 1

    def test_the_papers_factors_follow_from_its_share(self):
        assert pytest.approx(1.35, abs=0.005) == 1 / 0.74
        assert pytest.approx(6.8, abs=0.05) == 16_108_369 / (3_192_320 * 0.74)


class TestPeaks:
    @pytest.fixture
    def context(self, tmp_path):
        folder = RunFolder(tmp_path / "language_cost" / "made_up" / "seed0")
        folder.prepare("language_cost", "made_up", 0, Cost())
        with RunContext(folder, None, device=torch.device("cpu"), emit=lambda event: None) as run:
            yield run

    def test_what_fails_is_left_out_and_named(self, context, monkeypatch):
        notes = []
        monkeypatch.setattr(context, "note", notes.append)
        found = in_processes(measure_made_up, ("a", "broken"), None, 3, context)
        assert found == {"mib/a": 1.0, "seed/a": 3.0}
        assert notes == ["broken was not measured: SplitError: - it does not compile\n- nor does it fit"]

    @pytest.mark.parametrize(("variants", "words"), [(("broken",), "nothing was measured"), (("killed",), "killed")])
    def test_nothing_at_all_is_no_result(self, context, variants, words):
        with pytest.raises(RunError, match=words):
            in_processes(measure_made_up, variants, None, 3, context)

    def test_errors_travel_between_processes(self):
        error = pickle.loads(pickle.dumps(SplitError(["one", "two"])))
        assert (error.problems, str(error)) == (("one", "two"), "- one\n- two")


class TestCost:
    def test_variants_are_what_their_names_say(self):
        assert parse("backprop", 20) == Variant(Backprop(), 20)
        assert parse("backprop-both", 20).estimator == CheckpointedBackprop(closed_head=True)
        assert parse("frozen", 20).estimator == FrozenTrunk()
        assert parse("split_fg-k8-chunk2-block20", 22) == Variant(SplitFG(8, engine=ForwardMode(2)), 20)
        assert parse("split_fg-k4-chunk1-block21-lean", 22) == Variant(SplitFG(4, engine=ForwardMode(1), lean=True), 21)
        assert parse("fg-k4-chunk1-sgd", 22) == Variant(ForwardGradient(4, engine=ForwardMode(1)), 22, SGD(lr=1e-6))
        assert parse("es-k1", 22).estimator == EvolutionStrategy(1)
        with pytest.raises(RunError, match="no variant is called 'split_fg'"):
            parse("split_fg", 20)

    @pytest.mark.parametrize("name", VARIANTS)
    def test_every_variant_has_a_name_that_is_understood(self, name):
        assert parse(name, 24)

    def test_the_ladder_reads_times_that_are_measured(self):
        assert set(TIMED.values()) <= set(LADDER)
        assert set(TIMED) <= {preset.name for preset in EXPERIMENT.presets}

    def test_timed_steps_of_the_figure_are_those_of_its_presets(self):
        (figure,) = (f for f in EXPERIMENT.figures if f.key == "language-k-time")
        assert [name for name, _ in figure.step_ms] == list(figure.presets)
        cost = Cost()
        for name, cell in figure.step_ms:
            config = EXPERIMENT.preset(name).config
            assert isinstance(config, Language)
            ours, timed = config.method.build(), parse(cell.metric.removeprefix("ms/"), cost.block)
            # all tangents at once
            assert timed.estimator == (replace(ours, engine=ForwardMode(ours.K)) if isinstance(ours, SplitFG) else ours)
            assert isinstance(ours, FrozenTrunk) or ours.engine == ForwardMode(None)
            assert type(timed.optimizer) is type(config.optimizer)
            ran = (config.model, config.batch, config.block, config.tied, config.step, config.matmul)
            assert ran == (cost.model, cost.batch, 2**timed.block, timed.tied, cost.step, cost.matmul)

    def test_ratios_are_to_plain_backprop(self):
        assert slowdowns({"ms/backprop": 2.0, "ms/a": 3.0}) == {"ratio/backprop": 1.0, "ratio/a": 1.5}
        assert slowdowns({"ms/a": 3.0}) == {}
        saved = savings({"mib/backprop": 400.0, "mib/a": 240.0, "other/a": 1.0})
        assert saved == pytest.approx({"saved/backprop": 0, "saved/a": 40})


@real_data
@pytest.mark.realdata
class TestRealText:
    def test_validation_covers_the_papers_targets(self, monkeypatch):
        tokens = load_tokens("wikitext103", "valid", DATA)
        assert len(tokens) == 249_750
        assert len(Windows(tokens, 128)) * 128 == 249_728
