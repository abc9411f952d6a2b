"""What a step on an ONNX graph keeps in memory: layers' outputs and what layers read, nothing between them."""

import numpy as np
import pytest
import torch
from _onnx_graphs import model, random
from onnx import helper
from torch import nn

import splitfg
from splitfg.hardware import Twin
from splitfg.hardware._fused import Fused, fuse
from splitfg.onnx import OnnxTrunk

ROWS, WIDTH = 64, 32


def hard_swish_network():
    """Two layers, each followed by HardSwish in four operators, as exporters write it; a skip around the second."""
    rng, node = np.random.default_rng(0), helper.make_node
    weights = {f"w{i}": random(rng, WIDTH, WIDTH) for i in range(2)}
    weights |= {"three": np.float32(3), "six": np.float32(6), "zero": np.float32(0), "gain": random(rng, WIDTH)}
    nodes, reads = [], "x"
    for i in range(2):
        nodes += [
            node("MatMul", [reads, f"w{i}"], [f"z{i}"]),
            node("Mul", [f"z{i}", "gain"], [f"g{i}"]),
            node("Add", [f"g{i}", "three"], [f"p{i}"]),
            node("Clip", [f"p{i}", "zero", "six"], [f"c{i}"]),
            node("Mul", [f"g{i}", f"c{i}"], [f"m{i}"]),
            node("Div", [f"m{i}", "six"], [f"a{i}"]),
        ]
        reads = f"a{i}"
    nodes.append(node("Add", ["a0", "a1"], ["h"]))
    return model(nodes, weights, {"x": ["rows", WIDTH]}, {"h": ["rows", WIDTH]})


def trained(trunk):
    return {id(p): name for name, p in trunk.named_parameters()}


def held_bytes(tape):
    tensors = [t for o in tape.operations for t in (o.output, *o.args) if isinstance(t, torch.Tensor) and t.ndim == 2]
    rows = [t for t in tensors if t.shape[0] == ROWS]
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in rows}.values())


def test_a_tape_keeps_nothing_inside_chains_of_functions():
    trunk = OnnxTrunk(hard_swish_network(), cut="h", threads=1)
    x = torch.randn(ROWS, WIDTH)
    tape = trunk.tape((x,), trained(trunk))
    assert [o.output.shape[0] for o in tape.operations] == [ROWS] * 5  # two layers, two chains, the sum
    one = ROWS * WIDTH * 4
    assert held_bytes(tape) == 6 * one  # z, a of both layers, h, and x
    assert len(trunk.wiring.nodes) == 13


def test_a_chain_computes_what_its_functions_do_forward_and_backward():
    trunk = OnnxTrunk(hard_swish_network(), cut="h", threads=1)
    nodes = trunk.places(trained(trunk))
    chain = nodes[1].call
    assert isinstance(chain, Fused)
    z, u = 3 * torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH)
    gain = trunk.get_parameter("gain")
    expected = nn.functional.hardswish(z * gain)
    exact = torch.autograd.grad(expected, [z, gain], u)
    torch.testing.assert_close(chain(z.detach()), expected.detach())
    with torch.no_grad():
        r, own = chain.pull_back(z.detach(), u)
    torch.testing.assert_close(r, exact[0])
    torch.testing.assert_close(own, {"gain": exact[1]})


def test_a_step_gives_the_gradient_and_lets_go_of_the_tape(monkeypatch):
    torch.manual_seed(0)
    trunk = OnnxTrunk(hard_swish_network(), cut="h", threads=1)
    split = splitfg.Split(trunk, splitfg.LinearHead(nn.Linear(WIDTH, 3)))
    x, y = torch.randn(ROWS, WIDTH), torch.randint(0, 3, (ROWS,))
    tapes, make = [], OnnxTrunk.tape
    monkeypatch.setattr(OnnxTrunk, "tape", lambda *a, **k: tapes.append(make(*a, **k)) or tapes[-1])
    estimator, generator = splitfg.LearnedFeedback(), torch.Generator().manual_seed(0)
    for _ in range(80):
        estimate = estimator(split, x, y, generator=generator)
        estimator.update_state(split, estimate)
    assert {o.output for o in tapes[-2].operations} == {None}  # the last one is the measurement's own
    twin = Twin(trunk.wiring, {"gain": trunk.get_parameter("gain")})
    loss = nn.functional.cross_entropy(split.head.predict(twin(x)), y)
    exact = torch.autograd.grad(loss, dict(twin.named_parameters()).values())
    for (name, _), g in zip(twin.named_parameters(), exact, strict=True):
        torch.testing.assert_close(estimate.grads[f"trunk.{name}"], g, rtol=2e-2, atol=2e-4)


def test_a_twin_of_layers_without_values_raises():
    trunk = OnnxTrunk(hard_swish_network(), cut="h", train="w1")
    with pytest.raises(splitfg.SplitError, match=r"layers without values.*w0"):
        Twin(trunk.wiring)


def test_a_tensor_that_others_read_ends_a_chain():
    trunk = OnnxTrunk(hard_swish_network(), cut="h", threads=1)
    chains = [n for n in trunk.places(trained(trunk)) if isinstance(n.call, Fused)]
    assert [(n.args[0].name, n.writes) for n in chains] == [("z0", "a0"), ("z1", "a1")]
    assert fuse(trunk.wiring.nodes[:1], {}) == [trunk.wiring.nodes[0]]
