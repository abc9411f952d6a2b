"""Heads that are not a closed form: reverse mode confined to the head, and a black box that is only probed."""

import pytest
import torch
import torch.nn.functional as F
from _toolkit import DOUBLE, classes, noise, seeded
from torch import nn

from splitfg import CrossEntropy, LinearHead, ProbedHead, ReverseModeHead, SquaredError


def network(d=3, count=4):
    return seeded(lambda: nn.Sequential(nn.Linear(d, 5), nn.Tanh(), nn.Linear(5, count, bias=False)).to(DOUBLE))


class CumulativeReadout(nn.Module):
    """Every position reads all earlier ones."""

    def __init__(self, d=3, count=4):
        super().__init__()
        self.readout = nn.Linear(d, count)

    def forward(self, h):
        return self.readout(torch.tanh(h.cumsum(dim=1)))


class PooledReadout(nn.Module):
    """h has positions, the outputs do not."""

    def __init__(self, d=3, count=4):
        super().__init__()
        self.readout = nn.Linear(d, count)

    def forward(self, h):
        return self.readout(torch.tanh(h).mean(dim=1))


def autograd(module, h, y, criterion):
    h = h.clone().requires_grad_()
    loss = criterion(module(h), y)
    grads = torch.autograd.grad(loss, [h, *module.parameters()])
    return loss.detach(), grads[0], dict(zip([n for n, _ in module.named_parameters()], grads[1:], strict=True))


def rows_cross_entropy(outputs, y):
    return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), y.reshape(-1), label_smoothing=0.1, ignore_index=2)


def rows_squared_error(outputs, y):
    return 0.5 * (outputs - y).square().sum() / y[..., 0].numel()


LOSSES = {
    "cross_entropy": (CrossEntropy(label_smoothing=0.1, ignore_index=2), rows_cross_entropy),
    "squared_error": (SquaredError(), rows_squared_error),
}
HEADS = {"reverse": (ReverseModeHead, 1e-10), "probed": (ProbedHead, 1e-8)}


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e5])
def test_probes_are_as_large_as_what_they_move(scale):
    """In single precision a fixed step would drown in the rounding of a large h."""
    layer = seeded(lambda: nn.Linear(8, 5))
    h, y = scale * noise(6, 8).float(), classes(6, count=5)
    exact, probed = LinearHead(layer)(h, y), ProbedHead(layer)(h, y)
    assert (probed.u - exact.u).norm() < 1e-3 * exact.u.norm()
    weight = exact.grads["0.weight"]
    assert (probed.grads["module.weight"] - weight).norm() < 1e-2 * weight.norm()


def test_a_black_box_may_have_parameters_in_any_layout():
    layer = seeded(lambda: nn.Linear(3, 4).to(DOUBLE))
    turned = nn.Parameter(layer.weight.detach().T.contiguous().T)
    h, y = noise(5, 3), classes(5, count=4)
    expected = ProbedHead(layer)(h, y).grads["module.weight"]
    layer.weight = turned
    torch.testing.assert_close(ProbedHead(layer)(h, y).grads["module.weight"], expected)


@pytest.mark.parametrize("lead", [(6,), (2, 3), (1, 1)])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", HEADS)
def test_nonlinear_head_is_autograd(kind, loss, lead):
    (make, tolerance), (output_loss, criterion) = HEADS[kind], LOSSES[loss]
    module, h = network(), noise(*lead, 3)
    y = classes(*lead, count=4) if loss == "cross_entropy" else noise(*lead, 4, seed=7)
    y.view(-1)[0] = 0  # not every row is ignored
    expected_loss, u, grads = autograd(module, h, y, criterion)
    head = make(module, output_loss)
    result = head(h, y)
    assert head.problems(h, y) == []
    torch.testing.assert_close(result.loss, expected_loss)
    torch.testing.assert_close(result.u, u, rtol=tolerance, atol=tolerance)
    assert set(result.grads) == {f"module.{n}" for n in grads}
    for name, g in grads.items():
        torch.testing.assert_close(result.grads[f"module.{name}"], g, rtol=tolerance, atol=tolerance)
    assert head.reverse_mode is (kind == "reverse")


@pytest.mark.parametrize("kind", HEADS)
def test_a_part_divides_by_the_whole_normaliser(kind):
    make, tolerance = HEADS[kind]
    head, h, y = make(network()), noise(5, 3), classes(5, count=4)
    whole, n = head(h, y), head.normaliser(h, y)
    parts = [head(h[s], y[s], n) for s in (slice(0, 2), slice(2, 5))]
    torch.testing.assert_close(torch.cat([p.u for p in parts]), whole.u, rtol=tolerance, atol=tolerance)
    for name, g in whole.grads.items():
        torch.testing.assert_close(sum(p.grads[name] for p in parts), g, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("together", [1, 2, 32])
def test_probes_do_not_depend_on_how_many_ride_together(together):
    h, y = noise(4, 3), classes(4, count=4)
    expected = ProbedHead(network(), together=3)(h, y)
    # a difference of losses of about 1, rounded to 1e-16, is divided by a step of about 1e-5
    torch.testing.assert_close(ProbedHead(network(), together=together)(h, y).u, expected.u, rtol=0, atol=1e-10)


def test_black_box_outside_torch():
    """A numpy function with parameters of its own: nothing to differentiate, everything measured."""

    def run(params, h):
        return torch.from_numpy(h.numpy() @ params["weight"].numpy().T + params["bias"].numpy())

    layer, h, y = nn.Linear(3, 4, dtype=DOUBLE), noise(5, 3), classes(5, count=4)
    weights = {"weight": layer.weight, "bias": layer.bias}
    expected = LinearHead(layer)(h, y)
    result = ProbedHead(run, params=weights)(h, y)
    torch.testing.assert_close(result.u, expected.u, rtol=1e-7, atol=1e-8)
    for name in weights:
        torch.testing.assert_close(result.grads[name], expected.grads[f"0.{name}"], rtol=1e-7, atol=1e-8)


def test_probing_costs_what_it_says():
    """2 d rows of variants for h, 2 P for the parameters, in as many calls as ``together`` allows."""
    rows = []

    def run(params, h):
        rows.append(h.shape[0])
        return h @ params["w"]

    h, y = noise(5, 3), classes(5, count=2)
    head = ProbedHead(run, params={"w": noise(3, 2)}, together=2)
    n = head.normaliser(h, y)
    rows.clear()
    head(h, y, n)
    loss, probes_of_h, probes_of_w = 1 * 5, 2 * 3 * 5, 2 * 6 * 5
    assert sum(rows) == loss + probes_of_h + probes_of_w


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probe_step_is_sound(dtype):
    """Central differences at eps^(1/3) leave an error of about eps^(2/3): 2.4e-5 in float32, 3.7e-11 in float64."""
    module, h, y = network().to(dtype), noise(6, 3).to(dtype), classes(6, count=4)
    _, u, _ = autograd(network(), h.double(), y, lambda o, t: F.cross_entropy(o, t))
    error = (ProbedHead(module)(h, y).u.double() - u).norm() / u.norm()
    assert error < 30 * torch.finfo(dtype).eps ** (2 / 3)


def test_probe_step_can_be_chosen():
    """The error of a large step is its square's: twice the step, four times the error."""
    h, y = noise(6, 3), classes(6, count=4)
    _, u, _ = autograd(network(), h, y, lambda o, t: F.cross_entropy(o, t))
    coarse, fine = ((ProbedHead(network(), step=s)(h, y).u - u).norm().item() for s in (0.1, 0.05))
    assert coarse / fine == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize(
    "readout",
    [
        pytest.param(
            CumulativeReadout,
        ),
        pytest.param(
            PooledReadout,
        ),
    ],
)
def test_probed_head_that_mixes_positions_is_right_or_refused(readout):
    """u of a head in which one position's loss depends on another's h: never silently wrong."""
    module, h = seeded(readout).to(DOUBLE), noise(2, 3, 3)
    y = classes(2, 3, count=4) if readout is CumulativeReadout else classes(2, count=4)
    expected = ReverseModeHead(module)(h, y)
    torch.testing.assert_close(ProbedHead(module)(h, y).u, expected.u, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", HEADS)
def test_head_that_pools_positions_accepts_one_target_per_sample(kind):
    head = HEADS[kind][0](seeded(PooledReadout).to(DOUBLE))
    assert head.problems(noise(2, 3, 3), classes(2, count=4)) == []


@pytest.mark.parametrize("settings", [{"step": 0.0}, {"step": -1.0}, {"together": 0}])
def test_probe_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ValueError, match=r"step|together"):
        ProbedHead(network(), **settings)
