"""Tuning ONNX files: adapters, int8 graphs, scikit-learn's contract, saved files."""

import copy
import io
import json
import pickle
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from _onnx_graphs import convolutional, model, random
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static
from skl2onnx import to_onnx
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.neural_network import MLPClassifier
from torch import nn

import splitfg
from splitfg.onnx import LowRank, OnnxClassifier, OnnxRegressor, OnnxTrunk, ScaleAndBias, example_model, save, with_head


@pytest.fixture(scope="module")
def digits():
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(pixels))
    return (pixels[order] / 16).astype(np.float32), labels[order]


@pytest.fixture(scope="module")
def images():
    rng = np.random.default_rng(1)
    return rng.standard_normal((64, 2, 8, 8)).astype(np.float32), rng.integers(0, 3, 64)


@pytest.fixture(scope="module", params=["QDQ", "QOperator"])
def quantised(request, tmp_path_factory, images):
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "float.onnx").write_bytes(convolutional())

    class Reader(CalibrationDataReader):
        def __init__(self):
            self.rows = iter([{"x": images[0]}])

        def get_next(self):
            return next(self.rows, None)

    quantize_static(
        folder / "float.onnx", folder / "int8.onnx", Reader(), quant_format=QuantFormat[request.param], per_channel=True
    )
    return folder / "int8.onnx"


def plain_outputs(path, x, name="outputs"):
    session = ort.InferenceSession(str(path))
    return session.run([name], {session.get_inputs()[0].name: x})[0]


class TestSaved:
    def test_runs_in_plain_onnx_runtime_with_the_same_outputs(self, tmp_path, digits):
        x, y = digits
        names = np.array([f"digit {i}" for i in range(10)])[y]
        source = tmp_path / "network.onnx"
        source.write_bytes(example_model((64, 32, 32, 7)))
        before = source.read_bytes()
        tuned = OnnxClassifier(source, steps=40, random_state=0, threads=1).fit(x[:600], names[:600])
        tuned.save(tmp_path / "tuned.onnx")
        assert source.read_bytes() == before
        np.testing.assert_allclose(
            plain_outputs(tmp_path / "tuned.onnx", x), tuned.decision_function(x), rtol=1e-5, atol=1e-5
        )
        np.testing.assert_allclose(
            plain_outputs(tmp_path / "tuned.onnx", x, "probabilities"), tuned.predict_proba(x), atol=1e-5
        )
        made = onnx.load(tmp_path / "tuned.onnx")
        classes = json.loads({p.key: p.value for p in made.metadata_props}["classes"])
        labels = plain_outputs(tmp_path / "tuned.onnx", x, "label")
        assert [classes[i] for i in labels] == tuned.predict(x).tolist()
        assert {t.name for t in made.graph.initializer} >= {"0.weight", "2.weight"}
        assert "4.weight" not in {t.name for t in made.graph.initializer}  # the file's own last layer

    def test_the_source_is_never_a_target(self, tmp_path, digits):
        x, y = digits
        source = tmp_path / "network.onnx"
        source.write_bytes(example_model((64, 16, 10)))
        tuned = OnnxClassifier(source, method="head", steps=1).fit(x[:100], y[:100])
        with pytest.raises(splitfg.SplitError, match="never written to"):
            tuned.save(tmp_path / "." / "network.onnx")

    def test_a_failed_write_leaves_the_old_file_and_no_rest(self, tmp_path, digits, monkeypatch):
        x, y = digits
        tuned = OnnxClassifier(example_model((64, 16, 10)), method="head", steps=1).fit(x[:100], y[:100])
        target = tmp_path / "tuned.onnx"
        target.write_bytes(b"old")

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            tuned.save(target)
        assert [p.name for p in tmp_path.iterdir()] == ["tuned.onnx"]
        assert target.read_bytes() == b"old"

    def test_a_graph_that_gives_other_outputs_is_not_written(self, tmp_path):
        trunk, head = OnnxTrunk(example_model()), splitfg.LinearHead(nn.Linear(8, 2))
        with pytest.raises(splitfg.SplitError, match="differ"):
            save(with_head(trunk, head), tmp_path / "x.onnx", [np.ones((2, 4), np.float32)], torch.full((2, 2), 9.0))
        assert list(tmp_path.iterdir()) == []


class TestEstimators:
    def test_tuning_the_trunk_beats_the_head_alone(self, digits):
        x, y = digits
        source = example_model((64, 64, 32, 10))
        found = {}
        for method in ("head", "learned_feedback"):
            tuned = OnnxClassifier(source, method=method, steps=120, patience=9, learning_rate=3e-3, random_state=0)
            found[method] = clone(tuned).fit(x[:1200], y[:1200]).score(x[1200:], y[1200:])
        assert found["learned_feedback"] > found["head"] + 0.01
        assert found["learned_feedback"] > 0.93

    @pytest.mark.parametrize("method", ["activity", "activity_and_feedback", "weights"])
    def test_every_method_takes_steps_and_counts_inferences(self, digits, method):
        x, y = digits
        tuned = OnnxClassifier(
            example_model((64, 16, 10)), method=method, steps=3, K=2, batch_size=32, validation_fraction=0
        )
        tuned.fit(x[:200], y[:200])
        rows = {"activity": 5, "activity_and_feedback": 5, "weights": 5}[method] * 32 * 3
        assert tuned.inferences_ >= 200 + rows
        assert tuned.n_iter_ == 3

    def test_the_same_seed_gives_the_same_network(self, digits):
        x, y = digits
        twice = [
            OnnxClassifier(example_model((64, 16, 10)), steps=5, random_state=3).fit(x[:200], y[:200]) for _ in range(2)
        ]
        np.testing.assert_array_equal(*(t.decision_function(x[:50]) for t in twice))

    def test_values(self, tmp_path):
        rng = np.random.default_rng(0)
        x = rng.standard_normal((400, 4)).astype(np.float32)
        y = 50 + 10 * x[:, 0] * x[:, 1]
        tuned = OnnxRegressor(example_model((4, 32, 32, 1)), steps=100, learning_rate=5e-3, random_state=0, patience=9)
        tuned.fit(x[:300], y[:300])
        assert tuned.score(x[300:], y[300:]) > 0.6
        tuned.save(tmp_path / "tuned.onnx")
        np.testing.assert_allclose(plain_outputs(tmp_path / "tuned.onnx", x)[:, 0], tuned.predict(x), rtol=1e-5)

    def test_several_inputs_come_by_name(self):
        rng, node = np.random.default_rng(0), helper.make_node
        nodes = [
            node("Concat", ["left", "right"], ["both"], axis=1),
            node("Gemm", ["both", "w", "b"], ["z"]),
            node("Relu", ["z"], ["h"]),
            node("MatMul", ["h", "v"], ["y"]),
        ]
        weights = {"w": random(rng, 5, 8), "b": random(rng, 8), "v": random(rng, 8, 2)}
        source = model(nodes, weights, {"left": ["n", 2], "right": ["n", 3]}, {"y": ["n", 2]})
        x = {"left": random(rng, 60, 2, scale=1), "right": random(rng, 60, 3, scale=1)}
        tuned = OnnxClassifier(source, steps=5).fit(x, x["left"][:, 0] > 0)
        assert tuned.predict(x).shape == (60,)
        with pytest.raises(splitfg.SplitError, match="lacks the inputs right"):
            tuned.predict({"left": x["left"]})

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda x, y: (x[:, :3], y), r"rows of shape \(3,\): the network reads \(4\)"),
            (lambda x, y: (x, y[:-1]), "different numbers of rows"),
            (lambda x, y: (x, y + 0.5), "no classes"),
            (lambda x, y: (x, 0 * y), "1 class"),
            (lambda x, y: (np.full_like(x, np.nan), y), "NaN"),
            (lambda x, y: (x.astype(str), y), "not numbers"),
            (lambda x, y: (x[:2], y[:2]), "too few"),
            (lambda x, y: (x, np.where(y, "yes", None)), "drop rows without a target"),
        ],
    )
    def test_bad_data_raise_one_clear_error(self, change, words):
        rng = np.random.default_rng(0)
        x, y = change(rng.standard_normal((40, 4)).astype(np.float32), np.arange(40) % 2)
        with pytest.raises(splitfg.SplitError, match=words):
            OnnxClassifier(example_model()).fit(x, y)

    @pytest.mark.parametrize("settings", [{}, {"adapters": LowRank(rank=2)}, {"method": "weights", "K": 1}])
    def test_copies_predict_the_same_and_can_be_saved(self, images, tmp_path, settings):
        tuned = OnnxClassifier(convolutional(), steps=3, batch_size=16, random_state=0, threads=1, **settings)
        tuned.fit(*images)
        tuned.save(tmp_path / "tuned.onnx")
        for twin in (pickle.loads(pickle.dumps(tuned)), copy.deepcopy(tuned)):
            np.testing.assert_array_equal(twin.decision_function(images[0]), tuned.decision_function(images[0]))
            twin.save(tmp_path / "twin.onnx")
            assert (tmp_path / "twin.onnx").read_bytes() == (tmp_path / "tuned.onnx").read_bytes()

    def test_no_rows_cannot_be_predicted(self, digits):
        tuned = OnnxClassifier(example_model((64, 8, 8, 7)), steps=1, threads=1).fit(digits[0][:200], digits[1][:200])
        with pytest.raises(splitfg.SplitError, match="x has no rows"):
            tuned.predict(digits[0][:0])

    def test_bad_settings_are_listed_together(self):
        x, y = np.zeros((10, 4), np.float32), np.arange(10) % 2
        with pytest.raises(splitfg.SplitError, match=r"(?s)steps must.*learning_rate must.*method 'nothing'"):
            OnnxClassifier(example_model(), steps=0, learning_rate=-1, method="nothing").fit(x, y)

    def test_before_fit_it_is_not_fitted(self):
        with pytest.raises(NotFittedError):
            OnnxClassifier(example_model()).predict(np.zeros((2, 4), np.float32))


class TestAdapters:
    @pytest.mark.parametrize("adapter", [ScaleAndBias(), LowRank(rank=2)])
    def test_change_nothing_until_they_are_trained_and_are_merged_exactly(self, adapter, images, tmp_path):
        x = torch.tensor(images[0])
        plain, trunk = OnnxTrunk(convolutional()), OnnxTrunk(convolutional(), adapters=adapter)
        torch.testing.assert_close(trunk(x), plain(x), rtol=1e-5, atol=1e-6)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in trunk.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=generator))
        moved = trunk(x)
        assert (moved - plain(x)).norm() > 0.01 * moved.norm()
        merged = trunk.tuned()
        left = {t.name for t in merged.graph.initializer if t.name.startswith("adapter")}
        # a convolution without a bias has no place for the adapter's bias
        assert left == ({"adapter.stem.scale", "adapter.stem.bias"} if isinstance(adapter, ScaleAndBias) else set())
        found = ort.InferenceSession(merged.SerializeToString()).run(["logits"], {"x": x.numpy()})[0]
        head = plain.file_head()
        np.testing.assert_allclose(found, head(moved).detach().numpy(), rtol=1e-4, atol=1e-5)

    def test_stay_nodes_if_merged_weights_give_other_outputs(self, images, tmp_path, monkeypatch):
        def badly(model, *_):
            bias = next(t for t in model.graph.initializer if t.name.endswith("bias"))
            bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + 0.1, bias.name))

        x, y = images
        tuned = OnnxClassifier(convolutional(), adapters=ScaleAndBias(), steps=2, random_state=0).fit(x, y)
        monkeypatch.setattr("splitfg.onnx._trunk.merge", badly)
        tuned.save(tmp_path / "tuned.onnx")
        session = ort.InferenceSession(tmp_path / "tuned.onnx")
        found = session.run(["outputs"], {session.get_inputs()[0].name: x[:8]})[0]
        np.testing.assert_allclose(found, tuned.decision_function(x[:8]), atol=1e-4)

    def test_globs_that_match_nothing_raise(self):
        with pytest.raises(splitfg.SplitError, match=r"no layer matches 'no\*'.*fc\.weight"):
            OnnxTrunk(convolutional(), adapters=ScaleAndBias("no*"))


class TestInt8:
    def test_the_graph_computes_what_the_file_computes(self, quantised, images):
        trunk, x = OnnxTrunk(quantised, adapters=ScaleAndBias()), images[0]
        head = trunk.file_head()
        ours = plain_outputs(quantised, x, "logits")
        if head is not None:
            theirs = head(trunk(torch.tensor(x))).detach().numpy()
            assert np.abs(ours - theirs).max() < 0.1 * np.abs(ours).max()
        assert trunk.problems((torch.tensor(x),), tolerance=0.05) == []

    @pytest.mark.parametrize("adapter", [ScaleAndBias(), LowRank(rank=2)])
    def test_adapters_train_and_the_saved_file_agrees(self, quantised, images, tmp_path, adapter):
        x, _ = images
        y = (x[:, 0].mean((1, 2)) > x[:, 1].mean((1, 2))).astype(int)
        before = Path(quantised).read_bytes()
        tuned = OnnxClassifier(
            quantised, adapters=adapter, steps=30, learning_rate=3e-3, random_state=0, validation_fraction=0
        ).fit(x, y)
        assert tuned.loss_curve_[-1] < tuned.loss_curve_[0]
        tuned.save(tmp_path / "tuned.onnx")
        np.testing.assert_allclose(
            plain_outputs(tmp_path / "tuned.onnx", x[:8]), tuned.decision_function(x[:8]), rtol=1e-4, atol=1e-4
        )
        assert Path(quantised).read_bytes() == before

    def test_perturbations_take_steps_over_many_levels(self, quantised, images):
        assert OnnxTrunk(quantised, adapters=ScaleAndBias()).rounds
        assert not OnnxTrunk(convolutional()).rounds
        x, y = images
        for method, step in (("activity", "step"), ("weights", "engine")):
            tuned = OnnxClassifier(quantised, adapters=ScaleAndBias(), method=method, steps=1, K=2)
            used, plain = (
                tuned.set_params(model=m).prepare(x, y).learner.estimator for m in (quantised, convolutional())
            )
            assert getattr(used, step) != getattr(plain, step)

    def test_int8_weights_without_adapters_raise_with_the_cure(self, quantised):
        with pytest.raises(splitfg.SplitError, match="adapters"):
            OnnxTrunk(quantised, train="*fc*")


class TestOtherFiles:
    def test_half_precision(self, tmp_path):
        made = onnx.load_from_string(example_model((4, 16, 8, 3)))
        for tensor in made.graph.initializer:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
        for info in (*made.graph.input, *made.graph.output):
            info.type.tensor_type.elem_type = TensorProto.FLOAT16
        rng = np.random.default_rng(0)
        x = rng.standard_normal((200, 4)).astype(np.float32)
        y = (x[:, 0] > x[:, 1]).astype(int)
        tuned = OnnxClassifier(made.SerializeToString(), steps=30, learning_rate=1e-2, random_state=0).fit(x, y)
        assert tuned.score(x, y) > 0.85
        tuned.save(tmp_path / "half.onnx")
        saved = onnx.load(tmp_path / "half.onnx")
        kinds = {t.name: t.data_type for t in saved.graph.initializer}
        assert kinds["0.weight"] == TensorProto.FLOAT16
        found = plain_outputs(tmp_path / "half.onnx", x.astype(np.float16))
        np.testing.assert_allclose(found, tuned.decision_function(x), rtol=1e-2, atol=1e-2)

    def test_a_network_that_torch_exports(self):
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(64, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 10),
        ).eval()  # fmt: skip
        written = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                network, (torch.zeros(2, 1, 8, 8),), written, dynamo=False, opset_version=17,
                input_names=["x"], dynamic_axes={"x": {0: "rows"}},
            )  # fmt: skip
        trunk, x = OnnxTrunk(written.getvalue(), threads=1), torch.randn(5, 1, 8, 8)
        torch.testing.assert_close(trunk(x), network[:-1](x).detach(), rtol=1e-4, atol=1e-5)
        assert {"5.weight", "5.bias", "6.weight", "6.bias"} <= dict(trunk.named_parameters()).keys()
        assert trunk.problems((x,)) == []

    def test_a_network_that_scikit_learn_exports(self, digits):
        x, y = digits
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fitted = MLPClassifier((16, 8), max_iter=3, random_state=0).fit(x, y % 2)
            exported = to_onnx(fitted, x[:1], options={"zipmap": False})
        trunk = OnnxTrunk(exported.SerializeToString(), threads=1)
        hidden = np.maximum(x[:4] @ fitted.coefs_[0] + fitted.intercepts_[0], 0)
        hidden = np.maximum(hidden @ fitted.coefs_[1] + fitted.intercepts_[1], 0)
        np.testing.assert_allclose(trunk(torch.tensor(x[:4])).numpy(), hidden, rtol=1e-4, atol=1e-5)
        assert {n for n, p in trunk.named_parameters() if p.requires_grad} == {
            *("coefficient.weight", "coefficient1.weight", "intercepts", "intercepts1")
        }

    def test_a_cut_that_mixes_rows_raises(self):
        rng, node = np.random.default_rng(0), helper.make_node
        nodes = [
            node("Gemm", ["x", "w", "b"], ["z"]),
            node("Reshape", ["z", "shape"], ["flat"]),
            node("Relu", ["flat"], ["h"]),
        ]
        weights = {"w": random(rng, 4, 6), "b": random(rng, 6), "shape": np.array([1, -1])}
        source = model(nodes, weights, {"x": ["n", 4]}, {"h": [1, "m"]})
        x = rng.standard_normal((20, 4)).astype(np.float32)
        with pytest.raises(splitfg.SplitError, match="one row per row"):
            OnnxClassifier(source, cut="h").fit(x, np.arange(20) % 2)

    def test_rows_that_change_each_other_cannot_have_their_own_noise(self):
        rng, node = np.random.default_rng(0), helper.make_node
        nodes = [
            node("MatMul", ["x", "w"], ["z"]),
            node("ReduceMean", ["z"], ["m"], axes=[0], keepdims=1),
            node("Sub", ["z", "m"], ["centred"]),
            node("Relu", ["centred"], ["h"]),
        ]
        source = model(nodes, {"w": random(rng, 4, 6)}, {"x": ["n", 4]}, {"h": ["n", 6]})
        x, y = rng.standard_normal((20, 4)).astype(np.float32), np.arange(20) % 2
        with pytest.raises(splitfg.SplitError, match="rows of a batch change each other"):
            OnnxClassifier(source, method="activity", steps=1).fit(x, y)
        OnnxClassifier(source, steps=1).fit(x, y)

    def test_outputs_that_are_not_finite_raise(self):
        x = np.full((20, 4), 1e38, np.float32)
        with pytest.raises(splitfg.NonFiniteError, match="not finite"):
            OnnxClassifier(example_model((4, 64, 64, 2))).fit(x, np.arange(20) % 2)

    def test_an_older_opset_and_weights_in_constant_nodes(self):
        rng, node = np.random.default_rng(0), helper.make_node
        stored = {"w": random(rng, 4, 6), "b": random(rng, 6), "v": random(rng, 6, 2)}
        nodes = [
            *(node("Constant", [], [n], value=numpy_helper.from_array(w)) for n, w in stored.items()),
            node("Gemm", ["x", "w", "b"], ["z"]),
            node("Clip", ["z"], ["h"], min=-1.0, max=1.0),
            node("MatMul", ["h", "v"], ["y"]),
        ]
        trunk = OnnxTrunk(model(nodes, {}, {"x": ["n", 4]}, {"y": ["n", 2]}, opset=9, ir_version=3))
        x = torch.randn(5, 4)
        expected = (x @ torch.tensor(stored["w"]) + torch.tensor(stored["b"])).clamp(-1, 1)
        torch.testing.assert_close(trunk(x), expected)
        assert [n for n, _ in trunk.named_parameters()] == ["w.weight", "w.bias"]
