"""What a split is used for: checkpointed backprop keeps less, a black box is measured."""

import numpy as np
import pytest
import torch
from _cuts import built, gradient
from _toolkit import classes, close, generator, noise
from torch import nn

from splitfg import (
    Backprop,
    BlackBoxTrunk,
    CentralDifference,
    CheckpointedBackprop,
    ForwardMode,
    FrozenTrunk,
    LearnedFeedback,
    LinearHead,
    Orthogonal,
    ReverseModeHead,
    Split,
    SplitError,
    SplitFG,
    split,
)


class TestCheckpointing:
    """Activation checkpointing must keep less, however the split was made."""

    def model(self):
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
        return nn.Sequential(nn.Sequential(*blocks), nn.Linear(8, 3))

    def kept(self, estimator, s):
        x, y = noise(64, 8), classes(64, count=3)
        sizes = []
        estimator(s, x, y)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            estimator(s, x, y)
        return sum(sizes)

    @pytest.mark.parametrize(
        ("cut", "blocks"),
        [
            (lambda m: Split(m[0], LinearHead(m[1])), ("0", "1", "2", "3")),
            (lambda m: split(m), ("0.0", "0.1", "0.2", "0.3")),
        ],
        ids=["parts", "model"],
    )
    def test_keeps_less(self, cut, blocks):
        s = cut(built(self.model))
        assert self.kept(CheckpointedBackprop(blocks=blocks), s) < 0.5 * self.kept(Backprop(), s)

    def test_a_model_that_is_itself_the_container(self):
        model, x, y = built(lambda: self.model()[0].append(nn.Linear(8, 3))), noise(4, 8), classes(4, count=3)
        s = split(model)
        assert self.kept(CheckpointedBackprop(), s) < 0.5 * self.kept(Backprop(), s)
        close(CheckpointedBackprop()(s, x, y).grads, gradient(model, x, y))

    def test_blocks_that_read_a_growing_list(self):
        """As DenseNet's do: when a block runs again, the list has grown."""

        class Layer(nn.Module):
            def __init__(self, width):
                super().__init__()
                self.layer = nn.Linear(width, 2)

            def forward(self, seen):
                return torch.tanh(self.layer(torch.cat(seen, 1)))

        class Dense(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers, self.readout = nn.ModuleList([Layer(3), Layer(5), Layer(7)]), nn.Linear(9, 3)

            def forward(self, x):
                seen = [x]
                for layer in self.layers:
                    seen.append(layer(seen))
                return self.readout(torch.cat(seen, 1))

        model, x, y = built(Dense), noise(4, 3), classes(4, count=3)
        expected, s = gradient(model, x, y), split(model)
        close(CheckpointedBackprop()(s, x, y).grads, expected)
        learned, draws = LearnedFeedback(), generator()
        for _ in range(30):
            learned.update_state(s, learned(s, x, y, generator=draws))
        found = learned(s, x, y, generator=draws).grads
        assert max(float((found[n] - g).norm() / g.norm()) for n, g in expected.items()) < 0.05

    def test_a_block_that_is_not_there(self):
        s = split(built(self.model))
        with pytest.raises(SplitError, match="no module named '7'; did you mean"):
            CheckpointedBackprop(blocks=("7",))(s, noise(4, 8), classes(4, count=3))

    def test_a_traced_trunk_is_refused(self):
        s = split(built(self.model), "1", head=ReverseModeHead)
        with pytest.raises(SplitError, match="cut by tracing"):
            CheckpointedBackprop()(s, noise(4, 8), classes(4, count=3))


class Seen(nn.Module):
    """The black box below, with its inside in sight."""

    def __init__(self, w, b):
        super().__init__()
        self.w, self.b = nn.Parameter(w), nn.Parameter(b)

    def forward(self, x):
        return torch.tanh(x @ self.w) + self.b


class TestBlackBoxTrunk:
    def trunk(self):
        def run(params, x):
            return torch.from_numpy(torch.tanh(x @ params["w"].detach()).numpy()) + params["b"].detach()

        return BlackBoxTrunk(run, {"w": noise(3, 4), "b": noise(4, seed=2)})

    def test_parameters_are_its_own(self):
        given = noise(3, 4)
        trunk = BlackBoxTrunk(lambda p, x: x @ p["w"], {"w": given})
        assert [n for n, _ in trunk.named_parameters()] == ["w"]
        assert trunk.w.data_ptr() != given.data_ptr()
        with pytest.raises(SplitError, match="contains a dot"):
            BlackBoxTrunk(lambda p, x: x, {"a.b": given})

    @pytest.mark.parametrize("name", ["training", "_run", "forward", ""])
    def test_names_that_are_taken(self, name):
        with pytest.raises(SplitError, match=r"is an attribute of nn\.Module"):
            BlackBoxTrunk(lambda p, x: x, {name: noise(3)})

    def test_arguments_in_the_wrong_order(self):
        with pytest.raises(SplitError) as caught:
            BlackBoxTrunk({"w": noise(3)}, lambda p, x: x)
        assert [p.split()[0] for p in caught.value.problems] == ["run", "params"]

    def test_a_box_that_fails_is_told_how_it_is_called(self):
        with pytest.raises((TypeError, KeyError, IndexError)) as caught:
            BlackBoxTrunk(lambda x, params: x @ params["w"], {"w": noise(3, 4)})(noise(5, 3))
        assert "run(params, *inputs)" in caught.value.__notes__[0]

    def test_parameters_that_are_whole_numbers(self):
        with pytest.raises(SplitError, match=r"'w' is torch\.int64: pass floating-point values"):
            BlackBoxTrunk(lambda p, x: x, {"w": torch.arange(3)})

    @pytest.mark.parametrize("micro_batch", [None, 2])
    def test_arrays_in_and_out(self, micro_batch):
        """A user of numpy: arrays as parameters, inputs and h, of which the box computes in another precision."""

        def run(params, x):
            return np.tanh(x.astype(np.float64) @ params["w"].numpy()) + params["b"].numpy()

        w, b, x, y = noise(3, 4).float(), noise(4, seed=2).float(), noise(5, 3).float(), classes(5, count=3)
        head = LinearHead(nn.Linear(4, 3))
        measured = Split(BlackBoxTrunk(run, {"w": w.numpy(), "b": b.numpy()}), head)
        estimator = SplitFG(16, law=Orthogonal(), engine=CentralDifference(), micro_batch=micro_batch)
        found = estimator(measured, x.numpy(), y, generator=generator())
        known = estimator(Split(Seen(w, b), head), x, y, generator=generator())
        close(found.grads, known.grads, 1e-2)
        assert {g.dtype for g in found.grads.values()} == {torch.float32}

    def test_outputs_that_are_no_array(self):
        s = Split(BlackBoxTrunk(lambda p, x: [x], {"w": noise(3)}), LinearHead(nn.Linear(3, 3, dtype=torch.float64)))
        with pytest.raises(SplitError, match="the black box returns a list: return h alone"):
            FrozenTrunk()(s, noise(5, 3), classes(5, count=3))

    def test_writing_to_the_parameters_leaves_them_alone(self):
        def run(params, x):
            params["w"] *= 2
            params["w"].numpy()[:] = 0
            return x @ params["w"]

        s = Split(BlackBoxTrunk(run, {"w": noise(3, 4)}), LinearHead(nn.Linear(4, 3, dtype=torch.float64)))
        SplitFG(2, engine=CentralDifference())(s, noise(5, 3), classes(5, count=3), generator=generator())
        s.h(noise(5, 3))
        assert torch.equal(s.trunk.w, noise(3, 4))

    def test_gradient_is_measured(self):
        s = Split(self.trunk(), LinearHead(nn.Linear(4, 3, dtype=torch.float64)))
        x, y = noise(5, 3), classes(5, count=3)
        like = Split(Seen(noise(3, 4), noise(4, seed=2)), s.head)
        measured = SplitFG(16, law=Orthogonal(), engine=CentralDifference())(s, x, y, generator=generator())
        known = SplitFG(16, law=Orthogonal())(like, x, y, generator=generator())
        close(measured.grads, known.grads, 1e-6)
        assert FrozenTrunk()(s, x, y).loss == pytest.approx(measured.loss.item())
        assert s.predict(x).shape == (5, 3)

    def test_forward_mode_is_refused(self):
        """A device has no derivative; what comes back must not be a silent zero."""
        trunk = BlackBoxTrunk(lambda p, x: torch.tanh(x @ p["w"].detach()), {"w": noise(3, 4)})
        s = Split(trunk, LinearHead(nn.Linear(4, 3, dtype=torch.float64)))
        with pytest.raises(SplitError, match="CentralDifference"):
            SplitFG(4, engine=ForwardMode())(s, noise(5, 3), classes(5, count=3), generator=generator())

    @pytest.mark.parametrize(
        "estimator", [Backprop(), Backprop(closed_head=True), CheckpointedBackprop()], ids=["plain", "closed", "blocks"]
    )
    def test_reverse_mode_is_refused(self, estimator):
        s = Split(self.trunk(), LinearHead(nn.Linear(4, 3, dtype=torch.float64)))
        with pytest.raises(SplitError, match=r"BlackBoxTrunk.*CentralDifference.*FrozenTrunk"):
            estimator(s, noise(5, 3), classes(5, count=3))
