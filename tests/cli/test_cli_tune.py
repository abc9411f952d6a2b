"""``splitfg tune`` and ``splitfg onnx show``: from a file and data to a better file."""

import json

import numpy as np
import onnxruntime as ort
import pandas as pd
import pytest
from _onnx_graphs import convolutional, model, random
from onnx import helper
from PIL import Image
from sklearn.datasets import load_digits
from typer.testing import CliRunner

import splitfg
from splitfg.onnx import Tuning, example_model
from splitfg_lab.cli import make_app
from splitfg_lab.runs import RunError
from splitfg_lab.tuning.data import Reading, read_examples
from splitfg_lab.tuning.report import TuneReport, as_html


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("tune")
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(pixels))[:500]
    x, y = (pixels[order] / 16).astype(np.float32), labels[order]
    table = pd.DataFrame(x, columns=[f"p{i}" for i in range(64)]).assign(digit=[f"d{i}" for i in y])
    table.to_parquet(place / "digits.parquet")
    table.assign(digit=y * 1.5).to_csv(place / "values.csv", index=False)
    np.savez(place / "digits.npz", pixels=x, digit=y)
    for name, shade in (("dark", 40), ("light", 200)):
        (place / "images" / name).mkdir(parents=True)
        for i in range(12):
            noise = np.random.default_rng(i).integers(0, 30, (10, 12, 3), dtype=np.uint8)
            Image.fromarray(noise + np.uint8(shade)).save(place / "images" / name / f"{i}.png")
    (place / "net.onnx").write_bytes(example_model((64, 32, 16, 10)))
    return place


def call(*arguments):
    return CliRunner().invoke(make_app(), [str(a) for a in arguments])


def tune(folder, data, out, *more, model="net.onnx"):
    return call("tune", folder / model, "--data", folder / data, "--out", out, *more)


def test_a_table_in_and_a_better_file_and_a_report_out(folder, tmp_path):
    before = (folder / "net.onnx").read_bytes()
    done = tune(folder, "digits.parquet", tmp_path / "tuned.onnx", "--target", "digit", "--steps", 40, "--lr", 3e-3)
    assert done.exit_code == 0, done.output
    assert (folder / "net.onnx").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tuned.html", "tuned.onnx"]
    shares = [float(line.split()[-1].rstrip("%")) for line in done.output.splitlines() if line.startswith("accuracy")]
    assert shares[1] >= shares[0] > 50
    x = np.load(folder / "digits.npz")["pixels"]
    labels = ort.InferenceSession(str(tmp_path / "tuned.onnx")).run(["label"], {"x": x})[0]
    assert (labels == np.load(folder / "digits.npz")["digit"]).mean() > 0.8
    page = (tmp_path / "tuned.html").read_text(encoding="utf-8")
    assert "inferences" in page
    assert "<td class=right" in page


def test_values_from_csv_and_classes_from_arrays(folder, tmp_path):
    done = tune(folder, "values.csv", tmp_path / "a.onnx", "--target", "digit", "--values", "--steps", 5)
    assert done.exit_code == 0, done.output
    assert "R²" in done.output
    done = tune(folder, "digits.npz", tmp_path / "b.onnx", "--target", "digit", "--method", "head", "--steps", 2)
    assert done.exit_code == 0, done.output


def test_a_folder_of_images(folder, tmp_path):
    graph = tmp_path / "images.onnx"
    graph.write_bytes(convolutional())
    done = call("tune", graph, "--data", folder / "images", "--out", tmp_path / "t.onnx", "--steps", 2)
    assert isinstance(done.exception, splitfg.DataError)
    assert "2 channels" in str(done.exception)
    wide = tmp_path / "wide.onnx"
    wide.write_bytes(_three_channels())
    done = call("tune", wide, "--data", folder / "images", "--out", tmp_path / "t.onnx", "--steps", 4, "--mean", "0.5")
    assert done.exit_code == 0, done.output
    assert "dark" in done.output


def _three_channels():
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "c.weight"], ["c"]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["g"]),
        helper.make_node("Flatten", ["g"], ["h"]),
        helper.make_node("MatMul", ["h", "w"], ["y"]),
    ]
    weights = {"c.weight": random(rng, 4, 3, 3, 3), "w": random(rng, 4, 2)}
    return model(nodes, weights, {"x": ["n", 3, 6, 6]}, {"y": ["n", 2]})


def test_an_interrupted_job_resumes_to_the_same_file(folder, tmp_path, monkeypatch):
    options = ("--target", "digit", "--steps", 20, "--evaluate-every", 5, "--seed", 4)
    whole = tune(folder, "digits.npz", tmp_path / "whole.onnx", *options)
    assert whole.exit_code == 0, whole.output
    step, steps = Tuning.step, []

    def interrupted(self):
        if len(steps) == 12:
            raise KeyboardInterrupt
        steps.append(step(self))
        return steps[-1]

    monkeypatch.setattr(Tuning, "step", interrupted)
    stopped = tune(folder, "digits.npz", tmp_path / "part.onnx", *options)
    monkeypatch.undo()
    assert stopped.exit_code == 130
    assert "--resume" in stopped.output
    again = tune(folder, "digits.npz", tmp_path / "part.onnx", *options)
    assert isinstance(again.exception, RunError)
    other = tune(folder, "digits.npz", tmp_path / "part.onnx", *options, "--lr", 0.5, "--resume")
    assert "other data or settings" in str(other.exception)
    done = tune(folder, "digits.npz", tmp_path / "part.onnx", *options, "--resume")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "part.onnx").read_bytes() == (tmp_path / "whole.onnx").read_bytes()
    assert not (tmp_path / "part.onnx.tuning").exists()


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        ("digits.parquet", ("--target", "none"), "no column 'none'"),
        ("nothing.csv", ("--target", "digit"), "does not exist"),
        ("net.onnx", ("--target", "digit"), "unknown kind of file"),
        ("digits.npz", ("--target", "labels"), "no array 'labels'"),
        ("digits.npz", ("--target", "digit", "--adapters", "rank:none"), "rank:R"),
        ("digits.npz", ("--target", "digit", "--method", "magic"), "method 'magic' is unknown"),
        ("digits.npz", ("--target", "digit", "--train", "nope*"), "'nope"),
        ("digits.parquet", ("--target", "p0"), "hold no numbers"),
        ("images", (), "not images"),
        ("digits.npz", ("--target", "digit", "--size", "8"), "HEIGHTxWIDTH"),
        ("digits.npz", ("--target", "digit", "--size", "0x8"), "HEIGHTxWIDTH"),
        ("digits.npz", ("--target", "digit", "--adapters", "rank:²"), "rank:R"),
        ("digits.npz", ("--target", "digit", "--mean", "nan"), "finite"),
        ("digits.npz", ("--target", "digit", "--std", "0"), "positive"),
    ],
)
def test_bad_input_gives_one_clear_error(folder, tmp_path, data, options, words):
    done = tune(folder, data, tmp_path / "t.onnx", *options)
    assert words in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_wrong_options_are_listed_together(folder, tmp_path):
    wrong = ("--size", "8", "--mean", "q", "--std", "0", "--adapters", "rank:0")
    message = str(tune(folder, "digits.npz", tmp_path / "t.onnx", "--target", "digit", *wrong).exception)
    assert [line.split()[0] for line in message.splitlines()] == ["--size", "--mean", "--std", "--adapters"]


def small(tmp_path, y, x=None):
    x = np.zeros((len(y), 4), np.float32) if x is None else x
    (tmp_path / "net.onnx").write_bytes(example_model((4, 8, 3)))
    np.savez(tmp_path / "data.npz", x=x, t=np.asarray(y))
    return "tune", tmp_path / "net.onnx", "--data", tmp_path / "data.npz", "--target", "t", "--steps", 1


@pytest.mark.parametrize(
    ("y", "rows", "words"),
    [(range(40), 40, "its own class"), ([0, 1] * 5, 40, "different numbers of rows"), ([1] * 40, 40, "1 class")],
)
def test_targets_that_do_not_fit_raise(tmp_path, y, rows, words):
    done = call(*small(tmp_path, list(y), np.zeros((rows, 4), np.float32)), "--out", tmp_path / "out.onnx")
    assert words in str(done.exception)
    assert not (tmp_path / "out.onnx").exists()


def test_a_device_or_a_folder_is_no_output(tmp_path):
    done = call(*small(tmp_path, [0, 1] * 20), "--out", tmp_path)
    assert "folder or a device" in str(done.exception)


def test_dates_as_classes_are_saved_as_text(tmp_path):
    days = np.array(["2026-01-01", "2026-01-02"] * 20, "datetime64[D]")
    x = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
    done = call(*small(tmp_path, days, x), "--out", tmp_path / "out.onnx")
    assert done.exit_code == 0, done.output
    meta = ort.InferenceSession(tmp_path / "out.onnx").get_modelmeta().custom_metadata_map
    assert json.loads(meta["classes"]) == ["2026-01-01", "2026-01-02"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("bad.npz", b"PK\3\4 and no more", "cannot read"),
        ("bad.csv", "a,b,c,d,t\n1,2,3,4,k\xf6ln\n".encode("latin-1"), "save it as UTF-8"),
    ],
)
def test_damaged_data_raise(tmp_path, name, content, words):
    command = small(tmp_path, [0, 1] * 20)
    (tmp_path / name).write_bytes(content)
    done = call(*command[:3], tmp_path / name, *command[4:], "--out", tmp_path / "out.onnx")
    assert words in str(done.exception)


def test_a_table_for_a_network_that_reads_images_raises(tmp_path):
    pd.DataFrame({"a": [1.0, 2.0], "t": [0, 1]}).to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(splitfg.DataError, match=r"rows of shape \(1, 8, any\)"):
        read_examples(tmp_path / "t.csv", {"x": (None, 1, 8, None)}, Reading("t"))


def test_a_report_that_cannot_be_written_stops_before_training(tmp_path):
    command = small(tmp_path, [0, 1] * 20)
    done = call(*command, "--out", tmp_path / "out.onnx", "--report", tmp_path / "none" / "page.html")
    assert "is not a folder" in str(done.exception)
    assert not (tmp_path / "out.onnx").exists()


def test_an_empty_table_raises(tmp_path):
    pd.DataFrame(columns=[*"abcd", "t"]).to_csv(tmp_path / "none.csv", index=False)
    (tmp_path / "net.onnx").write_bytes(example_model((4, 8, 3)))
    data = tmp_path / "none.csv"
    done = call("tune", tmp_path / "net.onnx", "--data", data, "--target", "t", "--out", tmp_path / "out.onnx")
    assert "has no rows" in str(done.exception)


def test_a_graph_without_weights_trains_a_head_alone_if_asked(tmp_path):
    command = small(tmp_path, [0, 1] * 20, np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32))
    relu = model([helper.make_node("Relu", ["x"], ["h"])], {}, {"x": ["rows", 4]}, {"h": ["rows", 4]})
    (tmp_path / "net.onnx").write_bytes(relu)
    done = call(*command, "--out", tmp_path / "out.onnx")
    assert "no weight to train" in str(done.exception)
    done = call(*command, "--out", tmp_path / "out.onnx", "--method", "head")
    assert done.exit_code == 0, done.output


def test_a_graph_of_one_row_is_tuned_and_saved(tmp_path):
    command = small(tmp_path, [0, 1] * 20, np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32))
    weights = {"w": random(np.random.default_rng(1), 4, 6)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Relu", ["z"], ["h"])]
    (tmp_path / "net.onnx").write_bytes(model(nodes, weights, {"x": [1, 4]}, {"h": [1, 6]}))
    done = call(*command, "--out", tmp_path / "out.onnx")
    assert done.exit_code == 0, done.output
    assert ort.InferenceSession(tmp_path / "out.onnx").run(["label"], {"x": np.zeros((1, 4), np.float32)})


def test_the_network_itself_is_no_output(folder):
    done = call("tune", folder / "net.onnx", "--data", folder / "digits.npz", "--out", folder / "net.onnx")
    assert "never written to" in str(done.exception)


def test_show_lists_cuts_and_weights(folder):
    done = call("onnx", "show", folder / "net.onnx")
    assert done.exit_code == 0, done.output
    for words in ("(free, 64)", "a1", "(default cut)", "0.weight", "2,048", "2,608 numbers"):
        assert words in done.output


def test_the_page_escapes_names():
    report = TuneReport(
        "<a>", "b", "head", "accuracy", {"tuned": 1.0}, 1, (2, 2), 3, 0.1, 0.2, ["<x>", "y"], np.eye(2, dtype=int), [1]
    )
    page = as_html(report)
    assert "<a>" not in page
    assert "<x>" not in page
    assert "&lt;x&gt;" in page
