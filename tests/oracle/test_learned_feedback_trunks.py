"""Learned feedback on awkward trunks: its converged gradient is backpropagation's, or an error gives the cure."""

import _learning
import pytest
import torch
from _learning import taught
from _toolkit import DOUBLE, generator
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import splitfg
from splitfg import LearnedFeedback, LinearHead, Split, SplitError
from splitfg.feedback import Direct, Relay
from splitfg.models import MLP
from splitfg.sites import _rule_table, has_layer_gradients, register_rule

ROWS = 40


def inputs(dtype=DOUBLE):
    return torch.randn(ROWS, 5, dtype=DOUBLE, generator=generator()).to(dtype)


def targets():
    return torch.randint(0, 3, (ROWS,), generator=generator(1))


class Trunk(nn.Module):
    """Runs a function of its modules and parameters, which the keywords name."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *x):
        return self.function(self, *x)


def two(function):
    """A trunk of two linear layers a and c."""
    return lambda: Trunk(function, a=nn.Linear(5, 5), c=nn.Linear(5, 5))


def network(make, dtype=DOUBLE):
    torch.manual_seed(0)
    trunk = make().to(dtype)
    width = trunk(inputs(dtype)).shape[-1]
    return Split(trunk, LinearHead(nn.Linear(width, 3).to(dtype)))


def errors(split, x, y, *, route=Relay, steps=80):
    return _learning.errors(split, taught(LearnedFeedback(route=route()), split, x, y, steps), x, y)


def shared_weight():
    first, second = nn.Linear(5, 5), nn.Linear(5, 5)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh())


def called_three_times():
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer)


def registered_twice():
    trunk = two(lambda m, x: m.c(m.again(m.a(x).tanh()).tanh()))()
    trunk.again = trunk.a
    return trunk


def partly_frozen():
    trunk = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5))
    trunk[2].requires_grad_(False)
    trunk[4].weight.requires_grad_(False)
    return trunk


def hooked():
    trunk = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5))
    trunk[0].register_forward_hook(lambda _module, _args, output: 2 * output)
    trunk[2].register_forward_pre_hook(lambda _module, args: (3 * args[0],))
    return trunk


def convolutions():
    def forward(m, x):
        pixels = m.c(x)[:, None, :, None].expand(-1, 1, 5, 5)
        return m.last(m.first(pixels).tanh()).mean(-1).flatten(1)

    first, last = nn.Conv2d(1, 4, 3, padding=1, stride=2), nn.Conv2d(4, 2, 3, padding=(2, 1), dilation=(2, 1))
    return Trunk(forward, c=nn.Linear(5, 5), first=first, last=last)


def nearest(m, x):
    """The nearest entries of a codebook, straight through; distances have no forward-mode rule."""
    z = m.a(x)
    return m.c(z + (m.codes[torch.cdist(z, m.codes).argmin(1)] - z).detach())


def codebook():
    trunk = two(nearest)()
    trunk.register_buffer("codes", torch.randn(4, 5, generator=generator(2)))
    return trunk


def accumulated(m, x):
    """Sums into constants, as loops over experts and messages of graphs do."""
    held = x.new_zeros(len(x), 5)
    for part in (m.a(x), m.c(x)):
        held += part.tanh()
    nodes = torch.arange(len(x)).flip(0)
    return m.c(held) + torch.zeros_like(held).index_add_(0, nodes, m.a(held))


EXACT = {
    "sums into constants": two(accumulated),
    "convolutions with padding by name": lambda: Trunk(
        lambda m, x: m.t(m.s(m.c(x)[:, None, :, None].expand(-1, 1, 5, 5)).tanh()).mean(-1).flatten(1),
        s=nn.Conv2d(1, 2, (3, 5), padding="same", dilation=(2, 1)),
        t=nn.Conv2d(2, 1, (1, 2), padding="valid"),
        c=nn.Linear(5, 5),
    ),
    "resizing": lambda: Trunk(
        lambda m, x: F.interpolate(m.t(m.c(x)[:, None]), scale_factor=1.4).flatten(1)[:, :5],
        t=nn.Conv1d(1, 2, 3, padding="same"),
        c=nn.Linear(5, 5),
    ),
    "a codebook": codebook,
    "layers that share a weight": shared_weight,
    "a layer called three times": called_three_times,
    "a layer registered twice": registered_twice,
    "frozen layers between trained ones": partly_frozen,
    "layers with hooks": hooked,
    "linear layers that follow each other": lambda: nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 5)),
    "channels last": two(lambda m, x: m.c(m.c(m.a(x[:, None, None].expand(-1, 2, 3, 5)))).mean((1, 2))),
    "one layer": lambda: nn.Linear(5, 5),
    "dropout in evaluation mode": lambda: nn.Sequential(
        nn.Linear(5, 6), nn.Dropout().eval(), nn.Linear(6, 6), nn.Tanh(), nn.Dropout().eval(), nn.Linear(6, 5)
    ),
    "layers called by keyword": two(lambda m, x: m.c(input=m.a(input=x).tanh())),
    "functions called by keyword": two(
        lambda m, x: torch.cat(tensors=(torch.add(input=m.a(x), other=1.0), torch.mul(m.a(x), other=m.c(x))), dim=1)
    ),
    "narrow activations": two(lambda m, x: m.c(m.a(x).float().double().tanh() * x)),
    "a reversed subtraction": two(lambda m, x: torch.rsub(m.a(x), m.c(x), alpha=2)),
    "a reciprocal": two(lambda m, x: 1 / (2 + m.a(x).square()) + m.c(x)),
    "a detached branch": two(lambda m, x: m.c(m.a(x).detach()) + m.a(x)),
    "a shape alone": two(lambda m, x: m.a(x).expand_as(m.c(x)) + torch.zeros_like(m.a(x)) + m.c(x)),
    "convolutions": convolutions,
    "frequencies of an embedding": lambda: Trunk(
        lambda m, x: m.e((x > 0).long()).mean(1) + m.a(x),
        e=nn.Embedding(2, 5, scale_grad_by_freq=True),
        a=nn.Linear(5, 5),
    ),
    "a layer that reads a part of a chunk": two(lambda m, x: m.c(m.a(x).repeat(1, 2).chunk(2, -1)[1])),
    "a coupling of two halves": lambda: Trunk(
        lambda m, x: (lambda a, b: torch.cat([a, b * m.c(a).exp()], 1))(*m.a(x).chunk(2, 1)),
        a=nn.Linear(5, 6),
        c=nn.Linear(3, 3),
    ),
    "layers that read the rows of an iteration": two(
        lambda m, x: torch.cat([m.c(part) for part in m.a(x).unflatten(0, (2, -1))])
    ),
    "an exponent that is wider": lambda: Trunk(
        lambda m, x: m.c(torch.sigmoid(m.a(x)) ** torch.arange(1.0, 6.0, dtype=x.dtype)),
        a=nn.Linear(5, 1),
        c=nn.Linear(5, 5),
    ),
    "a parameter with an exponent that is wider": lambda: Trunk(
        lambda m, x: m.c(m.a(x) * m.p.pow(torch.arange(1.0, 6.0, dtype=x.dtype))),
        a=nn.Linear(5, 5),
        c=nn.Linear(5, 5),
        p=nn.Parameter(torch.tensor([0.7])),
    ),
    "limits that are wider": lambda: Trunk(
        lambda m, x: m.c(m.a(x).clamp(min=torch.linspace(-1, 1, 5, dtype=x.dtype))),
        a=nn.Linear(5, 1),
        c=nn.Linear(5, 5),
    ),
    "checkpointed blocks": two(
        lambda m, x: torch.utils.checkpoint.checkpoint(lambda z: m.c(z.tanh()), m.a(x), use_reentrant=False)
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_feedback_converges_to_the_gradient(name):
    found = errors(network(EXACT[name]), inputs(), targets())
    assert max(found.values()) < 1e-4, found


def test_a_wrong_gradient_beside_an_operator_without_forward_mode_raises():
    torch.manual_seed(0)
    trunk = codebook()
    trunk.c.forward = lambda z: 10 * nn.functional.linear(z, trunk.c.weight, trunk.c.bias)
    with pytest.raises(SplitError, match=r"gradients of .*c.weight.* are not the trunk's derivatives"):
        errors(network(lambda: trunk), inputs(), targets())


class Routed(nn.Module):
    """Every row passes through the expert of its first value's sign."""

    def __init__(self):
        super().__init__()
        self.a, self.experts = nn.Linear(5, 5), nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x):
        h, right = self.a(x), x[:, 0] > 0
        rows = [(~right).nonzero()[:, 0], right.nonzero()[:, 0]]
        found = torch.cat([expert(h[own]) for expert, own in zip(self.experts, rows, strict=True)])
        return found[torch.cat(rows).argsort()]


def test_an_expert_without_rows_keeps_its_map():
    s, x, y = network(Routed), inputs(), targets()
    estimator, one_sided = LearnedFeedback(), x.clone()
    one_sided[:, 0] = one_sided[:, 0].abs()
    taught(estimator, s, x, y, 80)
    estimator.update_state(s, estimator(s, one_sided, y, generator=generator()))
    assert all(m.isfinite().all() for m in estimator.route.maps.values())
    found = _learning.errors(s, estimator(s, x, y, generator=generator()), x, y)
    assert max(found.values()) < 1e-4, found


LINEAR = {
    "layers that follow each other": EXACT["linear layers that follow each other"],
    "a layer called three times": lambda: nn.Sequential(*[nn.Linear(5, 5)] * 3),
    "channels last": EXACT["channels last"],
    "dropout in evaluation mode": lambda: nn.Sequential(nn.Linear(5, 6), nn.Dropout().eval(), nn.Linear(6, 5)),
    "a joined branch": two(lambda m, x: torch.cat([m.a(x), m.c(m.a(x))], 1)),
}


@pytest.mark.parametrize("layer", [nn.Linear(5, 5), nn.Conv2d(1, 5, 1)])
def test_a_layer_that_reads_no_rows_raises(layer):
    def forward(m, x):
        h = m.a(x).mean(0)
        return m.a(x) + (m.layer(h) if h.ndim == m.layer.weight.ndim - 1 else m.layer(h[None, None]).mean((1, 2)))

    s = network(lambda: Trunk(forward, a=nn.Linear(5, 5), layer=layer))
    with pytest.raises(SplitError, match=r"layer reads a tensor of shape .* call it on x\.unsqueeze\(0\)"):
        LearnedFeedback()(s, inputs(), targets(), generator=generator())


@pytest.mark.parametrize("name", LINEAR)
def test_direct_feedback_converges_on_linear_trunks(name):
    found = errors(network(LINEAR[name]), inputs(), targets(), route=Direct, steps=200)
    assert max(found.values()) < 1e-4, found


def in_constant(m, x):
    held = x.new_ones(len(x), 5)
    held.mul_(m.a(x))
    return held + m.c(x)


def by_index(m, x):
    held = x.new_zeros(len(x), 5)
    held[:, :] = m.a(x)
    return held + m.c(x)


def without_gradients(m, x):
    z = m.a(x)
    with torch.no_grad():
        size = z.abs().mean(-1, keepdim=True)
    return m.c(z.tanh()) / (1 + size)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return -g


RAISES = {
    "writes into a constant": (two(in_constant), r"in place \(mul\)"),
    "writes by index": (two(by_index), r"in place \(setitem\)"),
    "no_grad": (two(without_gradients), r"no_grad.*detach"),
    "custom backward": (two(lambda m, x: m.c(Reversed.apply(m.a(x)))), "Reversed is a torch.autograd.Function"),
    "complex numbers": (two(lambda m, x: torch.fft.fft(m.a(x)).real + m.c(x)), "real has no closed-form"),
    "bounds that are learned": (two(lambda m, x: torch.clamp(m.a(x), min=m.c(x))), "clamp reads 2 tensors"),
    "exponents that are learned": (two(lambda m, x: (m.a(x).abs() + 1) ** m.c(x)), "pow reads 2 tensors"),
    "fill values that are learned": (two(lambda m, x: m.a(x).masked_fill(x > 0, m.c(x).mean())), "masked_fill reads"),
    "rounded quotients": (
        two(lambda m, x: torch.div(m.a(x), 0.1, rounding_mode="floor") + m.c(x)),
        "rounded quotient: detach it",
    ),
    "other parameters": (
        two(lambda m, x: functional_call(m.c, {"weight": m.c.weight * 2}, (m.a(x).tanh(),))),
        "not its own.*functional_call",
    ),
    "transposed convolutions": (
        lambda: Trunk(
            lambda m, x: m.t(x[:, None, :, None]).flatten(1) + m.c(x), t=nn.ConvTranspose2d(1, 1, 1), c=nn.Linear(5, 5)
        ),
        r"conv_transpose2d multiplies by a parameter outside a layer.*use nn\.Upsample and nn\.Conv2d",
    ),
    "reflected padding": (
        lambda: Trunk(
            lambda m, x: m.t(m.c(x)[:, None, :, None].expand(-1, 1, 5, 5)).mean(-1).flatten(1),
            t=nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"),
            c=nn.Linear(5, 5),
        ),
        "conv2d multiplies by a parameter outside a layer.*padded evenly by zeros",
    ),
    "attention modules": (
        lambda: Trunk(
            lambda m, x: m.t(*[x[:, None]] * 3)[0].squeeze(1),
            t=nn.MultiheadAttention(5, 1, add_zero_attn=True, batch_first=True),
        ),
        r"t \(MultiheadAttention\): attention has no closed form for add_zero_attn",
    ),
    "normalised weights": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, 5)),
        "linear multiplies by a parameter outside a layer",
    ),
}


@pytest.mark.parametrize("name", RAISES)
def test_an_error_instead_of_a_wrong_gradient(name):
    make, match = RAISES[name]
    split = network(make)
    with pytest.raises(SplitError, match=match):
        LearnedFeedback()(split, inputs(), targets(), generator=generator())


def test_convolutions_that_pad_unevenly_are_no_layers():
    assert has_layer_gradients(nn.Conv1d(1, 1, 3, padding="same"))
    assert not has_layer_gradients(nn.Conv1d(1, 1, 4, padding="same"))


def test_a_rule_that_forgets_an_input_raises(monkeypatch):
    monkeypatch.setitem(_rule_table.RULES, "hypot", None)  # restored after the test
    register_rule("hypot", lambda operation, delta: [(operation.args[0], delta)])
    split = network(two(lambda m, x: torch.hypot(m.a(x), m.c(x))))
    with pytest.raises(SplitError, match="hypot reads 2 tensors"):
        LearnedFeedback()(split, inputs(), targets(), generator=generator())


def test_a_parameter_that_a_layer_reads_is_out_of_reach():
    """Its share through the layer is unknown, so that its share along other paths is not its gradient."""

    def make():
        token = nn.Parameter(torch.randn(1, 5))
        return Trunk(lambda m, x: m.a(m.token) + m.c(x) + m.token, a=nn.Linear(5, 5), c=nn.Linear(5, 5), token=token)

    split = network(make)
    with pytest.warns(UserWarning, match=r"does not reach trunk\.token"):
        estimate = LearnedFeedback()(split, inputs(), targets(), generator=generator())
    assert "trunk.token" not in estimate.grads


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_every_dtype(dtype):
    split = network(lambda: MLP(5, widths=(8, 8), generator=generator()), dtype)
    found = errors(split, inputs(dtype), targets())
    assert max(found.values()) < (0.05 if dtype is torch.bfloat16 else 1e-4), found


def test_autocast():
    def forward(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m.c(m.a(x).tanh()).float()

    split = network(two(forward), torch.float32)
    assert max(errors(split, inputs(torch.float32), targets()).values()) < 0.05


def test_a_narrow_part_of_a_wide_trunk():
    split = network(two(lambda m, x: m.c(m.a(x).bfloat16().tanh().double())))
    assert max(errors(split, inputs(), targets()).values()) < 0.05


def test_gradients_under_autocast_have_the_dtype_of_their_parameters():
    split = network(lambda: MLP(5, widths=(8, 8), generator=generator()), torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        grads = LearnedFeedback()(split, inputs(torch.float32), targets(), generator=generator()).grads
    assert {g.dtype for g in grads.values()} == {torch.float32}


def test_maps_follow_a_change_of_dtype():
    split = network(lambda: MLP(5, widths=(8, 8), generator=generator()), torch.float32)
    estimator = LearnedFeedback()
    estimator.update_state(split, estimator(split, inputs(torch.float32), targets(), generator=generator()))
    split.model.double()
    estimator.update_state(split, estimator(split, inputs(), targets(), generator=generator()))
    assert {m.dtype for m in estimator.route.state_dict().values()} == {DOUBLE}


def test_several_inputs():
    trunk = Trunk(lambda m, x, z: m.c((m.a(x) * m.a(z)).tanh()), a=nn.Linear(5, 5), c=nn.Linear(5, 5)).double()
    split = Split(trunk, LinearHead(nn.Linear(5, 3).double()))
    x = (inputs(), inputs().flip(0))
    assert max(errors(split, x, targets()).values()) < 1e-4


class Cut(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b, self.out = nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        z = self.a(x)
        return self.out(z + torch.relu(self.b(self.norm(z))))


@pytest.mark.parametrize("at", [None, "out"])
def test_networks_that_were_cut(at):
    torch.manual_seed(0)
    model = Cut().double()
    splits = [splitfg.split(model) if at is None else splitfg.split(model, at=at) for _ in range(2)]
    for split in splits:  # of one model
        assert max(errors(split, inputs(), targets()).values()) < 1e-4
