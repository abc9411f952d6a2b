"""ONNX graphs in the engine: gradients against autograd on the same graph, files against plain ONNX Runtime."""

import copy
import pickle

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from _onnx_graphs import convolutional, model, random
from onnx import helper
from torch import nn

import splitfg
from splitfg.feedback import DeltaRule, LayerDifference, Relay
from splitfg.hardware import ActivityPerturbation, Twin
from splitfg.onnx import LowRank, OnnxTrunk, ScaleAndBias, example_model

CONVOLUTIONAL = convolutional()


def images(rows=24):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, 2, 8, 8, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def network(source, width, **settings):
    torch.manual_seed(0)
    trunk = OnnxTrunk(source, threads=1, **settings)
    return splitfg.Split(trunk, splitfg.LinearHead(nn.Linear(width, 3)))


def exact_gradient(split, x, y):
    trunk = split.trunk
    twin = Twin(trunk.wiring, {n: p for n, p in trunk.named_parameters() if "." not in n})
    loss = nn.functional.cross_entropy(split.head.predict(twin(x)), y)
    names = dict(twin.named_parameters())
    return dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))


def test_the_engine_and_the_translated_graph_agree():
    trunk, (x, _) = OnnxTrunk(CONVOLUTIONAL, threads=1), images()
    assert trunk.cut == "h"
    assert trunk.problems((x,), tolerance=1e-5) == []
    twin = Twin(copy.deepcopy(trunk.wiring))
    torch.testing.assert_close(twin(x).detach(), trunk(x), rtol=1e-4, atol=1e-5)
    plain = ort.InferenceSession(CONVOLUTIONAL).run(["logits"], {"x": x.numpy()})[0]
    head = trunk.file_head()
    np.testing.assert_allclose(head(trunk(x)).detach().numpy(), plain, atol=1e-5)


def test_learned_feedback_in_the_engine_equals_autograd_on_the_graph():
    split, (x, y) = network(CONVOLUTIONAL, 5), images(96)
    estimator, generator = splitfg.LearnedFeedback(), torch.Generator().manual_seed(0)
    for _ in range(150):
        estimate = estimator(split, x, y, generator=generator)
        estimator.update_state(split, estimate)
    expected = exact_gradient(split, x, y)
    assert set(expected) == {n.removeprefix("trunk.") for n in split.trunk_params()}
    assert {"stem.weight", "bn.weight", "bn.bias", "deep.bias", "gate.weight", "shift", "fc.weight"} <= set(expected)
    for name, g in expected.items():
        found = estimate.grads[f"trunk.{name}"]
        assert (found - g).norm() < 0.02 * g.norm() + 1e-6, name


def test_layers_that_the_engine_runs_alone_teach_the_same_maps():
    split, (x, y) = network(CONVOLUTIONAL, 5), images(96)
    estimator = splitfg.LearnedFeedback(Relay(DeltaRule(1.0)), LayerDifference())
    generator, before = torch.Generator().manual_seed(0), split.trunk.counts.inferences
    for _ in range(150):
        estimate = estimator(split, x, y, generator=generator)
        estimator.update_state(split, estimate)
    assert split.trunk.counts.runs - 1 <= 2 * 150
    assert split.trunk.counts.inferences - before <= 2 * 150 * len(x) + len(x)
    for name, g in exact_gradient(split, x, y).items():
        found = estimate.grads[f"trunk.{name}"]
        assert (found - g).norm() < 0.02 * g.norm() + 1e-6, name


def test_activity_perturbations_in_the_engine_point_along_the_gradient():
    split, (x, y) = network(CONVOLUTIONAL, 5, train=["fc.*", "shift"]), images(16)
    estimator, generator = ActivityPerturbation(K=2000, step=0.01, chunk=250), torch.Generator().manual_seed(0)
    estimate, expected = estimator(split, x, y, generator=generator), exact_gradient(network(CONVOLUTIONAL, 5), x, y)
    for name in ("fc.weight", "fc.bias", "shift"):
        found, g = estimate.grads[f"trunk.{name}"].flatten(), expected[name].flatten()
        assert torch.cosine_similarity(found, g, 0) > 0.9, name


def test_globs_choose_what_is_trained():
    trunk = OnnxTrunk(CONVOLUTIONAL, train=["*.weight"])
    assert {n for n, p in trunk.named_parameters() if p.requires_grad} == {
        *("stem.weight", "bn.weight", "deep.weight", "gate.weight", "fc.weight")
    }
    with pytest.raises(splitfg.SplitError, match=r"'no\.such\*'.*stem\.weight"):
        OnnxTrunk(CONVOLUTIONAL, train="no.such*")


def test_a_graph_of_fixed_rows_runs_any_number_of_rows():
    free, fixed, (x, _) = OnnxTrunk(convolutional()), OnnxTrunk(convolutional(rows=4)), images(10)
    torch.testing.assert_close(free(x), fixed(x), rtol=1e-5, atol=1e-6)


def test_every_supported_function_computes_what_the_engine_computes():
    rng, node = np.random.default_rng(0), helper.make_node
    unary = ["Sigmoid", "Tanh", "Erf", "Exp", "Abs", "Neg", "Sin", "Cos", "Softplus", "Softsign", "HardSwish", "Selu"]
    nodes = [node("Gemm", ["x", "w", "b"], ["z"], transB=1)]
    nodes += [node(op, ["z"], [f"u{i}"]) for i, op in enumerate(unary)]
    nodes += [
        node("Elu", ["z"], ["v0"], alpha=0.7),
        node("Pow", ["z", "two"], ["v1"]),
        node("Max", ["z", "half"], ["v2"]),
        node("Min", ["z", "half"], ["v3"]),
        node("Sub", ["v0", "v1"], ["v4"]),
        node("Sum", ["v2", "v3", "v4"], ["v5"]),
        node("Reshape", ["v5", "shape"], ["v6"]),
        node("Transpose", ["v6"], ["v7"], perm=[0, 2, 1]),
        node("MatMul", ["v6", "v7"], ["v8"]),
        node("Softmax", ["v8"], ["v9"], axis=-1),
        node("ReduceMean", ["v9"], ["v10"], axes=[1], keepdims=0),
        node("Slice", ["v10", "start", "end", "axis"], ["v11"]),
        node("GlobalMaxPool", ["v6"], ["v12"]),
        node("Flatten", ["v12"], ["v13"]),
        node("ReduceMin", ["v6"], ["v14"], axes=[2], keepdims=0),
        node("Pad", ["v14", "pads", "half"], ["v15"]),
        node("Concat", [*(f"u{i}" for i in range(len(unary))), "v11", "v13", "v15"], ["h"], axis=1),
    ]
    weights = {
        "w": random(rng, 6, 4),
        "b": random(rng, 6),
        "two": np.float32(2),
        "half": np.float32(0.5),
        "shape": np.array([0, 2, 3]),
        "start": np.array([0]),
        "end": np.array([1]),
        "axis": np.array([1]),
        "pads": np.array([0, 1, 0, 2]),
    }
    width = 6 * len(unary) + 8
    source = model(nodes, weights, {"x": ["rows", 4]}, {"h": ["rows", width]})
    split = network(source, width, cut="h")
    x, y = torch.randn(9, 4), torch.randint(0, 3, (9,))
    assert split.trunk.problems((x,), tolerance=1e-5) == []
    twin = copy.deepcopy(pickle.loads(pickle.dumps(split)))
    estimate = splitfg.LearnedFeedback()(split, x, y, generator=torch.Generator().manual_seed(0))
    copied = splitfg.LearnedFeedback()(twin, x, y, generator=torch.Generator().manual_seed(0))
    assert all(torch.equal(copied.grads[name], g) for name, g in estimate.grads.items())
    for name, g in exact_gradient(split, x, y).items():  # no map lies above the only layer: exact
        torch.testing.assert_close(estimate.grads[f"trunk.{name}"], g, rtol=1e-4, atol=1e-6)


def test_weights_below_an_unknown_operator_are_left_out_by_default_and_named_when_asked_for():
    rng, node = np.random.default_rng(0), helper.make_node
    nodes = [
        node("Gemm", ["x", "low.w", "low.b"], ["z"], transB=1),
        node("CumSum", ["z", "axis"], ["c"]),
        node("Gemm", ["c", "up.w", "up.b"], ["h"], transB=1),
        node("Relu", ["h"], ["y"]),
    ]
    weights = {
        "low.w": random(rng, 6, 4), "low.b": random(rng, 6), "up.w": random(rng, 5, 6), "up.b": random(rng, 5),
        "axis": np.int64(1),
    }  # fmt: skip
    source = model(nodes, weights, {"x": ["rows", 4]}, {"y": ["rows", 5]})
    assert [n for n, _ in OnnxTrunk(source, cut="y").named_parameters()] == ["up.w.weight", "up.w.bias"]
    split = network(source, 5, cut="y", train="*")
    x, y = torch.randn(9, 4), torch.randint(0, 3, (9,))
    with pytest.raises(splitfg.SplitError, match="CumSum"):
        splitfg.LearnedFeedback()(split, x, y, generator=torch.Generator().manual_seed(0))
    ActivityPerturbation(K=2)(split, x, y, generator=torch.Generator().manual_seed(0))


def bad_opset():
    made = onnx.load_from_string(example_model())
    made.opset_import[0].version = 999
    return made.SerializeToString()


def huge_constant():
    """Return a file of a few hundred bytes that asks for 160 GB."""
    node = helper.make_node
    nodes = [
        node("ConstantOfShape", ["shape"], ["c"]),
        node("ReduceSum", ["c"], ["total"], keepdims=0),
        node("Add", ["x", "total"], ["h"]),
    ]
    return model(nodes, {"shape": np.array([200_000, 200_000])}, {"x": ["rows", 4]}, {"h": ["rows", 4]})


def dynamically_quantised():
    node = helper.make_node
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        node("MatMulInteger", ["q", "w", "zero"], ["whole"]),
        node("Cast", ["whole"], ["float"], to=1),
        node("Mul", ["float", "scale"], ["h"]),
    ]
    return model(nodes, {"w": np.ones((4, 3), np.int8)}, {"x": ["rows", 4]}, {"h": ["rows", 3]})


@pytest.mark.parametrize(
    ("source", "settings", "words"),
    [
        (b"not onnx at all", {}, "not a readable ONNX file|not an ONNX model"),
        (b"", {}, "not an ONNX model"),
        ("nowhere.onnx", {}, "does not exist"),
        (bad_opset(), {}, "not a valid ONNX model|cannot run"),
        (example_model(), {"cut": "nothing"}, "no tensor 'nothing'.*z0"),
        (huge_constant(), {}, "40,000,000,000 numbers"),
        (dynamically_quantised(), {"adapters": ScaleAndBias()}, "quantised dynamically.*quantize_static"),
    ],
)
def test_bad_files_raise_one_clear_error(source, settings, words):
    with pytest.raises(splitfg.SplitError, match=words):
        OnnxTrunk(source, **settings)


@pytest.mark.parametrize("place", ["../outside.bin", "/outside.bin"])
def test_weights_outside_the_folder_of_the_file_raise(tmp_path, place):
    (tmp_path / "outside.bin").write_bytes(bytes(4 * 4 * 8))
    (tmp_path / "inside").mkdir()
    made = onnx.load_from_string(example_model())
    weight = made.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    where = place if place.startswith("..") else str(tmp_path / place[1:])
    weight.external_data.add(key="location", value=where)
    (tmp_path / "inside" / "net.onnx").write_bytes(made.SerializeToString())
    with pytest.raises(splitfg.SplitError, match="not a readable ONNX file"):
        OnnxTrunk(tmp_path / "inside" / "net.onnx")


def test_a_rank_in_the_place_of_the_layers_raises():
    with pytest.raises(splitfg.SplitError, match="rank="):
        LowRank(4)


def test_inputs_that_do_not_fit_raise():
    trunk = OnnxTrunk(example_model())
    with pytest.raises(splitfg.SplitError, match="failed on inputs x"):
        trunk(torch.randn(3, 5))
    with pytest.raises(splitfg.SplitError, match="1 inputs"):
        trunk(torch.randn(3, 4), torch.randn(3, 4))
