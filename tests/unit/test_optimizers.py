"""Optimizers: Muon for block weights alone, the lagged preconditioner, momentum as a prediction."""

import pytest
import torch
from _steps import made_up, values
from _toolkit import DOUBLE, mlp_split, noise, seeded
from torch import nn

from splitfg import (
    LinearHead,
    Split,
    split,
    write_grads,
)
from splitfg.recipes import SGD, Adam, AdamW, Muon
from splitfg.training import LaggedRMSOptimizer, momentum


class Mixed(nn.Module):
    """A table, positions, a convolution, a norm, matrices with and without bias, and a matrix by another name."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.positions = nn.Parameter(torch.zeros(3, 4))
        self.conv = nn.Conv1d(4, 4, 1)
        self.norm = nn.LayerNorm(4)
        self.blocks = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 4, bias=False)])
        self.fc = nn.Linear(4, 5)

    def forward(self, tokens):
        h = self.table(tokens) + self.positions
        h = self.norm(self.conv(h.mT).mT)
        return self.fc(self.blocks[1](torch.relu(self.blocks[0](h))))


class TestMuon:
    def test_block_weights_alone(self):
        """2-D weights of the trunk's blocks go to Muon; tables, head and everything else to Adam; no decay."""
        model = seeded(Mixed)
        optimizer = Muon(lr=0.1, adjust="original").build(split(model), rho=0.5)
        names = {id(p): n for n, p in model.named_parameters()}
        muon, *rest = optimizer.param_groups
        assert {names[id(p)] for p in muon["params"]} == {"blocks.0.weight", "blocks.1.weight"}
        assert (muon["lr"], muon["step_scale"], muon["weight_decay"], muon["adjust_lr_fn"]) == (
            0.05,
            0.5,
            0.0,
            "original",
        )
        others = {names[id(p)]: g for g in rest for p in g["params"]}
        assert set(others) == set(names.values()) - {"blocks.0.weight", "blocks.1.weight"}
        assert {g["weight_decay"] for g in rest} == {0}
        assert {n: g["lr"] for n, g in others.items() if n in ("fc.weight", "table.weight")} == {
            "fc.weight": 0.1,
            "table.weight": 0.05,
        }

    def test_muon_is_torchs(self):
        """And the rest is torch's Adam."""
        s = mlp_split(3, 4, 3)
        optimizer = Muon(lr=0.1).build(s)
        twin = mlp_split(3, 4, 3)
        weight = twin.trunk[0].weight
        rest = [p for p in twin.model.parameters() if p is not weight]
        muon = torch.optim.Muon([weight], lr=0.1, momentum=0.95, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        adam = torch.optim.Adam(rest, lr=0.1)
        for step in range(3):
            for m in (s, twin):
                write_grads(m.model, made_up(m, seed=step))
            for o in (optimizer, muon, adam):
                o.step()
        for n, p in values(s).items():
            torch.testing.assert_close(p, values(twin)[n])

    def test_where_nothing_is_left_for_adam_it_is_muon(self):
        head = LinearHead(nn.Linear(4, 2).requires_grad_(False))
        s = Split(nn.Sequential(nn.Linear(3, 4, bias=False)), head)
        assert isinstance(Muon().build(s), torch.optim.Muon)

    def test_without_matrices_it_is_adam(self):
        trunk = nn.Sequential(nn.Conv1d(1, 1, 1), nn.Flatten())
        assert isinstance(Muon().build(Split(trunk, LinearHead(nn.Linear(4, 2)))), torch.optim.Adam)


class TestLaggedRMS:
    def optimizer(self, p, **settings):
        return LaggedRMSOptimizer([p], lr=0.5, beta=0.9, eps=1e-3, **settings)

    def test_is_its_formula(self):
        """a_t = clamp(1 / (sqrt(m_{t-1} / (1 - β^{t-1})) + eps)) with m over past gradients only."""
        p, seen = nn.Parameter(noise(4)), []
        optimizer, expected = self.optimizer(p, a_min=0.2, a_max=1.5), p.detach().clone()
        for t in range(5):
            g = noise(4, seed=t)
            if seen:
                weights = torch.tensor([0.1 * 0.9 ** (t - 1 - k) for k in range(t)], dtype=DOUBLE)
                mean_square = (weights @ torch.stack(seen).square()) / (1 - 0.9**t)
                a = (1 / (mean_square.sqrt() + 1e-3)).clamp(0.2, 1.5)
            else:
                a = torch.full((4,), 0.2, dtype=DOUBLE)
            expected = expected - 0.5 * a * g
            p.grad = g
            optimizer.step()
            torch.testing.assert_close(p.detach(), expected)
            seen.append(g)

    def test_counts_on_the_device_and_goes_on_from_a_checkpoint(self):
        """A count that is a tensor of the parameter's device can be captured."""
        p = nn.Parameter(torch.zeros(4, device="meta"))
        p.grad = torch.zeros(4, device="meta")
        optimizer = self.optimizer(p)
        optimizer.step()
        state = optimizer.state_dict()
        state["state"][0]["step"] = torch.tensor(1.0)  # as files give it back
        optimizer.load_state_dict(state)
        optimizer.step()
        assert optimizer.state[p]["step"].device.type == "meta"

    def test_is_predictable(self):
        """What this step's gradient is does not change what it is multiplied by."""
        factors = []
        for last in (1.0, 100.0):
            p = nn.Parameter(noise(4))
            optimizer = self.optimizer(p)
            for g in (noise(4, seed=1), noise(4, seed=2)):
                p.grad = g
                optimizer.step()
            before = p.detach().clone()
            p.grad = torch.full((4,), last, dtype=DOUBLE)
            optimizer.step()
            factors.append((before - p.detach()) / (0.5 * last))
        torch.testing.assert_close(*factors)

    @pytest.mark.parametrize("size", [0.0, 1e-12, 1e12])
    def test_is_bounded(self, size):
        p = nn.Parameter(noise(4))
        optimizer = self.optimizer(p, a_min=0.5, a_max=2.0)
        for _ in range(3):
            p.grad = torch.full((4,), size, dtype=DOUBLE)
            optimizer.step()
        a = optimizer.preconditioner(p, optimizer.param_groups[0])
        assert (a >= 0.5).all()
        assert (a <= 2.0).all()

    def test_closure_and_missing_gradients(self):
        p, q = nn.Parameter(noise(2)), nn.Parameter(noise(2))
        optimizer = LaggedRMSOptimizer([p, q])
        p.grad = noise(2)
        assert optimizer.step(lambda: 7.0) == 7.0
        assert torch.equal(q.detach(), noise(2))

    def test_bounds_must_be_in_order(self):
        with pytest.raises(ValueError, match="a_min <= a_max"):
            LaggedRMSOptimizer([nn.Parameter(noise(2))], a_min=2.0, a_max=1.0)


class TestMomentum:
    """The optimizer's running mean as a prediction: of a constant gradient it must become that gradient."""

    def predicted(self, recipe, steps=300):
        s = mlp_split(3, 4, 3)
        optimizer, g = recipe.build(s), made_up(s)
        for _ in range(steps):
            write_grads(s.model, g)
            optimizer.step()
        return momentum(s, optimizer), g.grads

    @pytest.mark.parametrize(
        "recipe",
        [
            Adam(),
            AdamW(),
            pytest.param(
                SGD(momentum=0.9),
            ),
            pytest.param(
                Muon(),
            ),
        ],
        ids=lambda r: type(r).__name__,
    )
    def test_becomes_a_constant_gradient(self, recipe):
        found, grads = self.predicted(recipe)
        assert set(found) == set(grads)
        for n, g in grads.items():
            torch.testing.assert_close(found[n], g, rtol=1e-3, atol=1e-6)

    def test_nothing_before_the_first_step(self):
        s = mlp_split(3, 4, 3)
        assert momentum(s, Adam().build(s)) == {}
