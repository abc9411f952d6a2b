"""The core on a CUDA device: the same identities as on the CPU, and memory that does not grow with depth."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import splitfg
from splitfg.compiled import CompiledEngine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def network(depth: int = 2, width: int = 32, dtype: torch.dtype = torch.float64) -> splitfg.Split:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())]
    trunk = nn.Sequential(*layers).to("cuda", dtype)
    return splitfg.Split(trunk, splitfg.LinearHead(nn.Linear(width, 7).to("cuda", dtype)))


def batch(rows: int = 16, width: int = 32, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, width, device="cuda", dtype=dtype)
    return x, torch.randint(0, 7, (rows,), device="cuda")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def assert_same(first: splitfg.Estimate, second: splitfg.Estimate, **tolerance: float) -> None:
    assert set(first.grads) == set(second.grads)
    for name, g in first.grads.items():
        torch.testing.assert_close(g, second.grads[name], msg=name, **tolerance)


def test_as_many_orthogonal_tangents_as_parameters_give_the_gradient():
    split, (x, y) = network(width=16), batch(width=16)
    count = sum(p.numel() for p in split.trunk_params().values())
    estimate = splitfg.SplitFG(count, law=splitfg.Orthogonal())(split, x, y, generator=generator())
    assert_same(estimate, splitfg.Backprop()(split, x, y))


def test_class_weights_may_stay_on_the_cpu():
    (x, y), weights, found = batch(), torch.arange(7, dtype=torch.float64), []
    for device in ("cpu", "cuda"):
        split = network()
        split.head.output_loss = splitfg.CrossEntropy(class_weights=weights.to(device))
        found.append(splitfg.FrozenTrunk()(split, x, y))
    assert_same(*found)


@pytest.mark.parametrize("chunk", [1, 3])
def test_the_chunk_does_not_change_the_estimate(chunk):
    split, (x, y) = network(), batch()
    whole = splitfg.SplitFG(8)(split, x, y, generator=generator())
    parts = splitfg.SplitFG(8, engine=splitfg.ForwardMode(chunk))(split, x, y, generator=generator())
    assert_same(parts, whole)


@pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled:UserWarning")  # it begins with a line break
@pytest.mark.parametrize("estimator", [splitfg.SplitFG(4), splitfg.ForwardGradient(4), splitfg.Backprop()])
def test_compiled_equals_eager(estimator):
    split, (x, y) = network(dtype=torch.float32), batch(dtype=torch.float32)
    eager = estimator(split, x, y, generator=generator())
    compiled = torch.compile(estimator)(split, x, y, generator=generator())
    assert_same(compiled, eager, rtol=1e-4, atol=1e-5)


class FunctionalNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (32,), self.weight)


def norms(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.LayerNorm(32), nn.GroupNorm(4, 32), nn.BatchNorm1d(32), nn.RMSNorm(32, eps=1e-5), FunctionalNorm()]
    pairs = [layer for norm in layers for layer in (nn.Linear(32, 32), norm)]
    return nn.Sequential(*pairs).to("cuda", torch.bfloat16).to(dtype)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_tangents_pass_through_norms_in_bfloat16(frozen, compiled):
    """CUDA's norms return float32 statistics; the tangents of their outputs are in bfloat16 all the same."""
    x, found = batch(dtype=torch.bfloat16)[0], {}
    for dtype in (torch.bfloat16, torch.float64):
        trunk = norms(dtype)
        for layer in trunk[1::2]:
            layer.requires_grad_(not frozen)
        split = splitfg.Split(trunk, splitfg.LinearHead(nn.Linear(32, 7).to("cuda", dtype)))
        params, _ = split.trunk_params(), split.traits(x.to(dtype))
        tangents = {n: torch.ones(2, *p.shape, device="cuda", dtype=dtype) for n, p in params.items()}
        engine = splitfg.ForwardMode()
        if compiled and dtype != torch.float64:
            engine = CompiledEngine(engine, trunk)
        with torch.no_grad():
            found[dtype] = engine(split.trunk_function(x.to(dtype)), params, tangents)
    (h, dh), (expected_h, expected) = found.values()
    assert h.dtype == dh.dtype == torch.bfloat16
    assert float((h - expected_h).norm() / expected_h.norm()) < 0.05
    assert float((dh - expected).norm() / expected.norm()) < 0.05


def peak(estimator: splitfg.Estimator, depth: int) -> int:
    split, (x, y) = network(depth, 256, torch.float32), batch(4096, 256, torch.float32)
    estimator(split, x, y, generator=generator())
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    estimator(split, x, y, generator=generator())
    return torch.cuda.max_memory_allocated() - before


def test_memory_grows_with_depth_for_backprop_only():
    layer = 4 * 256 * 257  # bytes of one more layer's parameters, in float32
    activations = 4 * 4096 * 256
    # one more layer costs its tangent and its share of the sum, no more
    one_by_one = splitfg.SplitFG(4, engine=splitfg.ForwardMode(1))
    assert (peak(one_by_one, 24) - peak(one_by_one, 8)) / 16 < 2.5 * layer < activations
    assert (peak(splitfg.Backprop(), 24) - peak(splitfg.Backprop(), 8)) / 16 > activations


def test_lean_keeps_the_heads_gradient_and_tangents_apart():
    split, (x, y) = network(24, 256, torch.float32), batch(4096, 256, torch.float32)
    head = splitfg.LinearHead(nn.Linear(256, 20_000).cuda(), block=2**18)
    split, peaks = splitfg.Split(split.trunk, head), {}
    for lean in (False, True):
        estimator = splitfg.SplitFG(2, engine=splitfg.ForwardMode(1), lean=lean)
        estimator(split, x, y, generator=generator())
        torch.cuda.reset_peak_memory_stats()
        estimator(split, x, y, generator=generator())
        peaks[lean] = torch.cuda.max_memory_allocated()
    assert peaks[False] - peaks[True] > 0.8 * 4 * split.count(splitfg.Role.HEAD)
