"""Small ONNX graphs for tests."""

import numpy as np
from onnx import TensorProto, helper, numpy_helper


def model(nodes, weights, inputs, outputs, opset=17, ir_version=9):
    """Return the bytes of a graph; inputs and outputs are ``{name: shape}``, weights ``{name: array}``."""
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in outputs.items()],
        [numpy_helper.from_array(np.asarray(w), n) for n, w in weights.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
    return made.SerializeToString()


def random(rng, *shape, scale=None):
    fan = np.prod(shape[1:]) if len(shape) > 1 else 1
    return (rng.standard_normal(shape) * (scale or (2 / max(fan, 1)) ** 0.5)).astype(np.float32)


def convolutional(rows="rows", opset=17):
    """A small MobileNet: convolution, batch norm, hard swish, squeeze-and-excite, residual sum, pooling, Gemm."""
    rng, node = np.random.default_rng(0), helper.make_node
    weights = {
        "stem.weight": random(rng, 6, 2, 3, 3),
        "bn.weight": 1 + 0.1 * random(rng, 6),
        "bn.bias": 0.1 * random(rng, 6),
        "bn.mean": 0.1 * random(rng, 6),
        "bn.var": 1 + 0.1 * random(rng, 6) ** 2,
        "deep.weight": random(rng, 6, 1, 3, 3),
        "deep.bias": 0.1 * random(rng, 6),
        "gate.weight": random(rng, 6, 6, 1, 1),
        "gate.bias": 0.1 * random(rng, 6),
        "shift": 0.1 * random(rng, 1, 6, 1, 1),
        "fc.weight": random(rng, 5, 24),
        "fc.bias": 0.1 * random(rng, 5),
        "out.weight": random(rng, 5, 3),
        "low": np.float32(0.0),
        "high": np.float32(6.0),
        "three": np.float32(3.0),
        "six": np.float32(6.0),
    }
    nodes = [
        node("Conv", ["x", "stem.weight"], ["c1"], pads=[1, 1, 1, 1], strides=[2, 2]),
        node("BatchNormalization", ["c1", "bn.weight", "bn.bias", "bn.mean", "bn.var"], ["n1"]),
        node("Add", ["n1", "three"], ["p1"]),
        node("Clip", ["p1", "low", "high"], ["p2"]),
        node("Mul", ["n1", "p2"], ["p3"]),
        node("Div", ["p3", "six"], ["a1"]),
        node("Conv", ["a1", "deep.weight", "deep.bias"], ["c2"], pads=[1, 1, 1, 1], group=6),
        node("Relu", ["c2"], ["a2"]),
        node("GlobalAveragePool", ["a2"], ["g1"]),
        node("Conv", ["g1", "gate.weight", "gate.bias"], ["g2"]),
        node("HardSigmoid", ["g2"], ["g3"], alpha=0.2, beta=0.5),
        node("Mul", ["a2", "g3"], ["s1"]),
        node("Add", ["s1", "a1"], ["s2"]),
        node("Add", ["s2", "shift"], ["s3"]),
        node("MaxPool", ["s3"], ["m1"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Flatten", ["m1"], ["f1"]),
        node("Gemm", ["f1", "fc.weight", "fc.bias"], ["z"], transB=1),
        node("LeakyRelu", ["z"], ["h"], alpha=0.1),
        node("MatMul", ["h", "out.weight"], ["logits"]),
    ]
    return model(nodes, weights, {"x": [rows, 2, 8, 8]}, {"logits": [rows, 3]}, opset)
