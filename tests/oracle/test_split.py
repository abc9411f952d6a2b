"""Cutting a model written without us in mind: the same parameters, the same outputs, the same gradient."""

import copy
import pickle

import pytest
import torch
from _cuts import BackwardsOrder, Deep, Pooled, PostProcessed, built, full_basis, gradient
from _toolkit import TiedLanguageModel, classes, close, cross_entropy, noise, seeded
from torch import nn

from splitfg import (
    LinearHead,
    ProbedHead,
    ReverseModeHead,
    Role,
    Split,
    SplitError,
    SquaredError,
    Tied,
    split,
)


def _by_position(after, zeros):
    """A model whose last layer runs at every position, before ``after``; its weight or bias are zero."""
    model = built(lambda: PostProcessed(after))
    for name in zeros.split(" and "):
        nn.init.zeros_(getattr(model.fc, name))
    return model


class TestLastLinear:
    def test_names_storage_and_outputs_are_the_models(self):
        model = built(Deep).eval()
        s = split(model)
        assert s.model is model
        assert isinstance(s.head, LinearHead)
        assert set(s.roles) == {n for n, _ in model.named_parameters()}
        assert {n for n, r in s.roles.items() if r is Role.HEAD} == {"out.fc.weight", "out.fc.bias"}
        owned = {p.data_ptr() for p in model.parameters()}
        parts = [p.data_ptr() for part in (s.trunk, s.head) for p in part.parameters()]
        assert set(parts) == owned
        assert len(parts) == len(owned)
        x = noise(5, 4)
        torch.testing.assert_close(s.predict(x), model(x).detach())

    def test_gradient_is_the_models(self):
        model, x, y = built(Deep).eval(), noise(5, 4), classes(5, count=3)
        close(full_basis(split(model), x, y), gradient(model, x, y))

    def test_saving_and_loading_just_works(self):
        model, other = built(Deep).eval(), seeded(Deep, seed=1).double().eval()
        s, x = split(model), noise(5, 4)
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(s.predict(x), other(x).detach())
        assert list(s.model.state_dict()) == list(other.state_dict())

    def test_a_step_on_the_model_is_seen(self):
        model, x, y = built(Deep).eval(), noise(5, 4), classes(5, count=3)
        s = split(model)
        before = s.predict(x)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1)
        assert not torch.allclose(s.predict(x), before)
        close(full_basis(s, x, y), gradient(model, x, y))

    def test_model_may_be_cast_afterwards(self):
        model = seeded(Deep).eval()
        s, x, y = split(model), noise(5, 4), classes(5, count=3)
        model.double()
        close(full_basis(s, x, y), gradient(model, x, y))

    def test_training_flag_of_the_root_is_followed(self):
        """Functional dropout reads the flag of a container that had to be copied."""
        model, x = built(Deep), noise(50, 4)
        s = split(model)
        model.eval()
        torch.testing.assert_close(s.h(x), s.h(x))
        model.train()
        assert not torch.allclose(s.h(x), s.h(x))

    def test_freezing_afterwards_is_followed(self):
        model, x, y = built(Deep).eval(), noise(5, 4), classes(5, count=3)
        s = split(model)
        model.blocks[0].requires_grad_(False)
        model.out["fc"].bias.requires_grad_(False)
        frozen = {"blocks.0.weight", "blocks.0.bias", "out.fc.bias"}
        assert {n for n, r in s.roles.items() if r is Role.FROZEN} == frozen
        model_grads = {n: g for n, g in _ungated(model, x, y).items() if n not in frozen}
        close(full_basis(s, x, y), model_grads)

    def test_several_inputs_and_another_loss(self):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.left, self.fc = nn.Linear(3, 4), nn.Linear(4, 1)

            def forward(self, x, scale):
                return self.fc(torch.tanh(self.left(x)) * scale)

        model, x, y = built(Two), (noise(5, 3), noise(5, 1, seed=4)), noise(5, 1, seed=5)
        s = split(model, loss=SquaredError(), example=x)
        params = dict(model.named_parameters())
        loss = 0.5 * (model(*x) - y).square().mean()
        expected = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
        close(full_basis(s, x, y), expected)

    @pytest.mark.parametrize("by_hand", [{}, {"at": "readout"}, {"at": "readout", "head": ReverseModeHead}])
    def test_last_called_rather_than_last_defined(self, by_hand):
        model, x, y = built(BackwardsOrder), noise(5, 4), classes(5, count=3)
        s = split(model, **by_hand)
        assert isinstance(s.head, by_hand.get("head", LinearHead))
        assert {n for n, r in s.roles.items() if r is Role.HEAD} == {"readout.weight", "readout.bias"}
        close(full_basis(s, x, y), gradient(model, x, y))

    def test_a_subclass_that_computes_the_same(self):
        class Readout(nn.Linear):
            pass

        model = built(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Readout(4, 3)))
        x, y = noise(5, 4), classes(5, count=3)
        s = split(model, example=x)
        assert isinstance(s.head, LinearHead)
        close(full_basis(s, x, y), gradient(model, x, y))

    def test_a_subclass_that_computes_something_else(self):
        class Doubled(nn.Linear):
            def forward(self, x):
                return 2 * super().forward(x)

        model = built(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Doubled(4, 3)))
        x, y = noise(5, 4), classes(5, count=3)
        close(full_basis(split(model, at="2", example=x), x, y), gradient(model, x, y))

    def test_what_follows_it_may_be_taken_into_the_head(self):
        model = built(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3), nn.Softmax(dim=-1)))
        x, y = noise(5, 4), classes(5, count=3)
        close(full_basis(split(model, head=ReverseModeHead, example=x), x, y), gradient(model, x, y))

    @pytest.mark.parametrize("zeros", ["bias", "weight and bias"])
    @pytest.mark.parametrize("after", [lambda z: z.sum(1), lambda z: 3 * z[:, 0], lambda z: z.amax(1)])
    def test_zeros_do_not_hide_what_follows(self, zeros, after):
        model, x, y = _by_position(after, zeros), noise(5, 2, 4), classes(5, count=3)
        with pytest.raises(SplitError, match="another operation follows the last linear layer"):
            split(model, example=x)
        close(full_basis(split(model, head=ReverseModeHead, example=x), x, y), gradient(model, x, y))

    @pytest.mark.parametrize("after", [lambda z: z.mean(1), lambda z: z[:, -1]])
    def test_a_layer_of_zeros_before_a_mean(self, after):
        model, x, y = _by_position(after, "weight and bias"), noise(5, 2, 4), classes(5, count=3)
        s = split(model, example=x)
        assert isinstance(s.head, LinearHead)
        close(full_basis(s, x, y), gradient(model, x, y))

    def test_of_a_compiled_model_the_original_is_cut(self):
        model = built(Deep).eval()
        s = split(torch.compile(model))
        assert s.model is model
        x, y = noise(5, 4), classes(5, count=3)
        close(full_basis(s, x, y), gradient(model, x, y))


def _ungated(model, x, y):
    """The gradient of every parameter, frozen or not, through detached copies."""
    leaves = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    loss = cross_entropy(torch.func.functional_call(model, leaves, (x,)), y)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


class TestParts:
    """A split made of a trunk and a head, whose model joins the two."""

    def joined(self):
        def build():
            return Split(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), LinearHead(nn.Linear(4, 4), nn.Linear(4, 2)))

        s = seeded(build)
        s.model.double()
        return s

    def test_names_tell_trunk_from_head(self):
        s = self.joined()
        assert {n.split(".")[0]: r for n, r in s.roles.items()} == {"trunk": Role.TRUNK, "head": Role.HEAD}
        assert str(s) == "Split(trunk=16, head=30)"

    def test_model_evaluates(self):
        s, x = self.joined(), noise(5, 3)
        torch.testing.assert_close(s.model(x), s.predict(x))

    def test_saving_and_loading_just_works(self):
        s, other, x = self.joined(), self.joined(), noise(5, 3)
        with torch.no_grad():
            for p in s.model.parameters():
                p.mul_(1.5)
        other.model.load_state_dict(s.model.state_dict())
        torch.testing.assert_close(other.predict(x), s.predict(x))

    def test_model_is_an_ordinary_module(self):
        """Autograd through it reaches the head's parameters too."""
        s, x, y = self.joined(), noise(5, 3), classes(5, count=2)
        close(full_basis(s, x, y), gradient(s.model, x, y))


class TestMiddle:
    @pytest.mark.parametrize(("head", "tolerance"), [(None, 1e-9), (ReverseModeHead, 1e-9), (ProbedHead, 1e-7)])
    @pytest.mark.parametrize("at", ["out.norm", "out.fc"])
    def test_gradient_is_the_models(self, at, head, tolerance):
        model, x, y = built(Deep).eval(), noise(5, 4), classes(5, count=3)
        s = split(model, at, head=head, example=x)
        assert s.model is model
        close(full_basis(s, x, y), gradient(model, x, y), tolerance)
        trunk = {n for n, r in s.roles.items() if r is Role.TRUNK}
        assert ("out.norm.weight" in trunk) is (at == "out.fc")

    def test_parameters_are_shared(self):
        model, x = built(Deep).eval(), noise(5, 4)
        s = split(model, "out.norm")
        owned = {p.data_ptr() for p in model.parameters()}
        assert {p.data_ptr() for part in (s.trunk, s.head) for p in part.parameters()} == owned
        with torch.no_grad():
            model.out["norm"].weight.mul_(2)
        torch.testing.assert_close(s.predict(x), model(x).detach())

    def test_several_inputs_may_end_in_the_trunk(self):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.left, self.norm, self.fc = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)

            def forward(self, x, scale):
                return self.fc(self.norm(torch.tanh(self.left(x)) * scale))

        model, x, y = built(Two), (noise(5, 3), noise(5, 1, seed=4)), classes(5, count=3)
        close(full_basis(split(model, "norm", example=x), x, y), gradient(model, x, y))

    @pytest.mark.parametrize("head", [ReverseModeHead, ProbedHead])
    def test_h_may_be_an_image(self, head):
        model, x, y = built(Pooled), noise(3, 1, 6, 6), classes(3, count=4)
        close(full_basis(split(model, "second", head=head), x, y), gradient(model, x, y), 1e-6)

    def test_training_flag_of_the_root_is_followed(self):
        model, x = built(Deep), noise(50, 4)
        s = split(model, "out.norm")
        model.eval()
        torch.testing.assert_close(s.h(x), s.h(x))

    def test_a_parameter_on_both_sides_needs_a_policy(self):
        class Gained(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.norm, self.fc = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)
                self.gain = nn.Parameter(torch.tensor(1.5))

            def forward(self, x):
                return self.fc(self.norm(torch.tanh(self.body(x)) * self.gain)) * self.gain

        model, x, y = built(Gained), noise(5, 4), classes(5, count=3)
        with pytest.raises(SplitError, match="share gain"):
            split(model, "norm")
        close(full_basis(split(model, "norm", tied=Tied.INCLUDE), x, y), gradient(model, x, y))


class TestBuffers:
    class Scaled(nn.Module):
        """A buffer that forward reads by itself."""

        def __init__(self):
            super().__init__()
            self.first, self.second, self.out = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
            self.register_buffer("scale", torch.full((5,), 2.0))

        def forward(self, x):
            return self.out(torch.tanh(self.second(self.scale * torch.tanh(self.first(x)))))

    def test_a_traced_cut_reads_the_models_present_buffers(self):
        model = seeded(self.Scaled)
        s = split(model, at="second")
        x = noise(3, 4)
        s.predict(x.float())
        model.double()
        assert s.h(x).dtype == torch.float64
        before = s.h(x)
        model.scale = torch.full((5,), 3.0, dtype=torch.float64)
        torch.testing.assert_close(s.h(x), 1.5 * before)
        torch.testing.assert_close(s.predict(x), model(x).detach())

    def test_a_traced_cut_can_be_copied_and_the_copy_follows_its_own_model(self):
        s = split(seeded(self.Scaled), at="second")
        twin, x = copy.deepcopy(s), noise(3, 4).float()
        for other in (twin, pickle.loads(pickle.dumps(s))):
            torch.testing.assert_close(other.h(x), s.h(x))
            other.model.scale = 3 * s.model.scale
            torch.testing.assert_close(other.h(x), 3 * s.h(x))
            other.model.double()
            assert other.h(x.double()).dtype == torch.float64


class TestTied:
    def test_without_a_policy_it_is_refused(self):
        with pytest.raises(SplitError, match=r"share table\.weight.*Tied\.EXCLUDE.*Tied\.INCLUDE"):
            split(seeded(TiedLanguageModel))

    @pytest.mark.parametrize("policy", list(Tied))
    def test_roles(self, policy):
        s = split(seeded(TiedLanguageModel), tied=policy)
        assert s.roles == {
            "table.weight": Role.TIED,
            "mix.weight": Role.TRUNK,
            "mix.bias": Role.TRUNK,
            "readout.bias": Role.HEAD,
        }
        assert ("table.weight" in s.trunk_params()) is (policy is Tied.INCLUDE)
        assert "table.weight" in s.head_params()
        assert (s.count(Role.TIED), s.count(Role.TRUNK), s.count(Role.HEAD)) == (15, 12, 5)

    @pytest.mark.parametrize("policy", list(Tied))
    def test_a_policy_by_its_name(self, policy):
        by_name = split(seeded(TiedLanguageModel), tied=policy.value)
        assert by_name.tied is policy
        assert Split(by_name.trunk, by_name.head, tied=policy.value, model=by_name.model).tied is policy

    def test_excluded_lookup_reads_the_current_table(self):
        """Only its gradient is left out: h moves with the table."""
        model = seeded(TiedLanguageModel).double()
        s, x = split(model, tied=Tied.EXCLUDE), classes(2, 3, count=5)
        before = s.h(x)
        with torch.no_grad():
            model.table.weight.add_(0.5)
        assert not torch.allclose(s.h(x), before)

    def test_a_frozen_shared_table_needs_no_policy(self):
        model = seeded(TiedLanguageModel)
        model.table.weight.requires_grad_(False)
        assert split(model).roles["table.weight"] is Role.FROZEN
