"""One pull needs less memory than checkpointed backpropagation, and writes into no tensor that the caller holds."""

import pytest
import torch
from _toolkit import DOUBLE, classes, generator
from test_estimator_contract import same

from benchmarks._measure import LiveBytes, peak_mib
from splitfg import (
    Backprop,
    CheckpointedBackprop,
    DirectPath,
    Estimate,
    LinearHead,
    MeanJacobian,
    ParallelPull,
    Split,
    Tied,
)
from splitfg.heads import Head
from splitfg.models import GPT, GPTConfig
from splitfg.types import HeadGradient

PULLS = {
    "identity": ParallelPull,
    "maps": lambda: ParallelPull(feedback=MeanJacobian()),
    "groups": lambda: ParallelPull(feedback=MeanJacobian(), group=2),
}


def gpt(layers=16, vocab=6000):
    config = GPTConfig(layers=layers, width=32, heads=2, context=32, vocab=vocab)
    trunk = GPT(config, generator=generator())
    s = Split(trunk, LinearHead(trunk.tied_linear(), block=2**15), tied=Tied.INCLUDE)
    return s, classes(4, 32, count=vocab, seed=1), classes(4, 32, count=vocab, seed=2)


def peak(estimator, s, x, y):
    return peak_mib(lambda: estimator(s, x, y, generator=generator()))


@pytest.mark.parametrize("name", PULLS)
def test_one_pull_needs_less_memory_than_checkpointed_backpropagation(name):
    s, x, y = gpt()
    assert peak(PULLS[name](), s, x, y) < 0.9 * peak(CheckpointedBackprop(closed_head=True), s, x, y)


def sizes(s, estimator, x, y):
    """The peak of an estimate in sizes of the tied table."""
    return peak(estimator, s, x, y) * 2**20 / (s.trunk.token.weight.numel() * 4)


def test_a_pull_holds_one_table_and_backpropagation_two():
    """The head's gradient, which the lookup is added to in place; reverse mode makes a table of the lookup as well."""
    s, x, y = gpt(layers=1, vocab=2**17)
    assert sizes(s, ParallelPull(), x, y) < 1.5
    assert sizes(s, Backprop(closed_head=True), x, y) < 2.5
    assert sizes(s, DirectPath(), x, y) < 2.5


def test_inputs_of_pulled_blocks_are_released():
    """While the first block is pulled, the stream of all others is gone."""
    held = []

    def puller(*arguments, **options):
        held.append(live.now)
        return pull(*arguments, **options)

    s, x, y = gpt(vocab=50)
    pull, stream = ParallelPull().puller, x.numel() * 32 * 4
    estimator = ParallelPull(puller=puller)
    with LiveBytes() as live:
        estimator(s, x, y)
    held.clear()
    with LiveBytes() as live:
        estimate = estimator(s, x, y)
    grown = held[-1] - held[0]  # by the gradients of the blocks above, less their inputs
    made = sum(g.numel() * 4 for name, g in estimate.grads.items() if "blocks" in name)
    assert grown < made - 29 * stream


class Sharing(Head):
    """A linear head whose gradients share memory, as autograd's may; keeps copies of tensors that must not change."""

    def __init__(self, inner):
        super().__init__(inner.output_loss)
        self.inner, self.kept = inner, []

    in_features = property(lambda self: self.inner.in_features)
    out_features = property(lambda self: self.inner.out_features)
    reverse_mode = property(lambda self: False)

    def outputs(self, params, h):
        return self.inner.outputs({n.removeprefix("inner."): p for n, p in params.items()}, h)

    def _exact(self, h, target, normaliser):
        found = self.inner._exact(h, target, normaliser)
        weight = found.grads["0.weight"]
        grads = {"inner.0.weight": weight, "inner.0.bias": weight[:, 0]}
        self.kept += [(found.u, found.u.clone()), (h, h.clone())]
        return HeadGradient(found.loss, found.u, grads)


@pytest.mark.parametrize(
    "estimator", [ParallelPull(), Backprop(closed_head=True), DirectPath()], ids=lambda e: type(e).__name__
)
def test_sums_are_right_if_gradients_of_the_head_share_memory(estimator):
    s, x, y = gpt(layers=2, vocab=300)
    s.model.to(DOUBLE)
    plain = estimator(s, x, y, generator=generator())
    head = Sharing(s.head)
    found = estimator(Split(s.trunk, head, tied=Tied.INCLUDE), x, y, generator=generator())
    own = s.head(s.h(x), y).grads["0.weight"]
    torch.testing.assert_close(found.grads["trunk.token.weight"], plain.grads["trunk.token.weight"])
    torch.testing.assert_close(found.grads["head.inner.0.bias"], own[:, 0])
    assert all(torch.equal(now, before) for now, before in head.kept)


@pytest.mark.parametrize("name", [*PULLS, "backprop"])
def test_estimates_share_no_memory(name):
    estimator = PULLS[name]() if name in PULLS else Backprop(closed_head=True)
    s, x, y = gpt(layers=2, vocab=300)
    first = estimator(s, x, y, generator=generator())
    copied = Estimate(first.loss.clone(), {n: g.clone() for n, g in first.grads.items()}, first.stats)
    for g in estimator(s, x, y, generator=generator()).grads.values():
        g.fill_(7.0)
    assert all(torch.equal(g, copied.grads[n]) for n, g in first.grads.items())
    same(first, estimator(s, x, y, generator=generator()), rtol=0, atol=0)
    starts = [g.untyped_storage().data_ptr() for g in first.grads.values()]
    assert len({*starts, *(p.data_ptr() for p in s.model.parameters())}) == len(starts) + len(
        list(s.model.parameters())
    )
