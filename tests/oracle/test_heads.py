"""Closed-form heads against autograd in float64, and against forward error bounds in narrower precision."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from _toolkit import DOUBLE, classes, generator, noise
from hypothesis import given, settings, strategies as st
from torch import nn

from splitfg import CrossEntropy, LinearHead, SplitError, SquaredError

IGNORED = -1


def linear(fan_in, fan_out, bias, g):
    layer = nn.Linear(fan_in, fan_out, bias=bias, dtype=DOUBLE)
    for p in layer.parameters():
        p.data = torch.randn(p.shape, generator=g, dtype=DOUBLE)
    return layer


@st.composite
def heads(draw, loss):
    """A head of one to three layers, h with up to three leading dimensions, and a limit on the outputs at once."""
    g = generator(draw(st.integers(0, 2**16)))
    widths = draw(st.lists(st.integers(1, 6), min_size=2, max_size=4))
    layers = [linear(a, b, draw(st.booleans()), g) for a, b in pairwise(widths)]
    lead = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    h = torch.randn(*lead, widths[0], generator=g, dtype=DOUBLE)
    if draw(st.booleans()):  # the same values in another memory order
        h = h.movedim(-1, 0).contiguous().movedim(0, -1)
    count = h[..., 0].numel()
    block = draw(st.none() | st.integers(1, 7 * (count + 1)))
    return LinearHead(*layers, loss=loss, **({} if block is None else {"block": block})), layers, h, g


def autograd(layers, h, criterion):
    """Loss, u and gradients by reverse mode through torch's own layers."""
    h = h.detach().clone().requires_grad_()
    params = [p for layer in layers for p in layer.parameters()]
    loss = criterion(nn.Sequential(*layers)(h))
    grads = torch.autograd.grad(loss, [h, *params])
    return loss.detach(), grads[0], list(grads[1:])


def agree(result, expected, head, rtol=1e-9):
    loss, u, grads = expected
    torch.testing.assert_close(result.loss, loss, rtol=rtol, atol=rtol)
    torch.testing.assert_close(result.u, u, rtol=rtol, atol=rtol)
    names = [n for n, _ in head.named_parameters()]
    assert list(result.grads) == names
    for name, g in zip(names, grads, strict=True):
        torch.testing.assert_close(result.grads[name], g, rtol=rtol, atol=rtol)


def some_targets(shape, count, g, ignore):
    y = torch.randint(0, count, shape, generator=g)
    if ignore and y.numel() > 1:
        y[torch.rand(shape, generator=g) < 0.4] = IGNORED
        y.view(-1)[0] = 0
    return y


@settings(max_examples=100)
@given(data=st.data(), smoothing=st.sampled_from([0.0, 0.1, 0.9]), ignore=st.booleans(), weighted=st.booleans())
def test_cross_entropy_head_is_autograd(data, smoothing, ignore, weighted):
    """Every mixture of ignored rows, class weights and smoothing, over shapes, depths, biases and blocks."""
    head, layers, h, g = data.draw(heads(CrossEntropy()))
    count = head.out_features
    # Multiples of 1/8 add up without rounding in float32, in which the normaliser is kept.
    weights = torch.randint(1, 9, (count,), generator=g) / 8 if weighted else None
    head.output_loss = CrossEntropy(ignore_index=IGNORED, class_weights=weights, label_smoothing=smoothing)
    y = some_targets(h.shape[:-1], count, g, ignore)
    assert head.problems(h, y) == []

    def criterion(outputs):
        w = None if weights is None else weights.double()
        return F.cross_entropy(
            outputs.reshape(-1, count), y.reshape(-1), weight=w, ignore_index=IGNORED, label_smoothing=smoothing
        )

    agree(head(h, y), autograd(layers, h, criterion), head)


@given(data=st.data(), weighted=st.booleans(), smoothing=st.sampled_from([0.0, 0.3]))
def test_parts_add_up_to_the_whole(data, weighted, smoothing):
    """With the normaliser of the whole batch, the losses and gradients of parts are its summands."""
    head, _, h, g = data.draw(heads(CrossEntropy()))
    weights = torch.randint(1, 9, (head.out_features,), generator=g) / 8 if weighted else None
    head.output_loss = CrossEntropy(ignore_index=IGNORED, class_weights=weights, label_smoothing=smoothing)
    y = some_targets(h.shape[:-1], head.out_features, g, ignore=True)
    cut = data.draw(st.integers(0, h.shape[0]))
    whole, n = head(h, y), head.normaliser(h, y)
    parts = [head(h[s], y[s], n) for s in (slice(0, cut), slice(cut, None)) if h[s].numel()]
    torch.testing.assert_close(sum(p.loss for p in parts), whole.loss)
    torch.testing.assert_close(torch.cat([p.u for p in parts]), whole.u)
    for name, expected in whole.grads.items():
        torch.testing.assert_close(sum(p.grads[name] for p in parts), expected)


@given(data=st.data())
def test_squared_error_head_is_autograd(data):
    """L = 1/(2N) Σ ‖ŷ - y‖² with N the number of rows, whatever the leading dimensions."""
    head, layers, h, g = data.draw(heads(SquaredError()))
    y = torch.randn(*h.shape[:-1], head.out_features, generator=g, dtype=DOUBLE)
    if head.out_features == 1 and data.draw(st.booleans()):
        y = y.squeeze(-1)
    assert head.problems(h, y) == []

    def criterion(outputs):
        return 0.5 * (outputs - y.reshape(outputs.shape)).square().sum() / h[..., 0].numel()

    agree(head(h, y), autograd(layers, h, criterion), head)


@given(data=st.data(), smoothing=st.sampled_from([0.0, 0.2]))
def test_differentiable_loss_and_rows_agree_with_the_closed_form(data, smoothing):
    """What other estimators differentiate or probe is the same loss."""
    head, _, h, g = data.draw(heads(CrossEntropy(ignore_index=IGNORED, label_smoothing=smoothing)))
    y = some_targets(h.shape[:-1], head.out_features, g, ignore=True)
    n, loss = head.normaliser(h, y), head(h, y).loss
    torch.testing.assert_close(head.loss(head.params(), h, y, n), loss)
    outputs = head.predict(h).detach().reshape(-1, head.out_features)
    torch.testing.assert_close(head.output_loss.rowwise(outputs, y.reshape(-1)).sum() / n, loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [2**22, 21, 6])
def test_narrow_precision_stays_within_its_rounding(dtype, block):
    """A forward error bound, entry by entry, against float64 on the same stored values.

    With unit roundoff e, logits carry Δz <= e |z| + d 2⁻²⁴ |h| |W|ᵀ; a softmax of logits off by Δz is off by a
    factor within exp(±2 max Δz); δ, the products and the results are each rounded once more.
    """
    n, d, C = 12, 16, 7
    layer, h, y = nn.Linear(d, C), noise(n, d), classes(n, count=C)
    layer.weight.data, layer.bias.data = noise(C, d, seed=4), noise(C, seed=5)
    head, h = LinearHead(layer, block=block).to(dtype), h.to(dtype)
    result = head(h, y)
    wide, W, b = h.double(), layer.weight.detach().double(), layer.bias.detach().double()

    e, tiny = torch.finfo(dtype).eps / 2, 2.0**-24
    z = wide @ W.T + b
    size = wide.abs() @ W.abs().T + b.abs()
    dz = (2 * e * z.abs() + 2 * d * tiny * size).max()
    p = z.softmax(1)
    delta = (p - F.one_hot(y, C)) / n
    slack = (torch.expm1(2 * dz) * p / n + 3 * e * delta.abs()) * (1 + 2 * e) + n * tiny / n

    def within(actual, expected, bound):
        allowed = bound + 2 * e * expected.abs() + n * 2 * e * bound + 1e-12
        assert ((actual.double() - expected).abs() <= allowed).all()
        assert allowed.norm() < (0.5 if dtype is torch.bfloat16 else 5e-4) * expected.norm()  # not vacuous

    within(result.u, delta @ W, (slack + e * delta.abs()) @ W.abs())
    within(result.grads["0.weight"], delta.T @ wide, (slack + e * delta.abs()).T @ wide.abs())
    within(result.grads["0.bias"], delta.sum(0), slack.sum(0))
    assert result.loss.dtype == torch.float32
    assert abs(result.loss.double() - F.cross_entropy(z, y)) <= 2 * dz + 1e-5
    assert {g.dtype for g in result.grads.values()} == {dtype} == {result.u.dtype}


def test_bfloat16_sums_are_kept_in_float32():
    """4096 equal rows one at a time: a running sum in bfloat16 would stop growing at 256 of them."""
    n, layer = 4096, nn.Linear(2, 3)
    h, y = noise(1, 2).expand(n, 2).bfloat16(), torch.zeros(n, dtype=torch.long)
    result = LinearHead(layer.bfloat16(), block=1)(h, y)
    one = LinearHead(layer)(h[:1], y[:1])
    for name, expected in one.grads.items():
        torch.testing.assert_close(result.grads[name], expected, rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(result.loss, one.loss, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block", [2**22, 2**14, 5000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_many_outputs_in_aligned_parts_are_autograd(block, smoothing):
    """A vocabulary that is no multiple of anything: aligned products, a narrow rest, blocks of columns."""
    g, C = generator(), 2311
    layer, h = linear(5, C, True, g), torch.randn(7, 5, generator=g, dtype=DOUBLE)
    y = some_targets((7,), C, g, ignore=True)
    head = LinearHead(layer, loss=CrossEntropy(ignore_index=IGNORED, label_smoothing=smoothing), block=block)

    def criterion(outputs):
        return F.cross_entropy(outputs, y, ignore_index=IGNORED, label_smoothing=smoothing)

    agree(head(h, y), autograd([layer], h, criterion), head)


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_loss_does_not_feel_a_common_shift_of_the_logits(shift):
    """Softmax is blind to it; float32 must not lose the loss's digits to it (torch's own does not)."""
    layer, h, y = nn.Linear(4, 3), torch.zeros(2, 4), torch.tensor([0, 2])
    layer.bias.data = torch.tensor([0.0, 1.0, 2.0]) + shift
    assert LinearHead(layer)(h, y).loss.item() == pytest.approx(F.cross_entropy(layer(h), y).item(), rel=1e-5)


def test_confident_logits_give_a_finite_loss():
    """exp would overflow without the maximum taken off."""
    layer, y = nn.Linear(1, 2, bias=False), torch.tensor([0, 1])
    layer.weight.data = torch.tensor([[1e4], [-1e4]])
    result = LinearHead(layer)(torch.ones(2, 1), y)
    assert result.loss.item() == pytest.approx(1e4)
    assert all(torch.isfinite(g).all() for g in result.grads.values())


def test_class_weights_keep_float64():
    layer, h, y = nn.Linear(3, 5, dtype=DOUBLE), noise(20, 3), classes(20, count=5)
    weights = noise(5, seed=3).abs()
    expected = F.cross_entropy(layer(h), y, weight=weights).item()
    assert LinearHead(layer, loss=CrossEntropy(class_weights=weights))(h, y).loss.item() == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.parametrize(
    ("dtype", "count", "label"), [(torch.uint8, 200, 156), (torch.uint8, 1000, 3), (torch.int8, 300, 5)]
)
def test_narrow_integer_targets_mean_what_they_say(dtype, count, label):
    """-100 is no uint8, and C no int8: labels must be widened before they are compared."""
    layer, h = nn.Linear(3, count, dtype=DOUBLE), noise(2, 3)
    y = torch.tensor([label, 1], dtype=dtype)
    expected = F.cross_entropy(layer(h), y.long()).item()
    assert LinearHead(layer)(h, y).loss.item() == pytest.approx(expected)


def test_head_shares_its_layers():
    layers = nn.Linear(3, 4), nn.Linear(4, 2)
    head = LinearHead(*layers)
    assert head.layers == layers
    assert [p.data_ptr() for p in head.parameters()] == [p.data_ptr() for layer in layers for p in layer.parameters()]
    assert (head.in_features, head.out_features, head.reverse_mode) == (3, 2, False)


def test_heads_that_cannot_work_are_refused():
    with pytest.raises(SplitError) as caught:
        LinearHead(nn.Linear(3, 4), nn.Linear(5, 2), block=0)
    assert [w in str(caught.value) for w in ("returns 4 features", "block must be at least 1")] == [True, True]
    with pytest.raises(SplitError, match="at least one"):
        LinearHead()
    with pytest.raises(ValueError, match="label_smoothing"):
        CrossEntropy(label_smoothing=1.0)
