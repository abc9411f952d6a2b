"""Images on a CUDA device: the same batches as on a CPU, looked up inside the captured step, and the memory table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from splitfg.learners import CapturedLearner
from splitfg_lab.experiments.images import EXPERIMENT, SMOKE
from splitfg_lab.experiments.images._build import TrainingBatches, load_data, make_learner, make_split, precision
from splitfg_lab.experiments.images.run import run
from splitfg_lab.experiments.images_memory import EXPERIMENT as MEMORY, VARIANTS
from splitfg_lab.experiments.images_memory.run import run as run_memory
from splitfg_lab.runs import RunFolder, execute, override

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's compiler has advice to give on every GPU
]

CPU, GPU = torch.device("cpu"), torch.device("cuda")
STEPS = 12


def config(preset, **changes):
    changes = {"steps": STEPS, "horizon": STEPS, "batch": 16} | changes
    return replace(override(EXPERIMENT.preset(preset).config, SMOKE), **changes)


def losses(config):
    """Of all steps, as the config has them taken; a captured step must wait for nothing once it is replayed."""
    data = load_data(config, GPU)
    batches = TrainingBatches(config, data.train, 0)
    learner = make_learner(config, make_split(config, data, 0), batches)
    generator, found = torch.Generator(GPU).manual_seed(0), []
    captured = isinstance(learner, CapturedLearner)
    with precision(config.matmul):
        for i in range(config.steps):
            torch.cuda.set_sync_debug_mode("error" if captured and i > 5 else "default")
            try:
                stats = learner.step(*(learner.batch if captured else batches)(i), generator=generator)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            found.append(stats.loss.clone())
    assert not captured or learner.captured
    return torch.stack(found).tolist()


def test_batches_are_those_of_a_cpu():
    there, here = (
        TrainingBatches(c, load_data(c, device).train, 0) for device in (GPU, CPU) for c in [config("flat-split_fg")]
    )
    for step in (0, 7):
        x, y = there(torch.tensor(step, device=GPU))
        expected_x, expected_y = here(step)
        torch.testing.assert_close(x.cpu(), expected_x)
        assert torch.equal(y.cpu(), expected_y)


@pytest.mark.parametrize(
    "preset",
    ["flat-split_fg", "flat-pure_fg", "flat-es", "flat-backprop", "flat-frozen", "cifar10-predictive_coding"],
)
def test_captured_steps_are_the_eager_steps(preset):
    small = config(preset, matmul="highest")
    assert losses(replace(small, step="captured")) == pytest.approx(losses(replace(small, step="eager")), rel=1e-2)


@pytest.mark.parametrize("preset", ["flat-split_fg", "flat-k256-rho1", "flat100-k64-rho0.1", "cifar10-backprop"])
def test_compiled_steps_are_the_eager_steps(preset):
    small = config(preset, matmul="highest")
    assert losses(small) == pytest.approx(losses(replace(small, step="eager")), rel=1e-2)


@pytest.mark.parametrize("preset", ["flat-split_fg", "cifar10-forward_forward", "cifar100-hopfield"])
def test_a_run_on_a_gpu(tmp_path, preset):
    folder = RunFolder.of(tmp_path, EXPERIMENT.name, preset, 0)
    folder.prepare(EXPERIMENT.name, preset, 0, config(preset))
    report = execute(folder, run, config(preset), device="cuda", emit=lambda event: None)
    assert report.status == "done"
    assert 0 <= report.metrics["accuracy"] <= 100


def test_peaks_are_those_of_the_arrays_that_must_be_alive(tmp_path):
    setting = replace(MEMORY.preset("cifar10").config, images=500)
    folder = RunFolder.of(tmp_path, MEMORY.name, "cifar10", 0)
    folder.prepare(MEMORY.name, "cifar10", 0, setting)
    metrics = execute(folder, run_memory, setting, device="cuda", emit=lambda event: None).metrics
    assert {name.removeprefix("mib/") for name in metrics if name.startswith("mib/")} == set(VARIANTS)
    beyond = {name: metrics[f"beyond/{name}"] for name in VARIANTS}
    # an activation of the first stage is 8 MiB: ResNet-20 keeps at least two for each of its first seven convolutions
    assert beyond["backprop"] > 7 * 2 * 8
    assert beyond["backprop-checkpointed"] < beyond["backprop"]
    assert beyond["flat-checkpointed"] <= beyond["flat-backprop"]
    # each of the three tangents more that ride along has at least h of its own
    assert beyond["split_fg-chunk4"] > beyond["split_fg-chunk1"] + 3 * 8
    assert metrics["saved/split_fg-chunk1"] > 0
