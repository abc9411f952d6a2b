"""Awkward models: every estimator is right or raises ``SplitError``, and leaves the model bit for bit as it was."""

import re
import warnings
from contextlib import suppress

import pytest
import torch
from _awkward_functions import CLASSES, FUNCTION_MODELS, ROWS, WIDTH, Around
from _awkward_layers import LAYER_MODELS, TRAINING_LAYERS
from _awkward_state import STATE_MODELS, TRAINING_STATE, NestedInputs
from _state import state_of
from _toolkit import TORCH, generator
from torch import nn

from splitfg import (
    ActivityFG,
    Backprop,
    CheckpointedBackprop,
    EvolutionStrategy,
    ForwardGradient,
    ForwardMode,
    FrozenTrunk,
    LearnedFeedback,
    Split,
    SplitError,
    SplitFG,
    split,
)
from splitfg_lab.compatibility import Case, measure

TRAINING_MODELS = {**TRAINING_LAYERS, **TRAINING_STATE}
ALL = {**FUNCTION_MODELS, **STATE_MODELS, **LAYER_MODELS, **TRAINING_MODELS}
NO_RULE = "has no forward-mode rule"
REFUSED = {
    "residual_custom_op": "tripled.default has a backward rule and no forward-mode rule",
    "no_grad_scale": "a tangent passes through torch.no_grad()",
    "sampled": "grid_sampler_2d has no forward-mode rule",
    "reversal": "the backward of Reversal is not the transpose of its jvp",
    "checkpointed_reentrant": "use_reentrant=False",
    "packed": "pack_padded_sequence",
    "bags": "_embedding_bag has no forward-mode rule",
    "sparse_bags": "_embedding_bag has no forward-mode rule",
    "quantised": "has neither a forward-mode rule nor a backward rule",
    "norms": "_SpectralNorm",
    "spectral_norm_training": "_SpectralNorm",
    "energy": "the trunk (Around): forward mode fails",
}
NEVER = {
    "writes_input": "writes to its inputs in place",
    "tied_across": "do not compute the model's outputs",
    "scripted": "is scripted",
    "parameters_in_a_list": "reads first.weight, first.bias from elsewhere than a module's attribute",
    "parameter_in_a_closure": "reads scale from elsewhere than a module's attribute",
    "without_values": "are on the meta device and hold no values",
    "from_inference_mode": "made under torch.inference_mode()",
    "max_norm": "table (Embedding) rescales its own rows in place",
}
if TORCH < (2, 13):
    REFUSED["checkpointed"] = "switch gradient checkpointing off"
HOOKED = ("tensor_hook", "backward_hook", "parameter_hook")
EXACT = tuple(sorted(ALL.keys() - {*REFUSED, *NEVER, *HOOKED}))


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*(weight_norm|TorchScript|torch.jit|quantiz|sparse|None of the inputs have)"
        )
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def case(name):
    def build():
        return ALL[name](), (torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,)))

    return Case("torch", name, build, train=name in TRAINING_MODELS)


def made(name):
    model, (x, y) = case(name).made()
    return split(model, tied="include"), x, y


@pytest.mark.parametrize("name", EXACT)
def test_scores_and_gradients_are_autograds(name):
    """At most 1e-5 in float32, for all that is not refused."""
    wanted = ["SplitFG", "ForwardGradient", "Backprop", "LearnedFeedback"]
    wanted += ["ParallelPull", "ActivityFG"] if "compiled" not in name else []  # its own oracle ignores hooks
    cells = measure(case(name), wanted)
    assert not [cell for cell in cells.values() if cell.status == "failed"]
    assert {cells[n].status for n in wanted[:3]} == {"exact"}
    assert "ActivityFG" not in cells or cells["ActivityFG"].status in ("exact", "refused")
    assert cells["LearnedFeedback"].status == "refused" or cells["LearnedFeedback"].error < 0.05


@pytest.mark.parametrize("name", REFUSED)
def test_forward_mode_says_what_it_cannot_do(name):
    s, x, y = made(name)
    for estimator in (SplitFG(2), ForwardGradient(2)):
        with pytest.raises(SplitError, match=re.escape(REFUSED[name])):
            estimator(s, x, y, generator=generator())


@pytest.mark.parametrize("name", NEVER)
def test_models_that_no_estimator_can_take(name):
    model, (x, y) = case(name).made()
    before = state_of(model)
    for estimator in (FrozenTrunk(), SplitFG(2), Backprop()):
        with pytest.raises(SplitError, match=re.escape(NEVER[name])):
            estimator(split(model, tied="include"), x, y, generator=generator())
    assert state_of(model) == before


@pytest.mark.parametrize("name", HOOKED)
def test_hooks_on_a_backward_pass_that_is_not_made(name):
    s, x, y = made(name)
    with pytest.warns(UserWarning, match="backward hooks of .* do not run"):
        SplitFG(1)(s, x, y, generator=generator())
    SplitFG(1)(s, x, y, generator=generator())  # once
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Backprop()(made(name)[0], x, y)


METHODS = {
    "split_fg": SplitFG(2),
    "one_by_one": SplitFG(2, engine=ForwardMode(chunk=1)),
    "forward_gradient": ForwardGradient(2),
    "activity_fg": ActivityFG(2),
    "learned_feedback": LearnedFeedback(),
    "evolution": EvolutionStrategy(2),
    "backprop": Backprop(),
    "checkpointed": CheckpointedBackprop(),
    "frozen": FrozenTrunk(),
}


@pytest.mark.filterwarnings("ignore:backward hooks")
@pytest.mark.parametrize("name", sorted(ALL.keys() - {*NEVER}))
def test_models_stay_as_they_were_and_no_error_is_raw(name):
    s, x, y = made(name)
    before, rows = state_of(s.model), x.clone()
    for method, estimator in METHODS.items():
        with suppress(SplitError):
            estimator(s, x, y, generator=generator())
        assert state_of(s.model) == before, method
        assert torch.equal(x, rows)


@pytest.mark.parametrize("name", ["derivative_inside", "detached_in_place", "forward_replaced"])
def test_derivatives_that_a_tape_does_not_see(name):
    s, x, y = made(name)
    with pytest.raises(SplitError, match=r"gradients of first.weight.* are not the trunk's derivatives"):
        LearnedFeedback()(s, x, y, generator=generator())


def test_a_function_that_takes_one_tangent_at_a_time():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return 2 * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, g):
            return 2 * g

        @staticmethod
        def jvp(ctx, t):
            return 2 * t

    s = split(Around(Doubled.apply))
    x, y = torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,))
    with pytest.raises(SplitError, match=r"Doubled, a torch.autograd.Function, takes one tangent at a time"):
        SplitFG(2)(s, x, y, generator=generator())
    assert SplitFG(2, engine=ForwardMode(chunk=1))(s, x, y, generator=generator()).grads


def test_nested_inputs():
    torch.manual_seed(0)
    model = NestedInputs()
    x = {"parts": {"a": {"x": torch.randn(ROWS, 2)}, "b": [torch.randn(ROWS, 4)]}}
    y = torch.randint(0, CLASSES, (ROWS,))
    found = Backprop()(split(model), x, y).grads
    nn.functional.cross_entropy(model(**x), y).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad)
    assert SplitFG(2)(split(model), x, y, generator=generator()).grads


def test_a_frozen_scripted_part_is_a_constant_map():
    inner = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).requires_grad_(False))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, CLASSES))
    x, y = torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,))
    found = Backprop()(split(model), x, y).grads["0.weight"]
    nn.functional.cross_entropy(model(x), y).backward()
    torch.testing.assert_close(found, model[0].weight.grad)


def test_trained_scripted_parts_raise():
    inner = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    from splitfg import LinearHead

    with pytest.raises(SplitError, match="is scripted and takes no other parameters"):
        Split(nn.Sequential(inner), LinearHead(nn.Linear(WIDTH, CLASSES)))
