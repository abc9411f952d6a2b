"""The promise itself: no backward pass through the trunk, and memory that does not grow with depth or K."""

import weakref

import pytest
import torch
from _toolkit import classes, generator, mlp_split, noise
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from splitfg import (
    Backprop,
    CentralDifference,
    CrossEntropy,
    EvolutionStrategy,
    ForwardGradient,
    ForwardMode,
    FrozenTrunk,
    LinearHead,
    OneSidedDifference,
    Orthogonal,
    ProbedHead,
    Projection,
    ReverseModeHead,
    Role,
    Split,
    SplitFG,
    SquaredError,
)

FORWARD_ONLY = {
    "split_fg": SplitFG(3),
    "split_fg_chunk_1": SplitFG(3, engine=ForwardMode(chunk=1)),
    "split_fg_orthogonal": SplitFG(3, law=Orthogonal()),
    "split_fg_projection": SplitFG(3, engine=ForwardMode(chunk=2), combine=Projection()),
    "split_fg_central": SplitFG(3, engine=CentralDifference()),
    "split_fg_one_sided": SplitFG(3, engine=OneSidedDifference()),
    "split_fg_parts": SplitFG(3, micro_batch=2),
    "split_fg_lean": SplitFG(3, engine=ForwardMode(chunk=1), lean=True),
    "forward_gradient": ForwardGradient(3),
    "evolution": EvolutionStrategy(3),
    "frozen": FrozenTrunk(),
}


class Memory(TorchDispatchMode):
    """Counts the bytes of every storage that any operator returns, for as long as it lives."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._seen = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in _stored((args, kwargs))}
        for t in _stored(result):
            if t.untyped_storage().data_ptr() not in given:
                self._take(t)
        return result

    def _take(self, t):
        storage = t.untyped_storage()
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        weakref.finalize(storage, self._release, size)
        self.live += size
        self.peak, self.largest = max(self.peak, self.live), max(self.largest, t.numel())

    def _release(self, size):
        self.live -= size


def _stored(tree):
    """The tensors of a tree that have memory of their own (a symbolic zero has none)."""
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor) and not t._is_zerotensor()]


class Gains(nn.Module):
    """One gain a feature: hardly any parameters, a whole activation."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.9, 1.1, width))

    def forward(self, x):
        return torch.sin(x * self.gain)


ROWS, WIDTH = 256, 32
ACTIVATION = ROWS * WIDTH * 4


def peak(estimator, depth, head=LinearHead):
    """Peak bytes during one estimate on a trunk of this depth."""
    s = Split(nn.Sequential(*[Gains(WIDTH) for _ in range(depth)]), head(nn.Linear(WIDTH, 3)))
    x, y = noise(ROWS, WIDTH, dtype=torch.float32), classes(ROWS, count=3)
    estimator(s, x, y, generator=generator())
    with Memory() as memory:
        kept = estimator(s, x, y, generator=generator())
    assert memory.peak > ACTIVATION
    assert kept.loss.isfinite()
    return memory.peak


class TestNothingIsSaved:
    @pytest.mark.parametrize("name", FORWARD_ONLY)
    def test_nothing_is_saved_for_backward(self, name):
        def refuse(t):
            raise AssertionError(f"saved a tensor of shape {tuple(t.shape)}")

        s, x, y = mlp_split(3, 4, 4, 3), noise(5, 3), classes(5, count=3)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(refuse, lambda t: t):
            estimate = FORWARD_ONLY[name](s, x, y, generator=generator())
        tensors = [estimate.loss, estimate.stats.scores, *estimate.grads.values(), *estimate.stats.norms.values()]
        assert not any(t.requires_grad for t in tensors)
        assert estimate.stats.trunk_backward == 0

    def test_the_hook_would_notice(self):
        s, x, y = mlp_split(3, 4, 3), noise(5, 3), classes(5, count=3)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            estimate = Backprop()(s, x, y)
        assert saved
        assert estimate.stats.trunk_backward == 1

    @pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
    @pytest.mark.parametrize("name", FORWARD_ONLY)
    def test_autograd_may_be_off(self, name, grad_mode):
        s, x, y = mlp_split(3, 4, 3), noise(5, 3), classes(5, count=3)
        expected = FORWARD_ONLY[name](s, x, y, generator=generator())
        with grad_mode():
            estimate = FORWARD_ONLY[name](s, x, y, generator=generator())
        for n, g in expected.grads.items():
            assert torch.equal(estimate.grads[n], g)

    def test_backprop_works_under_no_grad(self):
        s, x, y = mlp_split(3, 4, 3), noise(5, 3), classes(5, count=3)
        with torch.no_grad():
            inside = Backprop()(s, x, y)
        for n, g in Backprop()(s, x, y).grads.items():
            assert torch.equal(inside.grads[n], g)


class TestMemory:
    def test_one_tangent_at_a_time_is_flat_in_depth(self):
        """Fourteen more layers cost their parameters a few times over, and not one more activation."""
        shallow, deep = (peak(SplitFG(4, engine=ForwardMode(chunk=1)), depth) for depth in (2, 16))
        assert deep - shallow < 14 * 16 * WIDTH * 4
        assert deep - shallow < ACTIVATION

    def test_one_tangent_at_a_time_is_flat_in_k(self):
        few, many = (peak(SplitFG(K, engine=ForwardMode(chunk=1)), 4) for K in (2, 64))
        assert many - few < ACTIVATION / 8

    @pytest.mark.parametrize("chunk", [1, 4])
    def test_tangents_and_sum_are_the_only_vectors_as_long_as_the_trunk(self, chunk):
        """None of them is copied on the way through the trunk."""
        width, depth, rows = 48, 12, 4
        s = mlp_split(*[width] * (depth + 1), 3, dtype=torch.float32)
        x, y = noise(rows, width, dtype=torch.float32), classes(rows, count=3)
        with Memory() as first:
            SplitFG(4, engine=ForwardMode(chunk))(s, x, y, generator=generator())
        with Memory() as memory:
            SplitFG(4, engine=ForwardMode(chunk))(s, x, y, generator=generator())
        assert chunk + 1 < memory.peak / (4 * s.count(Role.TRUNK)) < chunk + 1.5
        # the first batch also runs in float64 with moved parameters, while v and the last ones are still there
        assert first.peak / (4 * s.count(Role.TRUNK)) < max(chunk + 1.5, 4.5)

    @pytest.mark.parametrize("head", [LinearHead, ReverseModeHead])
    def test_lean_keeps_the_heads_gradient_and_activations_apart(self, head):
        """The gradient of a head ten times as large as an activation."""
        s = Split(nn.Sequential(*[Gains(WIDTH) for _ in range(4)]), head(nn.Linear(WIDTH, ROWS * 10)))
        x, y = noise(ROWS // 16, WIDTH, dtype=torch.float32), classes(ROWS // 16, count=3)

        def pushed(lean):
            """Peak bytes while the last tangent is pushed."""
            seen = []

            class Engine(ForwardMode):
                def __call__(self, f, params, tangents):
                    with Memory() as memory:
                        found = super().__call__(f, params, tangents)
                    seen.append(outer.live + memory.peak)
                    return found

            with Memory() as outer:
                SplitFG(2, engine=Engine(chunk=1), lean=lean)(s, x, y, generator=generator())
            return seen[-1]

        saved = pushed(False) - pushed(True)
        assert saved >= 0.99 * 4 * s.count(Role.HEAD)

    def test_measured_tangents_are_flat_in_depth(self):
        shallow, deep = (peak(SplitFG(2, engine=CentralDifference(chunk=1)), depth) for depth in (2, 16))
        assert deep - shallow < ACTIVATION

    def test_reverse_mode_stays_inside_its_head(self):
        shallow, deep = (peak(SplitFG(4, engine=ForwardMode(chunk=1)), d, ReverseModeHead) for d in (2, 16))
        assert deep - shallow < ACTIVATION

    def test_backprop_grows_with_depth(self):
        """At least one activation a layer: the yardstick sees what it should."""
        shallow, deep = (peak(Backprop(), depth) for depth in (2, 16))
        assert deep - shallow > 14 * ACTIVATION

    def test_all_tangents_at_once_grow_with_k(self):
        one, many = (peak(SplitFG(K), 4) for K in (1, 64))
        assert many - one > 32 * ACTIVATION

    def test_micro_batches_bound_memory_by_the_part(self):
        whole, parts = (peak(SplitFG(4, micro_batch=rows), 4) for rows in (None, ROWS // 16))
        assert parts < whole / 3


class TestHeads:
    """A head's own promise: no tape, and never all logits at once."""

    HEADS = (
        LinearHead(nn.Linear(4, 3)),
        LinearHead(nn.Linear(4, 3), nn.Linear(3, 5), loss=CrossEntropy(label_smoothing=0.1), block=4),
        LinearHead(nn.Linear(4, 3), loss=SquaredError()),
        ProbedHead(nn.Linear(4, 3)),
        ReverseModeHead(nn.Linear(4, 3)),
    )

    @pytest.mark.parametrize("head", HEADS, ids=lambda h: type(h).__name__)
    def test_no_tape_is_left(self, head):
        h = noise(6, 4, dtype=torch.float32).requires_grad_()
        y = noise(6, 3, dtype=torch.float32) if isinstance(head.output_loss, SquaredError) else classes(6, count=3)
        result = head(h, y)
        assert not any(t.requires_grad for t in (result.loss, result.u, *result.grads.values()))
        assert h.grad is None
        assert all(p.grad is None for p in head.parameters())

    @pytest.mark.parametrize("head", HEADS[:4], ids=lambda h: type(h).__name__)
    def test_no_tape_is_used(self, head):
        def refuse(t):
            raise AssertionError("saved a tensor")

        h = noise(6, 4, dtype=torch.float32).requires_grad_()
        y = noise(6, 3, dtype=torch.float32) if isinstance(head.output_loss, SquaredError) else classes(6, count=3)
        with torch.autograd.graph.saved_tensors_hooks(refuse, lambda t: t):
            head(h, y)

    @pytest.mark.parametrize("loss", [CrossEntropy(), CrossEntropy(label_smoothing=0.1), SquaredError()])
    def test_logits_of_the_batch_never_exist_at_once(self, loss):
        """Whole rows where they fit, else blocks of columns; no tensor is larger than a block, h or W."""
        n, d, C = 64, 4, 50
        h = noise(n, d, dtype=torch.float32)
        y = noise(n, C, dtype=torch.float32) if isinstance(loss, SquaredError) else classes(n, count=C)
        for block in (n * C, 2500, 800, 300):
            with Memory() as memory:
                LinearHead(nn.Linear(d, C), loss=loss, block=block)(h, y)
            assert 0.8 * block <= memory.largest <= block

    def test_default_block_bounds_the_logits(self):
        """At most 2²⁴ of them at a time, a vocabulary of any size."""
        C, n = 2**21, 20
        head = LinearHead(nn.Linear(1, C, bias=False))
        with Memory() as memory:
            head(noise(n, 1, dtype=torch.float32), torch.zeros(n, dtype=torch.long))
        assert memory.largest <= 2**24
