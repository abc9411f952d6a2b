"""The same loop on a GPU: it resumes with the GPU's own generators, waits only when it must, and counts memory."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "plugin"))
from _loops import make_folder
from tiny import TinyConfig
from tiny.run import TinyLearner, batch

from splitfg.types import StepStats
from splitfg_lab.runs import RunContext, RunError, StoppedError, execute, fit, load_checkpoint
from splitfg_lab.runs._window import Window

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]


class GpuLearner(TinyLearner):
    """Draws on the GPU, from its own generator and from the global one."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.noise = torch.zeros(6, device="cuda")

    def step(self, x: Any, y: Any, *, generator: torch.Generator) -> StepStats:
        self.noise += torch.randn(6, generator=generator, device="cuda") + torch.rand(6, device="cuda")
        self.taken += 1
        return StepStats(self.noise.square().mean(), {"norm": self.noise.norm()})

    def state_dict(self) -> dict[str, Any]:
        return {"noise": self.noise, "taken": self.taken}

    def load_state_dict(self, state: Any) -> None:
        self.noise.copy_(state["noise"])
        self.taken = state["taken"]


def runner(config: TinyConfig, *, seed: int, run: RunContext) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed)
    return fit(GpuLearner(config), batch, steps=config.steps, generator=generator, run=run, log_every=7)


def stopped_at_ten(config: TinyConfig, *, seed: int, run: RunContext) -> Any:
    def batches(step: int) -> Any:
        if step == 10:
            os.kill(os.getpid(), signal.SIGINT)
        return batch(step)

    generator = torch.Generator("cuda").manual_seed(seed)
    return fit(GpuLearner(config), batches, steps=config.steps, generator=generator, run=run, log_every=7)


def final_noise(folder: Any) -> list[float]:
    checkpoint = load_checkpoint(folder.path)
    assert checkpoint is not None
    noise: list[float] = checkpoint.state["state"]["learner"]["noise"].tolist()
    return noise


def test_a_gpu_run_resumes_exactly_and_only_there(tmp_path: Path) -> None:
    config = TinyConfig()
    straight, stopped = make_folder(tmp_path / "a", config), make_folder(tmp_path / "b", config)
    report = execute(straight, runner, config, device="cuda", emit=lambda event: None)
    with pytest.raises(StoppedError):
        execute(stopped, stopped_at_ten, config, device="cuda", emit=lambda event: None)
    with pytest.raises(RunError, match="cannot resume on"):
        execute(stopped, runner, config, device="cpu", emit=lambda event: None)
    execute(stopped, runner, config, device="auto", emit=lambda event: None)
    assert final_noise(stopped) == final_noise(straight)
    assert report.device.startswith("cuda: ")
    assert report.memory_kind == "GPU memory allocated"


def test_peak_memory_is_what_the_run_allocated(tmp_path: Path) -> None:
    def hungry(config: TinyConfig, *, seed: int, run: RunContext) -> dict[str, float]:
        block = torch.empty(64 * 2**20, dtype=torch.uint8, device=run.device)
        return {"bytes": float(block.numel())}

    config = TinyConfig()
    torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")  # before the run: not its own
    report = execute(make_folder(tmp_path, config), hungry, config, device="cuda", emit=lambda event: None)
    assert 64 <= report.peak_memory_mib < 192


def test_adding_to_the_window_does_not_wait_for_the_gpu() -> None:
    window = Window()
    loss = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            window.add(StepStats(loss, {"norm": loss * 2, "jvps": 4}))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    rows = window.fetch()
    assert rows == [{"loss": 1.0, "norm": 2.0, "jvps": 4.0}] * 5
