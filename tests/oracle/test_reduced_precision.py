"""Networks in bfloat16 and float16: tangents of norms against float64, and clear errors where dtypes do not fit."""

import copy
import importlib
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from _toolkit import classes, generator, noise, seeded
from torch import fx, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from splitfg import (
    ActivityFG,
    Backprop,
    CrossEntropy,
    EvolutionStrategy,
    ForwardGradient,
    ForwardMode,
    GradientLearner,
    LinearHead,
    Split,
    SplitError,
    SplitFG,
    split,
)

REDUCED = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _float32_by_default():
    """Dtypes are the subject here, also of a run with float64 as the default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


class CudaStatistics(TorchDispatchMode):
    """Norms return float32 statistics for a narrower input, as CUDA's kernels do; those of a CPU return narrow ones."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if "norm_backward" in name and args[0].dtype in REDUCED:  # the CPU's kernel takes its own statistics
            args = tuple(a.to(args[0].dtype) if isinstance(a, torch.Tensor) else a for a in args)
        out = func(*args, **(kwargs or {}))
        if "norm" not in name or "backward" in name or not isinstance(out, tuple):
            return out
        return (out[0], *(t.float() if t.dtype in REDUCED else t for t in out[1:]))


class Means(nn.Module):
    """F.rms_norm with its input as a keyword."""

    def forward(self, x):
        return F.rms_norm(input=x, normalized_shape=(x.shape[-1],), eps=1e-5)


class Functional(nn.Module):
    """A norm of torch.nn.functional or torch, called with weights of 8 features or 6 channels."""

    def __init__(self, function, size):
        super().__init__()
        self.function = function
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.ones(size))

    def forward(self, x):
        return self.function(x, self.weight, self.bias, self.mean, self.variance)


class Shifted(nn.Module):
    """A norm whose trained parameter is a shift of its input."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.shift = norm, nn.Parameter(torch.zeros(5, 6, 8, dtype=torch.bfloat16))

    def forward(self, x):
        return self.norm(x + self.shift)


NORMS = {
    "layer": lambda: nn.LayerNorm(8),
    "layer, no weights": lambda: nn.LayerNorm(8, elementwise_affine=False),
    "group": lambda: nn.GroupNorm(2, 6),
    "batch": lambda: nn.BatchNorm1d(6),
    "batch, evaluation": lambda: nn.BatchNorm1d(6).eval(),
    "instance": lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
    "root mean square": lambda: nn.RMSNorm(8, eps=1e-5),
    "a keyword": Means,
    "F.layer_norm": lambda: Functional(lambda x, w, b, m, v: F.layer_norm(x, (8,), w, b), 8),
    "F.rms_norm": lambda: Functional(lambda x, w, b, m, v: F.rms_norm(x, (8,), w, eps=1e-5), 8),
    "F.group_norm": lambda: Functional(lambda x, w, b, m, v: F.group_norm(x, 3, weight=w, bias=b), 6),
    "F.batch_norm": lambda: Functional(lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b), 6),
    "F.instance_norm": lambda: Functional(lambda x, w, b, m, v: F.instance_norm(x, weight=w, bias=b), 6),
    "instance, evaluation": lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True).eval(),
    "torch.batch_norm": lambda: Functional(
        lambda x, w, b, m, v: torch.batch_norm(x, w, b, m, v, training=True, momentum=0, eps=1e-5, cudnn_enabled=True),
        6,
    ),
}


def trunk(norm, dtype):
    """A norm between two linear layers on inputs (5, 6, 8); its weights and running statistics are not their first."""

    def build():
        middle = NORMS[norm]()
        for t in (*middle.parameters(), *(b for b in middle.buffers() if b.is_floating_point())):
            t.data.add_(torch.rand_like(t))
        return nn.Sequential(nn.Linear(8, 8), middle, nn.Linear(8, 8))

    return seeded(build).to(dtype)


def pushed(network, x, v, engine):
    s = Split(network, LinearHead(nn.Linear(8, 3).to(x.dtype)))
    params, _ = s.trunk_params(), s.traits((x,))  # passes write to copies of the buffers that this one writes to
    tangents = {name: t.to(p.dtype) for (name, p), t in zip(params.items(), v, strict=True)}
    with torch.no_grad():
        return engine(s.trunk_function(x), params, tangents)


def inputs_and_tangents(network, K=2):
    x = (noise(5, 6, 8) + 1).bfloat16()
    return x, [noise(K, *p.shape, seed=i).bfloat16() for i, p in enumerate(network.parameters()) if p.requires_grad]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("statistics", [nullcontext, CudaStatistics])
def test_a_norm_computes_its_tangent_in_float32(norm, statistics):
    """J·v of the norm alone is that of float64, rounded to bfloat16 once: to half a unit in the last place."""
    layer = trunk(norm, torch.bfloat16)[1].requires_grad_(False)
    wide = copy.deepcopy(layer).double()
    x, v = (noise(5, 6, 8) + 1).bfloat16(), noise(5, 6, 8, seed=3).bfloat16()

    with statistics():
        h, dh = pushed(Shifted(layer), x, [v.unsqueeze(0)], ForwardMode())
    wide.num_batches_tracked = None  # a counter in place is not differentiable
    _, expected = torch.func.jvp(wide, (x.double(),), (v.double(),))
    assert (h.dtype, dh.dtype) == (torch.bfloat16, torch.bfloat16)
    torch.testing.assert_close(dh[0].double(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("chunk", [1, None])
def test_tangents_pass_through_norms_as_on_cuda(norm, chunk):
    network = trunk(norm, torch.bfloat16)
    x, v = inputs_and_tangents(network, K=1 if chunk else 2)
    with CudaStatistics():
        h, dh = pushed(network, x, v, ForwardMode(chunk))
    _, expected = pushed(network.double(), x.double(), v, ForwardMode())
    assert (h.dtype, dh.dtype) == (torch.bfloat16, torch.bfloat16)
    assert float((dh - expected).norm() / expected.norm()) < 0.01


def compiled_as_eager(network, dtype, estimator):
    """Scores of compiled code, as those of eager code."""
    s = network
    if not isinstance(s, Split):
        s = Split(network, LinearHead(seeded(lambda: nn.Linear(8, 3)).to(dtype)))
    x, y = (noise(5, 6, 8) + 1).to(dtype), classes(5, 6, count=3)
    expected = estimator(s, x, y, generator=generator())
    twin, compiled = estimator.compiled(
        s, lambda f: torch.compile(f, fullgraph=True, dynamic=False, backend="aot_eager")
    )
    found = compiled(twin, x, y, generator=generator())
    torch.testing.assert_close(found.stats.scores, expected.stats.scores, rtol=1e-5, atol=1e-5)
    return twin


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_compiled_tangents_of_mixed_dtypes(dtype):
    """Norms with float32 weights have float32 statistics on a CPU too, and in compiled code."""
    norms = [trunk(norm, dtype)[1].float().requires_grad_(False) for norm in NORMS]
    ends = seeded(lambda: [nn.Linear(8, 8), nn.Linear(8, 8)])
    compiled_as_eager(nn.Sequential(ends[0].to(dtype), *norms, ends[1].to(dtype)), dtype, SplitFG(2))


def test_compiled_tangents_of_a_trunk_that_was_cut_by_tracing():
    class Traced(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
            self.norm = nn.LayerNorm(8).requires_grad_(False)

        def forward(self, x):
            h = F.layer_norm(self.norm(self.first(x)), (8,), self.norm.weight)
            return self.last(self.second(h).tanh())

    s = split(seeded(Traced), at="second")
    assert any(isinstance(module, fx.GraphModule) for module in s.trunk.modules())
    compiled_as_eager(s, torch.float32, SplitFG(2))


@pytest.mark.parametrize("estimator", [SplitFG(2), ForwardGradient(2)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_tangents_through_frozen_norms(dtype, estimator):
    """As in a network with adapters: the weights of the norms carry no tangent."""
    norms = [trunk(norm, dtype)[1].requires_grad_(False) for norm in NORMS]
    ends = seeded(lambda: [nn.Linear(8, 8), nn.Linear(8, 8)])
    compiled_as_eager(nn.Sequential(ends[0], *norms, ends[1]).to(dtype), dtype, estimator)


@pytest.mark.parametrize("frozen", [False, True])
def test_trained_norms_in_float32_compile_as_they_are(frozen):
    graphs = []

    def compile_(f):
        def backend(graph, _):
            graphs.append(graph)
            return graph.forward

        return torch.compile(f, fullgraph=True, dynamic=False, backend=backend)

    network = trunk("layer", torch.float32)
    network[0].bias.requires_grad_(not frozen)
    s = Split(network, LinearHead(nn.Linear(8, 3)))
    twin, compiled = SplitFG(2).compiled(s, compile_)
    compiled(twin, noise(5, 6, 8).float(), classes(5, 6, count=3), generator=generator())
    calls = [node for node in graphs[0].graph.nodes if node.target is F.layer_norm]
    assert [len(node.args) > 2 and node.args[2] is not None for node in calls] == [not frozen]


def test_float32_passes_have_no_mode_around_them():
    depths = []

    class Counting(nn.Module):
        def forward(self, x):
            depths.append(torch._C._len_torch_function_stack())
            return x

    s = split(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), Counting(), nn.Linear(8, 3)))
    x, y = noise(5, 8).float(), classes(5, count=3)
    SplitFG(2)(s, x, y, generator=generator())  # the first batch validates, and looks for attention
    depths.clear()
    SplitFG(2)(s, x, y, generator=generator())
    assert set(depths) == {0}


@pytest.mark.parametrize("estimator", [SplitFG(2), ForwardGradient(2), ActivityFG(2), Backprop()], ids=repr)
def test_a_training_step_as_on_cuda(estimator):
    network = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8))
    s = split(seeded(lambda: nn.Sequential(*network, nn.Linear(8, 3))).bfloat16())
    x, y = noise(16, 8).bfloat16(), classes(16, count=3)
    if isinstance(estimator, ActivityFG):
        s.model.eval()  # batch norm in training mode mixes samples
    with CudaStatistics():
        found = estimator(s, x, y, generator=generator())
    expected = estimator(s, x, y, generator=generator())
    assert {g.dtype for g in found.grads.values()} == {torch.bfloat16}
    for name, g in expected.grads.items():
        assert float((found.grads[name] - g).norm()) <= 0.05 * float(g.norm()) + 1e-3, name


def test_adapters_of_a_bfloat16_gpt2_as_on_cuda():
    pytest.importorskip("transformers")
    sys.path.insert(0, str(Path(__file__).parents[2]))
    lora = importlib.import_module("benchmarks.lora")
    s, batch = lora._built(lora.SMALL, torch.device("cpu"), 2, 8)
    x, y = s.unpack(batch)
    with CudaStatistics():
        found = SplitFG(4, lean=True)(s, x, y, generator=generator())
        exact = Backprop(closed_head=True)(s, x, y)
    v = SplitFG(4)(s, x, y, generator=generator()).stats.scores
    assert {g.dtype for g in found.grads.values()} == {torch.float32} == {g.dtype for g in exact.grads.values()}
    torch.testing.assert_close(found.stats.scores, v, rtol=0.05, atol=0.05 * float(v.abs().max()))


@pytest.mark.parametrize("estimator", [Backprop(), Backprop(closed_head=True), SplitFG(2)], ids=repr)
def test_a_step_with_a_head_in_float64(estimator):
    """Gradients of two dtypes are clipped by one norm."""

    class Cast(nn.Module):
        def forward(self, x):
            return x.double()

    s = split(seeded(lambda: nn.Sequential(nn.Linear(8, 8), Cast(), nn.Linear(8, 3).double())))
    x, y = noise(16, 8).float(), classes(16, count=3)
    grads = estimator(s, x, y, generator=generator()).grads
    total = torch.cat([g.double().flatten() for g in grads.values()]).norm()
    learner = GradientLearner(s, estimator, torch.optim.SGD(s.model.parameters(), lr=0.1), max_norm=float(total) / 2)
    learner.step(x, y, generator=generator())
    for name, p in s.model.named_parameters():
        torch.testing.assert_close(p.grad, grads[name] / 2, rtol=1e-5, atol=1e-6)


class TestMessages:
    class Widened(torch.autograd.Function):
        """Returns a float32 tangent for any output."""

        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return 2 * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def jvp(ctx, tangent):
            return 2 * tangent.float()

    def test_a_rule_with_a_tangent_of_another_dtype(self):
        widened = self.Widened

        class Doubled(nn.Module):
            def forward(self, x):
                return widened.apply(x)

        s = split(nn.Sequential(nn.Linear(8, 8), Doubled(), nn.Linear(8, 8), nn.Linear(8, 3)).bfloat16())
        with pytest.raises(SplitError, match=r"1 \(Doubled\): .*bfloat16 output a tangent in float32.*x\.float\(\)"):
            SplitFG(2)(s, noise(5, 8).bfloat16(), classes(5, count=3), generator=generator())

    @pytest.mark.parametrize("middle", [lambda: nn.Linear(8, 8), lambda: nn.Conv1d(5, 5, 1)])
    def test_a_layer_of_another_dtype(self, middle):
        layers = [nn.Linear(8, 8).bfloat16().requires_grad_(False), nn.Sequential(middle()), nn.Linear(8, 3)]
        s, x = split(nn.Sequential(*layers)), noise(4, 5, 8).bfloat16()
        with pytest.raises(
            SplitError, match=r"1\.0 \((Linear|Conv1d)\).*inputs are bfloat16, its own parameters float32"
        ):
            SplitFG(2)(s, x, classes(4, 5, count=3), generator=generator())

    @pytest.mark.parametrize("estimator", [SplitFG(2), Backprop()], ids=repr)
    def test_h_of_another_dtype_than_the_head(self, estimator):
        s = Split(nn.Linear(8, 8).bfloat16(), LinearHead(nn.Linear(8, 3)))
        with pytest.raises(SplitError, match=r"h in torch\.bfloat16, but the head's parameters are torch\.float32"):
            estimator(s, noise(5, 8).bfloat16(), classes(5, count=3), generator=generator())


@pytest.mark.parametrize("dtype", REDUCED)
@pytest.mark.parametrize("estimator", [Backprop(), ForwardGradient(K=2), EvolutionStrategy(K=2, sigma=0.5)])
@pytest.mark.parametrize("weight", [None, torch.rand(50, generator=torch.Generator().manual_seed(1))])
def test_every_estimator_computes_its_loss_in_float32(dtype, estimator, weight):
    torch.manual_seed(0)
    trunk, last = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 50)
    head = LinearHead(last, loss=CrossEntropy(class_weights=weight))
    network = Split(trunk.to(dtype), head.to(dtype))
    x, y = noise(32, 8).to(dtype), classes(32, count=50)
    found = estimator(network, x, y, generator=generator(0))
    weight = None if weight is None else weight.to(dtype).float()
    logits = last(trunk(x)).float()  # rounded by the network, not by the loss
    assert found.loss.dtype == torch.float32
    torch.testing.assert_close(found.loss, F.cross_entropy(logits, y, weight).detach(), rtol=1e-5, atol=0)
