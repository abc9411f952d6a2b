"""Trunks that cannot work are refused by name: operators without a forward-mode rule, batch statistics, randomness."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from _refusals import ESTIMATORS, every_estimator, linear_split, refused, rows
from _toolkit import BackwardAlone, classes, close, generator, noise, seeded
from torch import nn
from torch.func import jvp

from splitfg import (
    Backprop,
    ForwardGradient,
    ForwardMode,
    Orthogonal,
    ReverseModeHead,
    Role,
    Split,
    SplitError,
    SplitFG,
)
from splitfg.splitting import _kernels
from splitfg.splitting.checks import check_batch


class FusedAttention(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class WeightNormed(nn.Module):
    """An operator without a forward-mode rule, used by a module that wants a keyword."""

    def __init__(self):
        super().__init__()
        self.weight, self.length = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 1))

    def forward(self, x, *, gain):
        return x @ torch._weight_norm(self.weight, self.length, 0) * gain


class Keyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = WeightNormed()

    def forward(self, x):
        return self.norm(x, gain=2.0)


class FunctionalDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x):
        return F.dropout(self.layer(x), 0.5, training=self.training)


class Resampled(nn.Module):
    """Calls an operator without a forward-mode rule."""

    def forward(self, x):
        grid = x.new_zeros(len(x), 1, x.shape[1], 2)
        return nn.functional.grid_sample(x[:, None, None], grid, align_corners=False).flatten(1)


class Attending(nn.Module):
    """Every number of a row is a token."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed, self.attention = nn.Linear(1, 4), nn.MultiheadAttention(4, 2, dropout=dropout, batch_first=True)

    def forward(self, x):
        tokens = self.embed(x.unsqueeze(-1))
        return self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1)


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Linear(1, 4), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    def forward(self, x):
        return self.layer(self.embed(x.unsqueeze(-1))).mean(1)


class Last(nn.Module):
    """The last state of a recurrent layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0][:, -1]


class TestOperators:
    """An operator without a forward-mode rule: name it, name the module, say what to do."""

    x, y = noise(2, 3, 4, dtype=torch.float32), classes(2, 3, count=3)

    def two_layers(self):
        blocks = nn.ModuleDict({"attend": FusedAttention(), "act": nn.Tanh(), "again": FusedAttention()})
        return nn.Sequential(blocks["attend"], blocks["act"], blocks["again"])

    @pytest.mark.parametrize(
        "estimator",
        [
            SplitFG(1),
            SplitFG(3),
            SplitFG(3, engine=ForwardMode(chunk=1)),
            pytest.param(
                ForwardGradient(2),
            ),
        ],
    )
    def test_fused_attention_has_tangents(self, estimator):
        """Passes with tangents run attention as matmul and softmax, and say nothing."""
        estimator(linear_split(self.two_layers()), self.x, self.y, generator=generator())

    def test_a_process_logs_it_once(self, caplog, monkeypatch):
        monkeypatch.setattr(_kernels._Watch, "logged", False)
        plain, attending = linear_split(nn.Linear(4, 4)), linear_split(self.two_layers())
        SplitFG(1)(plain, self.x, self.y, generator=generator())
        assert not caplog.messages
        for _ in range(2):
            SplitFG(2)(attending, self.x, self.y, generator=generator())
        SplitFG(1)(linear_split(self.two_layers()), self.x, self.y, generator=generator())
        (message,) = caplog.messages
        assert message.startswith("attention runs as matmul and softmax in passes with tangents")

    def test_passes_without_tangents_keep_fused_kernels(self):
        used = []

        class Watched(nn.Module):
            def forward(self, x):
                used.append((torch.backends.cuda.flash_sdp_enabled(), torch.backends.mha.get_fastpath_enabled()))
                return F.scaled_dot_product_attention(x, x, x)

        s = linear_split(nn.Sequential(nn.Linear(4, 4), Watched()))
        s.h(self.x)
        assert used.pop() == (True, True)
        jvp(s.trunk_function(self.x), (s.trunk_params(),), (s.trunk_params(),))
        assert used.pop() == (False, False)
        s.h(self.x)
        assert used.pop() == (True, True)

    @pytest.mark.parametrize("make", [lambda: EncoderLayer(), lambda: Attending()], ids=["encoder", "attention"])
    @pytest.mark.parametrize("chunk", [1, None])
    def test_fast_path_of_evaluation(self, make, chunk):
        s, y = linear_split(make().eval()), classes(5, count=3)
        exact = SplitFG(s.count(Role.TRUNK), law=Orthogonal(), engine=ForwardMode(chunk=chunk))
        close(exact(s, rows(), y, generator=generator()).grads, Backprop()(s, rows(), y).grads, 1e-5)
        assert torch.backends.mha.get_fastpath_enabled()

    @pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
    @pytest.mark.parametrize("chunk", [1, None])
    def test_recurrent_layers(self, kind, chunk):
        trunk = seeded(lambda: Last(kind(3, 2, num_layers=2, bidirectional=True, batch_first=True)))
        s, x, y = linear_split(trunk), noise(4, 5, 3, dtype=torch.float32), classes(4, count=3)
        exact = SplitFG(s.count(Role.TRUNK), law=Orthogonal(), engine=ForwardMode(chunk=chunk))
        close(exact(s, x, y, generator=generator()).grads, Backprop()(s, x, y).grads, 1e-4)

    def test_outputs_of_modules_that_are_no_tensors(self):
        """Attention gives None where no weights are asked for; that is not what is in the way."""
        trunk = nn.Sequential(nn.Linear(3, 3), Resampled(), Attending())
        (problem,) = refused(SplitFG(2), linear_split(trunk), rows(), classes(5, count=3))
        assert "grid_sampler_2d" in problem

    def test_a_trunk_that_leaves_torch(self):
        class Numpy(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(3, 4))

            def forward(self, x):
                return torch.from_numpy(x.numpy() @ self.weight.detach().numpy())

        (problem,) = refused(SplitFG(2), linear_split(Numpy()), rows(), classes(5, count=3))
        assert "BlackBoxTrunk" in problem

    def test_other_operators_are_named_too(self):
        trunk = nn.Sequential(nn.Linear(3, 4), nn.Sequential(Resampled()))
        (problem,) = refused(SplitFG(2), linear_split(trunk), rows(), classes(5, count=3))
        assert problem.startswith("1.0 (Resampled)")
        assert "grid_sampler_2d" in problem
        assert "CentralDifference()" in problem

    def test_an_offender_called_with_keywords(self):
        trunk = nn.Sequential(nn.Linear(3, 4), Keyword())
        (problem,) = refused(SplitFG(2), linear_split(trunk), rows(), classes(5, count=3))
        assert problem.startswith("1.norm (WeightNormed)")

    @pytest.mark.parametrize("K", [1, 3])
    def test_a_function_with_a_backward_alone(self, K):
        class Straight(nn.Module):
            def forward(self, x):
                return BackwardAlone.apply(x)

        trunk = nn.Sequential(nn.Linear(3, 4), Straight())
        (problem,) = refused(SplitFG(K), linear_split(trunk), rows(), classes(5, count=3))
        assert problem.startswith("1 (Straight): a torch.autograd.Function has no forward-mode rule")

    def test_errors_of_another_kind_are_left_alone(self):
        class Broken(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(4, 4))

            def forward(self, x):
                raise RuntimeError("a cable is loose")

        with pytest.raises(RuntimeError, match="a cable is loose"):
            SplitFG(2)(linear_split(Broken()), rows(d=4), classes(5, count=3), generator=generator())


class TestModes:
    """Training mode works in a trunk; see tests/oracle/test_training_mode.py."""

    @every_estimator
    @pytest.mark.parametrize(
        ("module", "words"), [(nn.BatchNorm1d(4), "batch statistics"), (nn.Dropout(0.5), "is random in training mode")]
    )
    def test_a_head_in_training_mode(self, name, module, words):
        s = Split(nn.Linear(3, 4), ReverseModeHead(nn.Sequential(nn.Linear(4, 4), module, nn.Linear(4, 3))))
        problem, *_ = refused(ESTIMATORS[name], s, rows(), classes(5, count=3))
        assert problem.startswith(f"module.1 ({type(module).__name__})")
        assert words in problem
        assert ".eval()" in problem

    @pytest.mark.parametrize("module", [nn.BatchNorm1d(4), nn.Dropout(0.5), FunctionalDropout()])
    def test_estimators_that_only_check_the_batch(self, module):
        """An estimator of another package that does not fix the randomness of a step."""
        layers = [module] if isinstance(module, FunctionalDropout) else [nn.Linear(3, 4), module]
        s = linear_split(nn.Sequential(*layers))
        with pytest.raises(SplitError, match=r"\.eval\(\)"):
            check_batch(s, rows(), classes(5, count=3), generator())
        check_batch(linear_split(nn.Sequential(*layers).eval()), rows(), classes(5, count=3), generator())

    @pytest.mark.parametrize(
        "name", ["split_fg", "forward_gradient", "evolution", "frozen", "backprop", "checkpointed"]
    )
    def test_batch_statistics_of_micro_batches(self, name):
        s = linear_split(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4))))
        (problem,) = refused(replace(ESTIMATORS[name], micro_batch=2), s, rows(), classes(5, count=3))
        assert problem.startswith("1 (BatchNorm1d), 2.0 (BatchNorm1d): ")
        assert "micro_batch=None" in problem

    @pytest.mark.parametrize("name", ["frozen", "backprop", "closed", "checkpointed"])
    def test_dropout_without_a_generator(self, name):
        s = linear_split(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)))
        with pytest.raises(SplitError, match="generator="):
            ESTIMATORS[name](s, rows(), classes(5, count=3))

    def test_tensors_that_are_not_registered(self):
        class Counts(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.calls = nn.Linear(3, 4), torch.zeros(())

            def forward(self, x):
                self.calls += 1
                return self.layer(x)

        s = linear_split(nn.Sequential(Counts()))
        (problem,) = refused(SplitFG(2), s, rows(), classes(5, count=3))
        assert "'calls' of 0 (Counts)" in problem
        assert "register_buffer" in problem
        assert s.trunk[0].calls == 0

    def test_parameters_written_in_place(self):
        class Clamped(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.full((3, 4), 5.0))

            def forward(self, x):
                with torch.no_grad():
                    self.weight.clamp_(-1, 1)
                return x @ self.weight

        s = linear_split(Clamped())
        with suppress(SplitError):
            SplitFG(2)(s, rows(), classes(5, count=3), generator=generator())
        assert torch.equal(s.trunk.weight, torch.full((3, 4), 5.0))
