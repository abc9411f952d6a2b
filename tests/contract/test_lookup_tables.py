"""Lookup tables: padding rows, and lookups whose gradient by backprop is not the derivative of what they compute."""

import re

import pytest
import torch
from _refusals import ESTIMATORS, every_estimator, linear_split, refused
from _toolkit import classes, close, generator, noise, seeded
from torch import nn

from splitfg import (
    Backprop,
    CentralDifference,
    ForwardGradient,
    ForwardMode,
    Gaussian,
    LinearHead,
    Orthogonal,
    Split,
    SplitFG,
    split,
)
from splitfg.tangents import Layout


class Lookup(nn.Module):
    def __init__(self, count, width):
        super().__init__()
        self.table, self.mix = nn.Embedding(count, width, padding_idx=0), nn.Linear(width, width)

    def forward(self, tokens):
        return self.mix(self.table(tokens)).tanh()


class Tied(nn.Module):
    """A padded table that is also the read-out."""

    def __init__(self, count, width):
        super().__init__()
        self.trunk, self.head = Lookup(count, width), nn.Linear(width, count, bias=False)
        self.head.weight = self.trunk.table.weight

    def forward(self, tokens):
        return self.head(self.trunk(tokens))


class Scaled(nn.Embedding):
    def forward(self, tokens):
        return 3 * super().forward(tokens)


class Positions(nn.Embedding):
    def forward(self, shape):
        return super().forward(torch.arange(shape[1]).expand(shape))


class Padded(nn.Module):
    """Lookups with a padding row that are not simply those of an nn.Embedding."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.free = kind, nn.Parameter(noise(5, 4))
        self.table = (Scaled if kind == "scaled" else nn.Embedding)(5, 4, padding_idx=0)
        self.positions = Positions(3, 4, padding_idx=1)
        self.table.weight.data[0], self.positions.weight.data[1] = 1.0, 2.0
        if kind == "hook":
            self.table.register_forward_hook(lambda table, args, found: 2 * found)
        self.last = nn.Linear(4, 3)

    def forward(self, tokens):
        return self.last(torch.tanh(self.looked_up(tokens)).mean(1))

    def looked_up(self, tokens):
        if self.kind == "positions":
            return self.table(tokens) + self.positions(tokens.shape)
        if self.kind == "function":
            return nn.functional.embedding(tokens, self.table.weight, padding_idx=0)
        if self.kind == "parameter":
            return nn.functional.embedding(tokens, self.free, padding_idx=1)
        if self.kind == "frequency":
            return nn.functional.embedding(tokens, self.free, scale_grad_by_freq=True)
        if self.kind == "elsewhere":
            return self.table(tokens) + nn.functional.embedding(tokens, self.table.weight)
        return self.table(tokens) @ (self.table.weight.T @ self.free) if self.kind == "product" else self.table(tokens)


class TestTables:
    """Tables whose gradient by backprop is not the derivative of what they compute."""

    tokens, y = classes(8, 3, count=5), classes(8, count=3)

    def split(self, table):
        return linear_split(nn.Sequential(table, nn.Flatten()), width=12)

    @every_estimator
    def test_padding(self, name):
        s = self.split(nn.Embedding(5, 4, padding_idx=0))
        found = ESTIMATORS[name](s, self.tokens, self.y, generator=generator()).grads
        assert not found.get("trunk.0.weight", torch.zeros(5, 4))[0].any()

    def test_padding_is_never_perturbed(self):
        """The exact gradient from P orthogonal tangents equals backprop's, whose padding row is zero."""
        s = self.split(nn.Embedding(5, 4, padding_idx=0))
        s.trunk[0].weight.data[0] = 1.0  # a padding row may hold anything
        expected = Backprop()(s, self.tokens, self.y).grads
        for engine in (ForwardMode(), CentralDifference(step=1e-2)):
            found = SplitFG(20, law=Orthogonal(), engine=engine)(s, self.tokens, self.y, generator=generator())
            close(found.grads, expected, 1e-3)

    @pytest.mark.parametrize("engine", [ForwardMode(), CentralDifference()])
    def test_scores_with_padding(self, engine):
        """d = <g, v> with g from backprop, for a table that the head trains too."""
        model = seeded(lambda: Tied(5, 4)).double()
        s = Split(model.trunk, LinearHead(model.head), tied="include", model=model)
        model.trunk.table.weight.data[0] = 1.0
        x, y = self.tokens, self.tokens
        found = ForwardGradient(3, engine=engine)(s, x, y, generator=generator())
        grads = Backprop()(s, x, y).grads
        layout = Layout.of(s.trained_params())
        v = Gaussian().draw(layout, 3, generator())
        assert grads["trunk.table.weight"][0].any()  # the head's share
        torch.testing.assert_close(found.stats.scores, v @ layout.flatten(grads), rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("kind", ["scaled", "positions", "hook", "function", "parameter"])
    def test_padding_of_unusual_tables(self, kind):
        """Scores are <g, v> with g from autograd; padding rows are not zero."""
        model = seeded(lambda: Padded(kind)).double()
        s, x, y = split(model), self.tokens, self.y
        found = SplitFG(3)(s, x, y, generator=generator())
        assert torch.allclose(found.loss, nn.functional.cross_entropy(model(x), y))
        nn.functional.cross_entropy(model(x), y).backward()
        layout = Layout.of(s.trunk_params())
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        v = Gaussian().draw(layout, 3, generator())
        torch.testing.assert_close(found.stats.scores, v @ layout.flatten(grads), rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("engine", [ForwardMode(), CentralDifference()])
    @pytest.mark.parametrize(
        ("kind", "words"),
        [
            ("frequency", r"F.embedding divides the gradient of free by the frequency.*scale_grad_by_freq=False"),
            ("elsewhere", r"the padding row of table.weight also acts outside of padded lookups.*padding_idx=None"),
            ("product", r"the padding row of table.weight also acts outside of padded lookups.*padding_idx=None"),
        ],
    )
    def test_lookups_that_backprop_differentiates_otherwise(self, kind, words, engine):
        s = split(seeded(lambda: Padded(kind)).double())
        (problem,) = refused(SplitFG(2, engine=engine), s, self.tokens, self.y)
        assert re.search(words, problem)
        assert Backprop()(s, self.tokens, self.y).grads  # it makes a backward pass, as autograd does

    def test_padding_in_a_table_that_is_not_trained(self):
        table = nn.Embedding(5, 4, padding_idx=0).requires_grad_(False)
        s = linear_split(nn.Sequential(table, nn.Flatten(), nn.Linear(12, 4)))
        SplitFG(2)(s, self.tokens, self.y, generator=generator())

    def test_scaled_by_frequency(self):
        (problem,) = refused(SplitFG(2), self.split(nn.Embedding(5, 4, scale_grad_by_freq=True)), self.tokens, self.y)
        assert "scale_grad_by_freq=False" in problem

    def test_rows_that_would_be_shortened_later(self):
        """Rows that are short enough at the first batch."""
        (problem,) = refused(SplitFG(2), self.split(nn.Embedding(5, 4, max_norm=100.0)), self.tokens, self.y)
        assert "max_norm=None" in problem

    @pytest.mark.parametrize("estimator", [Backprop(), Backprop(closed_head=True), SplitFG(20, law=Orthogonal())])
    def test_sparse_gradients_are_made_dense(self, estimator):
        sparse, dense = (self.split(seeded(lambda s=s: nn.Embedding(5, 4, sparse=s))) for s in (True, False))
        dense.head.load_state_dict(sparse.head.state_dict())
        found = estimator(sparse, self.tokens, self.y, generator=generator()).grads
        close(found, Backprop()(dense, self.tokens, self.y).grads, 1e-5)
