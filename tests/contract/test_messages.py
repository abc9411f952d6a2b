"""Models and batches that failed with errors of torch's own: now one SplitError with operator, module and cure."""

import pytest
import torch
from _awkward import awkward_split
from _refusals import linear_split, refused, rows
from _toolkit import TORCH, BackwardAlone, classes, close, exact, generator, noise, seeded
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence
from torch.utils.checkpoint import checkpoint

from splitfg import (
    ActivityFG,
    Backprop,
    CentralDifference,
    CheckpointedBackprop,
    ForwardGradient,
    ForwardMode,
    LinearHead,
    Split,
    SplitError,
    SplitFG,
    diagnose,
    split,
)

Y = classes(5, count=3)


class Rounds(torch.autograd.Function):
    """A backward rule alone."""

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function.apply(x)


class Saving(nn.Module):
    """Gradient checkpointing, as in models of Hugging Face."""

    def __init__(self, reentrant):
        super().__init__()
        self.layer, self.reentrant = nn.Linear(4, 4), reentrant

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


class Packing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(3, 4, batch_first=True)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.layer(packed)[1][-1]


@pytest.mark.parametrize(
    "estimator", [SplitFG(2, engine=ForwardMode(chunk=1)), SplitFG(2), ForwardGradient(1), ActivityFG(2)]
)
@pytest.mark.parametrize("function", [Rounds, BackwardAlone])
def test_a_function_without_a_jvp(function, estimator):
    s = linear_split(nn.Sequential(nn.Linear(3, 4), Applied(function), Applied(function)))
    (problem,) = refused(estimator, s, rows(), Y)
    assert problem.startswith("1 (Applied), 2 (Applied): a torch.autograd.Function has no forward-mode rule")
    assert "CentralDifference()" in problem


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("chunk", [1, None])
def test_gradient_checkpointing(chunk):
    engine = ForwardMode(chunk=chunk)
    (problem,) = refused(
        SplitFG(2, engine=engine), linear_split(nn.Sequential(nn.Linear(3, 4), Saving(True))), rows(), Y
    )
    assert "gradient_checkpointing_disable()" in problem
    s = linear_split(nn.Sequential(nn.Linear(3, 4), Saving(False)))
    if TORCH < (2, 13):  # its checkpoints have no forward-mode rule of either kind
        assert "gradient_checkpointing_disable()" in refused(SplitFG(2, engine=engine), s, rows(), Y)[0]
    else:
        assert SplitFG(2, engine=engine)(s, rows(), Y, generator=generator()).grads


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_backprop_through_reentrant_checkpoints():
    assert (
        "use_reentrant=False"
        in refused(Backprop(), linear_split(nn.Sequential(nn.Linear(3, 4), Saving(True))), rows(), Y)[0]
    )


def test_packing_sequences_in_the_trunk():
    s, x = linear_split(Packing()), (noise(5, 6, 3, dtype=torch.float32), torch.tensor([6, 3, 4, 2, 5]))
    (problem,) = refused(SplitFG(2), s, x, Y)
    assert "pack_padded_sequence" in problem
    assert SplitFG(2, engine=CentralDifference())(s, x, Y, generator=generator()).grads


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ([rows()], "the inputs are a list"),
        (pack_sequence([noise(n, 3, dtype=torch.float32) for n in (3, 2, 1)]), "packed sequence"),
    ],
)
def test_containers(x, words):
    (problem,) = refused(SplitFG(2), linear_split(), x, Y)
    assert words in problem


def test_sparse_inputs():
    (problem,) = refused(SplitFG(2), linear_split(), rows().to_sparse(), Y)
    assert "to_dense()" in problem


class TestModels:
    def model(self):
        return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_scripted(self):
        with pytest.raises(SplitError, match="scripted from"):
            split(torch.jit.script(self.model()))
        with pytest.raises(SplitError, match="scripted from"):
            Split(torch.jit.script(self.model()[:2]), LinearHead(nn.Linear(4, 3)))

    def test_exported(self):
        exported = torch.export.export(self.model(), (rows(),)).module()
        with pytest.raises(SplitError, match="exported from"):
            split(exported)
        trunk = torch.export.export(self.model()[:2], (rows(),)).module()
        assert SplitFG(2)(linear_split(trunk), rows(), Y, generator=generator()).grads

    def test_diagnose_with_a_frozen_head(self):
        model = self.model()
        model[2].requires_grad_(False)
        found = diagnose(split(model), rows(), Y, generator=generator(), draws=2)
        assert (found.energy_ratio, found.head_lost) == (1.0, 0.0)

    def test_checkpoints_in_nested_containers(self):
        s, x, y = awkward_split("nested")
        close(CheckpointedBackprop()(s, x, y).grads, exact(s, x, y))

    def test_representations_fit_on_a_screen(self):
        layers = [nn.Linear(3, 3) for _ in range(100)]
        estimate = SplitFG(1)(split(nn.Sequential(*layers)), rows(), Y, generator=generator())
        assert len(repr(estimate)) < 24 * 80
