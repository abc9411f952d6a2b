"""The depth and read-out experiment: what its presets are, and a short run of each kind."""

import pytest
import torch

from splitfg.feedback import CoarseReadout, Difference
from splitfg.sites import Operation, Tape
from splitfg_lab.experiments import Cell
from splitfg_lab.experiments.feedback import BITS, DEPTHS, EXPERIMENT, METHODS


def test_every_preset_is_a_cell_and_every_cell_a_preset():
    cells = {c.preset for t in EXPERIMENT.tables for r in t.rows for c in r.cells if isinstance(c, Cell)}
    assert cells == {p.name for p in EXPERIMENT.presets}


def test_depths_and_methods():
    configs = {p.name: p.config for p in EXPERIMENT.presets}
    assert {configs[f"{m}-depth{d}"].layers for m in METHODS for d in DEPTHS} == set(DEPTHS)
    assert configs["direct-rho0.3-depth3"].rho == 0.3
    assert configs["4bit-step1-rate1"].method.probe.bits == 4


def tape(value):
    return Tape([Operation("layer", None, (value,), {}, 2 * value)], 2 * value)


@pytest.mark.parametrize("bits", BITS)
def test_readings_have_as_many_levels_as_bits(bits):
    x = torch.randn(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    clean = tape(x)
    probe = CoarseReadout(Difference(), bits=bits)
    read = probe._coarse(clean).h
    assert len(read.unique()) <= 2**bits
    width = float((2 * x).max() - (2 * x).min()) / (2**bits - 1)
    assert float((read - clean.h).abs().max()) <= width / 2 + 1e-9


def test_noise_is_relative_to_what_is_read():
    x = 50 * torch.randn(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noisy = CoarseReadout(Difference(), noise=0.1)._coarse(tape(x)).h
    assert float((noisy - 2 * x).std() / (2 * x).std()) == pytest.approx(0.1, rel=0.1)
