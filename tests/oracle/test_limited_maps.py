"""Maps whose update bounds the influence of every row, against formulas by hand and a stream with a collapsing norm."""

import pytest
import torch
from _toolkit import DOUBLE, classes, generator, noise, seeded
from torch import nn

from splitfg import DirectPath, LinearHead, MeanJacobian, ResidualPath, Split, SplitError
from splitfg.recipes import MeanJacobianFeedback

D, ROWS = 4, 32


def test_the_rest_of_long_rows_is_shortened_and_of_others_kept():
    maps, e, f = MeanJacobian(limit=1.5), noise(ROWS, D), noise(ROWS, D, seed=1)
    response = noise(ROWS, D, seed=2) * torch.logspace(-1, 3, ROWS, dtype=DOUBLE)[:, None]
    found = maps.correlate({"a": [e], "b": [f]}, response)
    rest, explained = response - e - f, e + f  # maps begin as the identity
    kept = 0
    for i in range(ROWS):
        longest = 1.5 * (2 * D + explained[i].norm() ** 2) ** 0.5
        kept += bool(rest[i].norm() <= longest)
        rest[i] *= min(1.0, longest / rest[i].norm())
    assert 5 < kept < ROWS - 5
    torch.testing.assert_close(found["a"], e.T @ rest)
    torch.testing.assert_close(found["b"], f.T @ rest)


def test_no_row_reaches_a_high_limit_in_an_ordinary_batch():
    e = noise(ROWS, D)
    plain, limited = (MeanJacobian(limit=limit).correlate({"a": [e]}, 2 * e) for limit in (None, 4.0))
    assert torch.equal(plain["a"], limited["a"])


def test_narrow_dtypes_do_not_overflow():
    e = noise(ROWS, D).half()
    found = MeanJacobian(limit=4.0).correlate({"a": [e]}, 60_000 * torch.ones_like(e))["a"]
    assert found.dtype == torch.float32
    assert found.isfinite().all()


class Normed(nn.Module):
    """x_0 = embed(a), x_1 = x_0 + write(norm(x_0)): the derivative of the norm grows as x_0 becomes constant."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.write = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, a):
        x = self.embed(a)
        return x + self.write(self.norm(x))


def batch(seed, collapsed):
    """Inputs; if collapsed, with one row whose x_0 is nearly constant."""
    a = noise(ROWS, D, seed=seed)
    if collapsed:
        a[0] = 1.0 + 1e-4 * a[0]
    return a


def learned(limit, collapsed):
    """The map of the first writer after 60 steps, every tenth of which has a collapsed row."""
    s = seeded(lambda: Split(Normed().to(DOUBLE), LinearHead(nn.Linear(D, 3)).to(DOUBLE)))
    with torch.no_grad():
        s.trunk.embed.weight.copy_(torch.eye(D))
        s.trunk.embed.bias.zero_()
    maps, g, y = MeanJacobian(0.2, limit=limit), generator(), classes(ROWS, count=3)
    estimator = DirectPath(ResidualPath(("embed", "write")), maps)
    for step in range(60):
        estimate = estimator(s, batch(step, collapsed and step % 10 == 9), y, generator=g)
        estimator.update_state(s, estimate)
    return maps.at("embed", torch.eye(D, dtype=DOUBLE))


def test_a_norm_that_collapses_does_not_overturn_the_maps():
    expected = learned(None, collapsed=False)
    far = {limit: (learned(limit, collapsed=True) - expected).norm() / expected.norm() for limit in (None, 1.0)}
    assert far[None] > 1
    assert far[1.0] < 0.5


def test_limits_that_are_not_positive_raise():
    with pytest.raises(ValueError, match="limit must be positive, got 0: use None"):
        MeanJacobian(limit=0)
    with pytest.raises(SplitError, match="limit must be positive, got -1"):
        MeanJacobianFeedback(limit=-1)
    assert MeanJacobianFeedback(limit=4.0).build().limit == 4.0
