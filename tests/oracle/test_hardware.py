"""Devices that only run forward: their gradients against autograd on the same layers, in float64."""

import copy
import io
import sys
import unittest.mock
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call

import splitfg
from splitfg.feedback import DeltaRule, LayerDifference, Relay
from splitfg.hardware import (
    ActivityPerturbation,
    AnalogDevice,
    DeviceTrunk,
    PipeDevice,
    Twin,
    Wiring,
    function,
    layer,
    serve,
)
from splitfg.hardware._pipe import receive, send


def wired(seed=0):
    """Two layers, a sum of both and a norm: everything that a wiring may hold."""
    torch.manual_seed(seed)
    first, second, norm = nn.Linear(5, 6), nn.Linear(6, 6), nn.LayerNorm(6)
    nodes = (
        layer("first", first, reads="x", writes="z1"),
        function(torch.tanh, "z1", writes="a1"),
        layer("second", second, reads="a1", writes="z2"),
        function(torch.add, "z2", "a1", writes="s"),
        function(norm, "s", name="norm", writes="h"),
    )
    for module in (first, second, norm):
        module.double()
    return Wiring(nodes, ("x",), "h")


def batch(rows=7):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (rows,), generator=generator)


@pytest.fixture
def network():
    wiring = wired()
    head = splitfg.LinearHead(nn.Linear(6, 3).double())
    return splitfg.Split(DeviceTrunk(AnalogDevice(wiring), wiring), head)


def exact_gradient(network, x, y):
    twin = Twin(copy.deepcopy(network.trunk.wiring)).requires_grad_(True)
    loss = nn.functional.cross_entropy(network.head.predict(twin(x)), y)
    names = dict(twin.named_parameters())
    return dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))


def test_learned_feedback_equals_autograd_once_its_maps_have_converged(network):
    (x, y), estimator, generator = batch(64), splitfg.LearnedFeedback(), torch.Generator().manual_seed(0)
    for _ in range(80):
        estimate = estimator(network, x, y, generator=generator)
        estimator.update_state(network, estimate)
    for name, g in exact_gradient(network, x, y).items():
        torch.testing.assert_close(estimate.grads[f"trunk.{name}"], g, rtol=1e-6, atol=1e-9)


def test_activity_perturbations_have_the_gradient_as_their_mean(network):
    (x, y), generator = batch(), torch.Generator().manual_seed(0)
    estimator = ActivityPerturbation(K=100, step=1e-4)
    draws = [estimator(network, x, y, generator=generator).grads for _ in range(40)]
    worst = 0.0
    for name, g in exact_gradient(network, x, y).items():
        values = torch.stack([d[f"trunk.{name}"] for d in draws])
        z = (values.mean(0) - g) / (values.std(0) / len(draws) ** 0.5 + 1e-12)
        worst = max(worst, float(z.abs().max()))
    assert worst < 4.8  # t with 39 degrees of freedom, 84 coordinates, p = 0.001 in all


def test_a_converged_prediction_leaves_nothing_to_the_noise(network):
    (x, y), generator = batch(64), torch.Generator().manual_seed(0)
    for name, p in network.trunk.named_parameters():
        p.requires_grad_(not name.startswith("norm"))  # the prediction covers layers
    feedback = splitfg.LearnedFeedback()
    estimator = ActivityPerturbation(K=1, step=1e-4, prediction=feedback)
    for _ in range(80):
        feedback.update_state(network, feedback(network, x, y, generator=generator))
    estimate = estimator(network, x, y, generator=generator)
    g = exact_gradient(network, x, y)
    for name in ("first.weight", "second.weight"):
        torch.testing.assert_close(estimate.grads[f"trunk.{name}"], g[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("central", [True, False])
def test_inferences_are_counted(network, central):
    x, y = batch(8)
    estimator = ActivityPerturbation(K=3, central=central)
    estimator(network, x, y, generator=torch.Generator().manual_seed(0))
    assert network.trunk.counts.inferences == 8 * (1 + (6 if central else 3))
    assert network.trunk.counts.runs == 2


def test_a_device_keeps_its_own_state():
    """What a device did cannot be undone, so passes restore nothing of it."""

    @dataclass
    class Counting:
        device: AnalogDevice
        runs: int = 0

        def write(self, params):
            self.device.write(params)

        def run(self, inputs, add, read):
            self.runs += 1
            return self.device.run(inputs, add, read)

    wiring = wired()
    device = Counting(AnalogDevice(wiring))
    network = splitfg.Split(DeviceTrunk(device, wiring), splitfg.LinearHead(nn.Linear(6, 3).double()))
    x, y = batch()
    ActivityPerturbation(K=2)(network, x, y, generator=torch.Generator().manual_seed(0))
    assert device.runs == network.trunk.counts.runs > 0


def test_weights_are_written_only_when_they_change(network):
    x, _ = batch()
    network.h(x)
    network.h(x)
    assert network.trunk.counts.writes == 1
    with torch.no_grad():
        network.trunk.get_parameter("first.weight").add_(1.0)
    before = network.h(x)
    assert network.trunk.counts.writes == 2
    torch.testing.assert_close(before, Twin(copy.deepcopy(network.trunk.wiring))(x).detach())


def test_weight_perturbations_reach_the_device(network):
    (x, y), generator = batch(), torch.Generator().manual_seed(0)
    estimator = splitfg.SplitFG(K=500, engine=splitfg.CentralDifference(step=1e-4))
    estimate = estimator(network, x, y, generator=generator)
    g = torch.cat([v.flatten() for v in exact_gradient(network, x, y).values()])
    found = torch.cat([estimate.grads[n].flatten() for n in network.trunk_params()])
    # the relative error of K tangents in P dimensions is sqrt((P + 1) / K)
    assert (found - g).norm() / g.norm() < 1.5 * ((len(g) + 1) / 500) ** 0.5


def test_the_simulator_rounds_adds_noise_drifts_and_writes_inexactly():
    wiring, x = wired(), batch(200)[0]
    exact = AnalogDevice(wiring).run((x,), {}, ["z1", "h"])
    coarse = AnalogDevice(wiring, bits=3).run((x,), {}, ["h"])["h"]
    assert len(coarse.unique()) <= 8
    noisy = AnalogDevice(wiring, noise=0.1).run((x,), {}, ["z1"])["z1"] - exact["z1"]
    assert noisy.std() / exact["z1"].square().mean().sqrt() == pytest.approx(0.1, rel=0.1)
    device, weights = AnalogDevice(wiring, write_error=0.2), {"first.weight": torch.ones(6, 5).double()}
    device.write(weights)
    assert 0.1 < float((device.run((x,), {}, ["z1"])["z1"] - x @ weights["first.weight"].T).std()) < 2.0
    drifting = AnalogDevice(wiring, drift=0.01)
    first = drifting.run((x,), {}, ["h"])["h"]
    for _ in range(20):
        last = drifting.run((x,), {}, ["h"])["h"]
    assert (first - last).norm() > 2 * (first - exact["h"]).norm()


def test_numbers_are_added_before_they_are_read():
    wiring, x = wired(), batch()[0]
    device, e = AnalogDevice(wiring), torch.ones(7, 6, dtype=torch.float64)
    plain, moved = device.run((x,), {}, ["z1", "a1"]), device.run((x,), {"z1": e}, ["z1", "a1"])
    torch.testing.assert_close(moved["z1"], plain["z1"] + 1)
    torch.testing.assert_close(moved["a1"], torch.tanh(plain["z1"] + 1))


def test_problems_name_a_function_that_the_device_computes_differently():
    wiring = wired()

    class Wrong(AnalogDevice):
        def run(self, inputs, add, read):
            found = super().run(inputs, add, read)
            return {n: v + 1 if n == "a1" else v for n, v in found.items()}

    assert DeviceTrunk(AnalogDevice(wiring), wiring).problems((batch()[0],)) == []
    found = DeviceTrunk(Wrong(wiring), wiring).problems((batch()[0],))
    assert len(found) == 1
    assert "a1" in found[0]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda w: DeviceTrunk(object(), w), "write"),
        (lambda w: AnalogDevice(w, bits=0, noise=-1.0), "bits.*|noise"),
        (lambda w: Wiring(w.nodes[::-1], ("x",), "h"), "before a node writes it"),
        (lambda w: Wiring(w.nodes, ("x",), "nowhere"), "nowhere"),
        (lambda w: ActivityPerturbation(K=0, step=-1), "K must"),
    ],
)
def test_bad_devices_raise_with_the_cure(make, words):
    with pytest.raises(splitfg.SplitError, match=words):
        make(wired())


def test_readings_that_are_not_finite_or_missing_raise():
    wiring = wired()

    class Broken(AnalogDevice):
        def run(self, inputs, add, read):
            return {name: torch.full((len(inputs[0]), 6), torch.nan) for name in read}

    with pytest.raises(splitfg.NonFiniteError, match="h is not finite"):
        DeviceTrunk(Broken(wiring), wiring)(batch()[0])

    class Silent(AnalogDevice):
        def run(self, inputs, add, read):
            return {}

    with pytest.raises(splitfg.SplitError, match="did not return h"):
        DeviceTrunk(Silent(wiring), wiring)(batch()[0])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda z: z.new_full(z.shape, torch.nan), "z1 is not finite"),
        (lambda z: z[:, :3], r"readings .*a1 \(7, 3\)"),
        (lambda z: z[:3], r"readings .*a1 \(3, 6\)"),
        (lambda z: z.to(torch.complex64), "complex numbers for z1"),
        (lambda z: z.numpy()[:, ::-1], r"read what the device returns for z1 .*ascontiguousarray"),
        (lambda z: z.numpy().astype(">f4"), r"read what the device returns for z1 .*ascontiguousarray"),
        (lambda z: z.tolist(), "a list for z1"),
    ],
)
def test_bad_readings_of_layers_raise_with_their_name(changed, words):
    class Faulty(AnalogDevice):
        def run(self, inputs, add, read):
            found = dict(super().run(inputs, add, read))
            return found | {name: changed(found[name]) for name in read if name == "z1"}

    wiring = wired()
    split = splitfg.Split(DeviceTrunk(Faulty(wiring), wiring), splitfg.LinearHead(nn.Linear(6, 3).double()))
    with pytest.raises(splitfg.SplitError, match=words):
        splitfg.LearnedFeedback()(split, *batch(), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("answer", [None, [torch.zeros(7, 6)]])
def test_a_device_that_returns_no_dict_raises(answer):
    class Wrong(AnalogDevice):
        def run(self, inputs, add, read):
            return answer

    wiring = wired()
    with pytest.raises(splitfg.SplitError, match="return a dict of tensors"):
        DeviceTrunk(Wrong(wiring), wiring)(batch()[0])


PROGRAM = """
import sys
sys.path[:0] = {paths!r}
from test_hardware import wired
from splitfg.hardware import AnalogDevice, serve
serve(AnalogDevice(wired()))
"""


@pytest.fixture(scope="module")
def piped():
    with PipeDevice([sys.executable, "-c", PROGRAM.format(paths=[str(Path(__file__).parent), *sys.path])]) as device:
        yield device


def test_a_program_behind_a_pipe_trains_as_the_device_inside_it(piped, network):
    x, y = batch()
    estimates = []
    for trunk in (network.trunk, DeviceTrunk(piped, network.trunk.wiring)):
        split = splitfg.Split(trunk, network.head)
        estimator, generator = splitfg.LearnedFeedback(), torch.Generator().manual_seed(0)
        for _ in range(2):
            estimate = estimator(split, x, y, generator=generator)
            estimator.update_state(split, estimate)
        estimates.append(estimate)
    assert estimates[0].grads.keys() == estimates[1].grads.keys()
    for name, g in estimates[0].grads.items():
        torch.testing.assert_close(estimates[1].grads[name], g)


def test_errors_come_back_through_the_pipe(piped):
    with pytest.raises(splitfg.SplitError, match=r"failed: .*no weight named nothing"):
        piped.write({"nothing": torch.zeros(2)})
    assert piped.run((batch()[0],), {}, ["h"])["h"].shape == (7, 6)


def test_tensors_that_a_message_cannot_hold_raise_on_either_side(piped):
    with pytest.raises(splitfg.SplitError, match=r"torch\.bfloat16, torch\.bool cannot be sent"):
        piped.write({"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(2, dtype=torch.bool)})

    class Narrow(AnalogDevice):
        def run(self, inputs, add, read):
            return {name: torch.zeros(7, 6, dtype=torch.float16) for name in read}

    asked, answered = io.BytesIO(), io.BytesIO()
    send(asked, {"do": "run", "read": ["h"]}, [({"kind": "input"}, batch()[0])])
    serve(Narrow(wired()), io.BytesIO(asked.getvalue()), answered)
    assert "torch.float16 cannot be sent" in receive(io.BytesIO(answered.getvalue()))[0]["error"]
    assert piped.run((batch()[0],), {}, ["h"])["h"].shape == (7, 6)


def test_a_message_keeps_tensors_without_entries():
    message, sent = io.BytesIO(), torch.empty(0, 3, dtype=torch.int64)
    send(message, {}, [({"name": "h"}, sent)])
    [(_, found)] = receive(io.BytesIO(message.getvalue()))[1]
    assert (found.shape, found.dtype) == (sent.shape, sent.dtype)


@pytest.mark.parametrize(
    "message",
    [
        "[1]",
        "ready",
        '{"tensors": 3}',
        '{"tensors": [3]}',
        '{"tensors": [{"name": "h", "dtype": ["float32"], "shape": [1]}]}',
        '{"tensors": [{"name": "h", "shape": [1]}]}',
        '{"tensors": [{"name": "h", "dtype": "float32"}]}',
        '{"tensors": [{"name": "h", "dtype": "float32", "shape": [-1]}]}',
        '{"tensors": [{"name": "h", "dtype": "float32", "shape": 3}]}',
    ],
)
def test_a_damaged_message_raises(message):
    with pytest.raises(ValueError, match=r"."):
        receive(io.BytesIO(message.encode() + b"\n" + bytes(8)))


def test_an_interrupted_message_is_not_answered_by_the_next():
    """Ctrl-C while the program computes: its late answer must not pass for that of the next batch."""
    program = PROGRAM.format(paths=[str(Path(__file__).parent), *sys.path])
    with PipeDevice([sys.executable, "-c", program]) as device:
        late = unittest.mock.patch("splitfg.hardware._pipe.receive", side_effect=KeyboardInterrupt)
        with late, pytest.raises(KeyboardInterrupt):
            device.run((batch()[0],), {}, ["h"])
        with pytest.raises(splitfg.SplitError, match="interrupted: start the program again"):
            device.run((torch.zeros(2, 5),), {}, ["h"])


def test_a_program_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr("splitfg.hardware._pipe._PATIENCE_S", 0.1)
    with PipeDevice([sys.executable, "-c", "import time; time.sleep(600)"]) as device:
        pass
    assert device._process.returncode is not None


def test_a_program_that_ends_or_does_not_start_is_an_error():
    with pytest.raises(splitfg.SplitError, match="cannot start"):
        PipeDevice(["/nowhere/program"])
    with PipeDevice([sys.executable, "-c", "raise SystemExit(3)"]) as device:
        device._process.wait()
        with pytest.raises(splitfg.SplitError, match="exit code 3"):
            device.run((torch.zeros(1, 4),), {}, ["h"])


def test_layers_that_a_device_runs_alone_teach_exact_maps(network):
    x, y = batch(64)
    estimator = splitfg.LearnedFeedback(Relay(DeltaRule(1.0)), LayerDifference())
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        estimate = estimator(network, x, y, generator=generator)
        estimator.update_state(network, estimate)
    for name, g in exact_gradient(network, x, y).items():
        torch.testing.assert_close(estimate.grads[f"trunk.{name}"], g, rtol=1e-4, atol=1e-8)


def test_coarse_readings_are_those_of_the_named_tensors():
    wiring, (x, _) = wired(), batch(50)
    exact = AnalogDevice(wiring).run((x,), {}, ["z1", "h"])
    coarse = AnalogDevice(wiring, bits=3, coarse=["h"]).run((x,), {}, ["z1", "h"])
    assert torch.equal(coarse["z1"], exact["z1"])
    assert len(coarse["h"].unique()) <= 8
    step = (exact["h"].max() - exact["h"].min()) / 7
    assert (coarse["h"] - exact["h"]).abs().max() <= 0.5001 * step
    with pytest.raises(splitfg.SplitError, match="'no such'"):
        AnalogDevice(wiring, coarse=["no such"])


def test_the_noise_of_readings_has_the_given_size():
    wiring, (x, _) = wired(), batch(2000)
    exact = AnalogDevice(wiring).run((x,), {}, ["h"])["h"]
    noisy = AnalogDevice(wiring, read_noise=0.05).run((x,), {}, ["h"])["h"]
    size = (noisy - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert abs(float(size) - 0.05) < 0.0025  # 12,000 draws: five standard deviations of their root mean square


def test_a_twin_reads_loose_parameters_in_each_pass():
    gain, x = nn.Parameter(torch.ones(8)), torch.ones(3, 4)
    nodes = (layer("0", nn.Linear(4, 8), reads="x", writes="z"), function(torch.mul, "z", gain, writes="h"))
    twin = Twin(Wiring(nodes, ("x",), "h"), {"gain": gain})
    torch.testing.assert_close(functional_call(twin, {"gain": 2 * gain.detach()}, (x,)), 2 * twin(x))
