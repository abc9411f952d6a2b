"""Every trunk under jvp, vmap and compile, and against its equation written out by hand in float64."""

import math

import pytest
import torch
from torch.func import functional_call, jacfwd, jvp, vjp, vmap
from torch.nn import functional as F

from splitfg.models import GPT, MLP, FlatTrunk, GPTConfig, ResNet, TabM, toy_trunk

K = 3


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def noise(*shape, seed=1):
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


TINY = GPTConfig(layers=2, width=8, heads=2, context=6, vocab=11)
CASES = {
    "toy": (lambda g: toy_trunk(generator=g), noise(3, 16)),
    "mlp": (lambda g: MLP(4, widths=(6, 5), generator=g), noise(3, 4)),
    "tabm": (lambda g: TabM(4, width=6, members=3, generator=g), noise(3, 4)),
    "resnet": (lambda g: ResNet(widths=(8, 16), blocks=(1, 2), generator=g), noise(2, 3, 8, 8)),
    "flat": (lambda g: FlatTrunk(width=8, generator=g), noise(2, 3, 6, 6)),
    "gpt": (lambda g: GPT(TINY, generator=g), torch.randint(0, 11, (2, 5), generator=generator(1))),
}


def prepare(name):
    build, x = CASES[name]
    trunk = build(generator()).double()
    params = {key: value.detach() for key, value in trunk.named_parameters()}
    tangents = {key: noise(K, *value.shape, seed=i) for i, (key, value) in enumerate(params.items())}
    return params, tangents, lambda p: functional_call(trunk, p, (x,))


def push(f):
    """h and the K directional derivatives, as an engine would batch them."""

    def run(params, tangents):
        return vmap(lambda v: jvp(f, (params,), (v,)), out_dims=(None, 0))(tangents)

    return run


@pytest.mark.parametrize("name", CASES)
def test_jvp_is_the_adjoint_of_reverse_mode(name):
    """<u, J v> = <Jᵀ u, v>; finite differences would trip over the ReLUs' kinks."""
    params, tangents, f = prepare(name)
    h, dh = push(f)(params, tangents)
    torch.testing.assert_close(h, f(params))
    expected, pull = vjp(f, params)
    torch.testing.assert_close(h, expected)
    for seed in range(4):
        u = noise(*h.shape, seed=seed)
        (pulled,) = pull(u)
        products = sum(tangents[key].flatten(1) @ pulled[key].flatten() for key in params)
        torch.testing.assert_close(dh.flatten(1) @ u.flatten(), products)


@pytest.mark.parametrize("name", CASES)
def test_compiled_jvp_matches_eager(name):
    params, tangents, f = prepare(name)
    torch.compiler.reset()
    compiled = torch.compile(push(f), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(params, tangents), push(f)(params, tangents))


@pytest.mark.slow
def test_inductor_jvp_matches_eager():
    params, tangents, f = prepare("gpt")
    torch.compiler.reset()
    compiled = torch.compile(push(f), fullgraph=True)
    torch.testing.assert_close(compiled(params, tangents), push(f)(params, tangents))


def test_toy_jvp_matches_the_whole_jacobian():
    params, tangents, f = prepare("toy")
    jacobian = jacfwd(f)(params)
    _, dh = push(f)(params, tangents)
    expected = sum(torch.einsum("bhp,kp->kbh", jacobian[key].flatten(2), tangents[key].flatten(1)) for key in params)
    torch.testing.assert_close(dh, expected)


def test_tabm_is_the_mean_of_its_members():
    trunk = TabM(4, width=6, members=3, generator=generator()).double()
    x = noise(5, 4)
    members = []
    for i in range(3):
        h = x
        for layer in trunk.layers:
            h = torch.relu(F.linear(h * layer.r[i], layer.weight) * layer.s[i] + layer.bias)
        members.append(h)
    torch.testing.assert_close(trunk(x), torch.stack(members).mean(dim=0))


@pytest.mark.parametrize("queries", [1, 2, 3, 5, 8])
def test_gpt_matches_torchs_own_attention_and_norms(queries, monkeypatch):
    """Whatever number of queries are taken at a time, the last block a shorter one."""
    monkeypatch.setattr("splitfg.models.gpt._QUERIES", queries)
    trunk = GPT(TINY, generator=generator()).double()
    x = CASES["gpt"][1]
    stream = trunk.token.weight[x] + trunk.position[:5]
    for block in trunk.blocks:
        a = block.attention
        inside = F.layer_norm(stream, (8,), block.norm1.weight, block.norm1.bias)
        q, k, v = (
            part.view(2, 5, 2, 4).transpose(1, 2)
            for part in F.linear(inside, a.qkv.weight, a.qkv.bias).split(8, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 5, 8)
        stream = stream + F.linear(mixed, a.proj.weight, a.proj.bias)
        z = F.linear(
            F.layer_norm(stream, (8,), block.norm2.weight, block.norm2.bias),
            block.mlp.fc.weight,
            block.mlp.fc.bias,
        )
        gelu = 0.5 * z * (1 + torch.erf(z / math.sqrt(2)))
        stream = stream + F.linear(gelu, block.mlp.out.weight, block.mlp.out.bias)
    torch.testing.assert_close(trunk(x), F.layer_norm(stream, (8,), trunk.norm.weight, trunk.norm.bias))


def test_gpt_pushes_tangents_through_blocks_of_queries(monkeypatch):
    params, tangents, f = prepare("gpt")
    whole = push(f)(params, tangents)
    monkeypatch.setattr("splitfg.models.gpt._QUERIES", 2)
    torch.testing.assert_close(push(f)(params, tangents), whole)


def test_gpt_cannot_see_the_future():
    trunk = GPT(TINY, generator=generator()).double()
    x = CASES["gpt"][1]
    changed = x.clone()
    changed[:, 3:] = (changed[:, 3:] + 1) % 11
    h, other = trunk(x), trunk(changed)
    torch.testing.assert_close(h[:, :3], other[:, :3], rtol=0, atol=0)
    assert not torch.allclose(h[:, 3:], other[:, 3:])


@pytest.mark.parametrize("name", ["resnet", "flat"])
def test_images_of_a_batch_do_not_meet(name):
    build, x = CASES[name]
    trunk = build(generator()).double()
    torch.testing.assert_close(trunk(x)[:1], trunk(x[:1]))


def written_out_norm(x, weight, bias):
    """GroupNorm with 8 groups, spelled out."""
    groups = x.unflatten(1, (8, -1)).flatten(2)
    centred = groups - groups.mean(dim=2, keepdim=True)
    scaled = centred / (centred.pow(2).mean(dim=2, keepdim=True) + 1e-5).sqrt()
    return scaled.view_as(x) * weight[:, None, None] + bias[:, None, None]


def written_out_conv_norm(params, name, x, stride=1):
    weight = params[f"{name}.conv.weight"]
    z = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
    return written_out_norm(z, params[f"{name}.norm.weight"], params[f"{name}.norm.bias"])


def written_out_block(params, name, x, stride=1):
    write = torch.relu(written_out_conv_norm(params, f"{name}.first", x, stride))
    write = written_out_conv_norm(params, f"{name}.second", write)
    projected = f"{name}.shortcut.conv.weight" in params
    return torch.relu(write + (written_out_conv_norm(params, f"{name}.shortcut", x, stride) if projected else x))


def jittered(trunk):
    """Norms away from 1 and 0, so that their affine parameters matter."""
    with torch.no_grad():
        for i, p in enumerate(trunk.parameters()):
            p.add_(0.1 * noise(*p.shape, seed=i))
    return dict(trunk.named_parameters())


def test_flat_trunk_is_stem_block_and_flatten():
    build, x = CASES["flat"]
    trunk = build(generator()).double()
    params = jittered(trunk)
    stem = torch.relu(written_out_conv_norm(params, "stem", x))
    torch.testing.assert_close(trunk(x), written_out_block(params, "block", stem).flatten(1))


def test_resnet_halves_the_image_in_the_first_block_of_later_stages():
    build, x = CASES["resnet"]
    trunk = build(generator()).double()
    params = jittered(trunk)
    h = torch.relu(written_out_conv_norm(params, "stem", x))
    for name, stride in (("blocks.0", 1), ("blocks.1", 2), ("blocks.2", 1)):
        h = written_out_block(params, name, h, stride)
    assert h.shape == (2, 16, 4, 4)
    torch.testing.assert_close(trunk(x), h.sum(dim=(2, 3)) / 16)
