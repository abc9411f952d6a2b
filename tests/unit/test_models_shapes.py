"""Every trunk: its shapes, its parameter counts, its initialisation, and what it refuses."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from splitfg.models import (
    GPT,
    MLP,
    PRESETS,
    FlatTrunk,
    GPTConfig,
    TabM,
    linear,
    normal_linear,
    resnet18,
    resnet20,
    toy_trunk,
)

TINY = GPTConfig(layers=2, width=16, heads=2, context=6, vocab=11)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def count(module):
    return sum(p.numel() for p in module.parameters())


BUILDERS = {
    "toy": lambda g: toy_trunk(generator=g),
    "mlp": lambda g: MLP(5, generator=g),
    "tabm": lambda g: TabM(5, width=8, members=3, generator=g),
    "resnet20": lambda g: resnet20(generator=g),
    "flat": lambda g: FlatTrunk(width=8, generator=g),
    "gpt": lambda g: GPT(TINY, generator=g),
    "linear": lambda g: linear(5, 3, generator=g),
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_initialisation_depends_on_the_generator_alone(build):
    before = torch.get_rng_state()
    first, again, other = (build(generator(seed)).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before), "the global generator was used"
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    assert all(torch.isfinite(value).all() for value in first.values())


def test_parameter_counts_of_the_paper():
    g = generator()
    assert count(toy_trunk(generator=g)) == 1_600
    assert count(FlatTrunk(width=16, generator=g)) == 5_136
    assert count(FlatTrunk(width=64, generator=g)) == 75_840
    assert count(resnet20(generator=g)) + count(linear(64, 10, generator=g)) == 272_474
    assert count(resnet18(generator=g)) + count(linear(512, 100, generator=g)) == pytest.approx(11.2e6, rel=0.005)


def test_small8_counts_of_the_paper():
    with torch.device("meta"):
        trunk = GPT(PRESETS["small8"], generator=generator())
    head = trunk.tied_linear()
    assert count(trunk) - trunk.token.weight.numel() == 3_192_320
    assert count(head) == 12_916_049
    light = [p for name, p in trunk.named_parameters() if name == "position" or "norm" in name or "bias" in name]
    assert sum(p.numel() for p in light) == 46_592


def test_tabm_counts_by_hand():
    n, d, k = 7, 128, 8
    first = d * n + d + k * n + k * d
    second = d * d + d + k * d + k * d
    assert count(TabM(n, generator=generator())) == first + second


@pytest.mark.parametrize(
    ("trunk", "x", "shape"),
    [
        (toy_trunk(generator=generator()), torch.randn(3, 16), (3, 32)),
        (MLP(5, generator=generator()), torch.randn(3, 5), (3, 128)),
        (TabM(5, generator=generator()), torch.randn(3, 5), (3, 128)),
        (resnet20(generator=generator()), torch.randn(2, 3, 16, 16), (2, 64)),
        (FlatTrunk(width=16, generator=generator()), torch.randn(2, 3, 32, 32), (2, 16_384)),
        (GPT(TINY, generator=generator()), torch.randint(0, 11, (3, 4)), (3, 4, 16)),
    ],
)
def test_shape_of_h(trunk, x, shape):
    assert trunk(x).shape == shape


def test_layer_and_adapter_initialisation():
    layer = linear(400, 300, generator=generator()).requires_grad_(False)
    bound = 1 / math.sqrt(400)
    assert layer.weight.abs().max() <= bound
    assert layer.weight.std() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    normal = normal_linear(400, 300, generator=generator()).requires_grad_(False)
    assert normal.weight.std() == pytest.approx(bound, rel=0.02)
    assert normal.weight.abs().max() > 3 * bound
    assert not normal.bias.any()
    trunk = TabM(2000, generator=generator()).requires_grad_(False)
    # W ~ N(0, 1/fan_in), some of it beyond what a uniform law of that deviation could give
    for layer in trunk.layers:
        deviation = 1 / math.sqrt(layer.weight.shape[1])
        assert layer.weight.std() == pytest.approx(deviation, rel=0.02)
        assert layer.weight.abs().max() > 3 * deviation
        assert layer.bias.abs().max() <= deviation
    adapters = torch.cat([layer.r.flatten() for layer in trunk.layers])
    assert adapters.mean() == pytest.approx(1.0, abs=0.01)
    assert adapters.std() == pytest.approx(0.1, rel=0.05)


def test_gpt2_initialisation():
    config = GPTConfig(layers=8, width=128, heads=2, context=32, vocab=500)
    trunk = GPT(config, generator=generator()).requires_grad_(False)
    residual = 0.02 / math.sqrt(2 * 8)
    for block in trunk.blocks:
        for layer, std in [
            (block.attention.qkv, 0.02),
            (block.mlp.fc, 0.02),
            (block.attention.proj, residual),
            (block.mlp.out, residual),
        ]:
            assert layer.weight.std() == pytest.approx(std, rel=0.05)
            assert not layer.bias.any()
    assert trunk.position.std() == pytest.approx(0.02, rel=0.05)
    assert trunk.token.weight.std() == pytest.approx(0.02, rel=0.05)


def test_tied_linear_shares_the_table():
    trunk = GPT(TINY, generator=generator())
    head = trunk.tied_linear()
    assert head.weight is trunk.token.weight
    assert head.bias.shape == (11,)
    assert not head.bias.any()
    assert trunk.tied_linear(bias=False).bias is None
    with torch.no_grad():
        trunk.token.weight.add_(1.0)
    torch.testing.assert_close(head(torch.ones(16)), trunk.token.weight.sum(dim=1))


def test_tied_linear_follows_device_and_dtype_of_the_table():
    head = GPT(TINY, generator=generator()).double().tied_linear()
    assert head.bias.dtype == head.weight.dtype == torch.float64


def test_gpt_refuses_bad_input_and_names_every_problem():
    trunk = GPT(TINY, generator=generator())
    with pytest.raises(ValueError, match=r"length 7 is outside 1\.\.6"):
        trunk(torch.zeros(2, 7, dtype=torch.int64))
    with pytest.raises(ValueError, match="int64"):
        trunk(torch.zeros(2, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match="outside"):
        trunk(torch.zeros(2, 0, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"int64.*shape \(B, T\)"):
        trunk(torch.zeros(4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"layers": 0, "vocab": 0}, "layers.*vocab"), ({"width": 10, "heads": 4}, "not a multiple")],
)
def test_config_refuses_impossible_sizes(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)


@pytest.mark.parametrize(
    "build",
    [
        lambda: MLP(5, widths=(), generator=generator()),
        lambda: MLP(0, generator=generator()),
        lambda: TabM(5, members=0, generator=generator()),
    ],
)
def test_models_refuse_impossible_sizes(build):
    with pytest.raises(ValueError, match="positive"):
        build()


def test_larger_presets_belong_to_the_family():
    sizes = [config.layers * config.width**2 for config in PRESETS.values()]
    assert all(config.vocab == 50257 for config in PRESETS.values())
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == len(sizes)


def test_trunks_hold_no_buffers():
    for name, build in BUILDERS.items():
        module: nn.Module = build(generator())
        assert not list(module.buffers()), name
