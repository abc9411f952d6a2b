"""Corners of the core that are easily wrong: masked classes, narrow dtypes, tables, probes and words."""

import pytest
import torch
import torch.nn.functional as F
from _toolkit import classes, generator, mlp_split, noise, seeded
from torch import nn

import splitfg
from benchmarks._measure import peak_mib
from splitfg import (
    Conditioned,
    CrossEntropy,
    EvolutionStrategy,
    ForwardMode,
    FrozenTrunk,
    GradientLearner,
    LinearHead,
    ProbedHead,
    RunningMagnitude,
    Split,
    SplitError,
    SplitFG,
    diagnose,
)
from splitfg.recipes import LaggedRMS
from splitfg.training._groups import block_weights


@pytest.mark.parametrize("block", [6, 12, 2**20])
@pytest.mark.parametrize("masked", [(0,), (0, 1), (5, 6), (3,)])
def test_classes_masked_by_the_bias_leave_a_finite_loss(block, masked):
    layer = seeded(lambda: nn.Linear(4, 7)).double()
    with torch.no_grad():
        layer.bias[list(masked)] = -torch.inf
    h, y = noise(6, 4), classes(6, count=7)
    y = torch.tensor([c for c in range(7) if c not in masked])[y % (7 - len(masked))]
    y[2] = -100
    head = LinearHead(layer, loss=CrossEntropy(), block=block)
    found = head(h, y)
    h.requires_grad_()
    expected = F.cross_entropy(layer(h), y)
    expected.backward()
    torch.testing.assert_close(found.loss, expected.detach())
    torch.testing.assert_close(found.u, h.grad)
    torch.testing.assert_close(found.grads["0.weight"], layer.weight.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_running_means_do_not_stall_in_narrow_dtypes(dtype):
    s = mlp_split(2, 2, 2, dtype=dtype)
    optimizer = LaggedRMS(lr=1e-9).build(s)
    magnitude = RunningMagnitude(0.999)
    for _ in range(3000):
        for p in s.model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        magnitude.update({"w": torch.ones(2, dtype=dtype)})
    p = next(s.model.parameters())
    assert optimizer.preconditioner(p, optimizer.param_groups[0]).double().mean().item() == pytest.approx(1, rel=0.02)
    assert magnitude.state_dict()["mean_square"]["w"].dtype == torch.float32
    again = LaggedRMS(lr=1e-9).build(s)
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(again.state[p]["mean_square"], optimizer.state[p]["mean_square"])
    assert again.state[p]["mean_square"].dtype == torch.float32


class Readers(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.table = nn.EmbeddingBag(5, 4), nn.Embedding(5, 4)
        self.attention, self.layer, self.norm = nn.MultiheadAttention(4, 2), nn.Linear(4, 4), nn.LayerNorm(4)
        self.recurrent = nn.GRU(4, 4)

    def forward(self, x):
        return self.layer(self.bag(x) + self.table(x).sum(1))


def test_block_weights_are_matrices_and_no_tables():
    s = Split(Readers(), LinearHead(nn.Linear(4, 3)))
    found = {id(p) for p in block_weights(s)}
    names = {n for n, p in s.trunk.named_parameters() if id(p) in found}
    attention = {"attention.in_proj_weight", "attention.out_proj.weight"}
    assert names == {*attention, "layer.weight", "recurrent.weight_ih_l0", "recurrent.weight_hh_l0"}


def test_conditioned_tangents_learn_with_evolution_too():
    s, magnitude = mlp_split(3, 4, 3), RunningMagnitude()
    optimizer = torch.optim.SGD(s.model.parameters(), lr=0.1)
    learner = GradientLearner(s, EvolutionStrategy(2, law=Conditioned(magnitude)), optimizer)
    learner.step(noise(5, 3), classes(5, count=3), generator=generator())
    assert set(magnitude.state_dict()["mean_square"]) == set(s.trained_params())


def test_frozen_parameters_of_a_black_box_are_not_probed():
    module, runs = nn.Linear(4, 3).double().requires_grad_(False), []
    module.register_forward_hook(lambda *_: runs.append(1))
    s = Split(nn.Linear(3, 4).double(), ProbedHead(module))
    FrozenTrunk()(s, noise(5, 3), classes(5, count=3))  # the first batch is validated, too
    runs.clear()
    FrozenTrunk()(s, noise(5, 3), classes(5, count=3))
    frozen = len(runs)
    module.requires_grad_(True)
    runs.clear()
    FrozenTrunk()(s, noise(5, 3), classes(5, count=3))
    assert len(runs) == frozen + 2 * 15


def test_a_layer_with_a_hook_has_no_closed_form():
    layer = nn.Linear(4, 3)
    layer.register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(SplitError, match="ReverseModeHead"):
        LinearHead(layer)


@pytest.mark.parametrize("chunk", [0, 2.5, True, "all"])
def test_chunks_are_counted(chunk):
    with pytest.raises(SplitError, match="chunk must be at least 1"):
        ForwardMode(chunk)


def test_a_number_among_the_inputs_is_no_empty_batch():
    with pytest.raises(SplitError, match="a single number without rows"):
        SplitFG(2)(mlp_split(3, 4, 3), (noise(5, 3), torch.tensor(0.5)), classes(5, count=3), generator=generator())


def test_a_frozen_trunk_has_nothing_to_diagnose():
    s = mlp_split(3, 4, 3)
    s.trunk.requires_grad_(False)
    with pytest.raises(SplitError, match="no trained parameter to diagnose"):
        diagnose(s, noise(5, 3), classes(5, count=3), generator=generator())


def test_summaries_fit_a_screen():
    """However many parameters there are, and whatever their size."""
    grads = {f"blocks.{i}.weight": torch.zeros(50, 50) for i in range(200)}
    estimate = splitfg.Estimate(torch.tensor(1.5), grads, splitfg.Stats(jvps=4))
    for text in (repr(estimate), repr(splitfg.HeadGradient(torch.tensor(1.5), torch.zeros(3, 4), grads))):
        assert "loss=1.5" in text
        assert "grads of 200 parameters: blocks.0.weight (50, 50)" in text
        assert "192 more" in text
        assert len(text) < 600


class OwnForward(nn.Linear):
    """A linear layer with a forward pass of its own, as timm's."""

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1.01


class OtherBackward(nn.Linear):
    """Returns what nn.Linear does; its gradient is another."""

    def forward(self, x):
        z = super().forward(x)
        return 2 * z - z.detach()


class WithAdapter(nn.Linear):
    """Starts as nn.Linear, and has one more trained parameter."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.adapter = nn.Parameter(torch.zeros(sizes[1], sizes[0]))

    def forward(self, x):
        return super().forward(x) + x @ self.adapter.T


class OnlyInEvaluation(nn.Linear):
    def forward(self, x):
        return super().forward(x + 1 if self.training else x)


@pytest.mark.parametrize("kind", [Scaled, OtherBackward, WithAdapter, OnlyInEvaluation])
def test_subclasses_that_compute_something_else_have_no_closed_form(kind):
    layer = kind(4, 3).eval()
    with pytest.raises(SplitError, match="ReverseModeHead"):
        LinearHead(layer)
    assert not layer.training


def test_a_subclass_that_computes_the_same_has_one():
    layer = OwnForward(4, 3)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), layer)
    x, y = noise(5, 2).float(), classes(5, count=3)
    found = FrozenTrunk()(splitfg.split(model), x, y).grads["2.weight"]
    expected = torch.autograd.grad(torch.nn.functional.cross_entropy(model(x), y), layer.weight)[0]
    torch.testing.assert_close(found, expected)
    assert layer.training
    assert layer.weight.grad is None


@pytest.mark.parametrize("block", [30, 2**20])
def test_statistics_of_rows_in_parts_are_those_of_all_rows(block, monkeypatch):
    layer = seeded(lambda: nn.Linear(4, 7)).double()
    h, y = noise(11, 4), classes(11, count=7)
    whole = LinearHead(layer, block=block)(h, y)
    monkeypatch.setattr("splitfg.heads._cross_entropy._COPIED", 20)
    found = LinearHead(layer, block=block)(h, y)
    torch.testing.assert_close((found.loss, found.u, found.grads), (whole.loss, whole.u, whole.grads))


def test_a_linear_head_copies_a_small_part_of_its_outputs():
    head, h, y = LinearHead(nn.Linear(4, 2**13)), torch.randn(2**10, 4), classes(2**10, count=2**13)
    assert peak_mib(lambda: head(h, y)) < 1.3 * 32  # of the outputs; the gradients are small
