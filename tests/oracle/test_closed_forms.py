"""The rules that pull a signal back through operators, against autograd in float64."""

import operator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _learning import errors, network
from _toolkit import generator, noise
from torch import nn

from splitfg import LearnedFeedback
from splitfg.feedback import Relay, sweep
from splitfg.sites import record_lean_tape, record_tape

TOKENS = torch.tensor([[0, 1, 2, 2], [3, 3, 1, 0]])
ROWS = torch.tensor([3, 1, 1, 0])
PLACES = torch.tensor([3, 1, 2, 0])[None, :, None].expand(2, 4, 6)


FUNCTIONS = {
    "add broadcast": lambda a, b: a + b[0],
    "sub": lambda a, b: 3 - a - 2 * b,
    "mul": lambda a, b: a * b * 0.5,
    "div": lambda a, b: a / (2 + b.square()),
    "relu": lambda a, b: torch.relu(a) + F.relu(b),
    "elementwise": lambda a, b: F.gelu(a, approximate="tanh") + F.leaky_relu(b, 0.2) + F.elu(a) + F.mish(b) + a**3,
    "exp log": lambda a, b: (1 + a.exp()).log() - b.abs().sqrt(),
    "hard": lambda a, b: F.hardswish(a) + F.relu6(b) + F.hardtanh(a) + a.clamp(-0.5, 0.5),
    "matmul": lambda a, b: a @ b.mT @ a,
    "softmax": lambda a, b: (a @ b.transpose(-1, -2)).softmax(-1) @ b,
    "attention": lambda a, b: F.scaled_dot_product_attention(a, b, a * b, is_causal=True),
    "attention mask": lambda a, b: F.scaled_dot_product_attention(a, b, b, attn_mask=torch.eye(4, dtype=torch.bool)),
    "attention bias": lambda a, b: F.scaled_dot_product_attention(a, b, b, attn_mask=(a @ b.mT), scale=0.3),
    "grouped attention": lambda a, b: F.scaled_dot_product_attention(a, b[:1], a[1:], enable_gqa=True),
    "layer norm": lambda a, b: F.layer_norm(a, (4, 6), b[0], a[0], eps=0.1) + F.layer_norm(b, (6,)),
    "batch norm": lambda a, b: F.batch_norm(a, noise(4), noise(4).square(), b[0, 1, :4], a[0, 0, :4]),
    "batch statistics": lambda a, b: F.batch_norm(a, None, None, b[0, 1, :4], a[0, 0, :4], training=True),
    "embedding": lambda a, b: F.embedding(TOKENS, a.flatten(0, 1), padding_idx=-8) + F.embedding(TOKENS, b[0]),
    "gather": lambda a, b: a.gather(1, TOKENS.unsqueeze(-1).expand(2, 4, 6) % 4) * b,
    "pad": lambda a, b: F.pad(a, (1, 2, 0, 1)) * F.pad(b, (3, 0, 1, 0), value=1.0),
    "repeat": lambda a, b: a.repeat(2, 1, 3) + b.repeat(3, 2, 1, 1)[0].repeat(1, 1, 3),
    "pool": lambda a, b: F.adaptive_avg_pool1d(a, 1) * b,
    "masked": lambda a, b: a.masked_fill(torch.eye(4, 6, dtype=torch.bool), 0.3) + torch.where(b > 0, b, a),
    "where": lambda a, b: a.where(b > 0, b) + a.where(condition=b > 0, other=b[0]) + torch.where(a > 0, 2.0, b),
    "mask by name": lambda a, b: a.masked_fill(value=0.3, mask=torch.eye(4, 6, dtype=torch.bool)) * b,
    "mean": lambda a, b: a - a.mean(-1, keepdim=True) + b.mean(dim=(0, 1)) + a.sum(1, keepdim=True) + b.mean(),
    "reshape": lambda a, b: a.flatten(1).unflatten(1, (6, 4)).reshape(2, 4, 6) + b.view(8, 6).view(2, 4, 6),
    "permute": lambda a, b: a.permute(2, 0, 1).permute(1, 2, 0) * b.transpose(0, 1).transpose(1, 0).contiguous(),
    "index": lambda a, b: b[:, [0, 0]] * a[:, :2],
    "indices": lambda a, b: a[:, np.array([0, 0, 3])] + b[..., (1, 1, 2), None].mT.mT[..., 0][:, :3, :1] + a[1, 0, 5],
    "range": lambda a, b: a[range(2), :, ::2] * b[None, :, 1:, range(3)].mT[0, :, :1],
    "parts": lambda a, b: torch.cat([*a.split(2, -1), b.chunk(2, -1)[0]], -1) + torch.stack(b.unbind(1), 1)[..., :1],
    "expand": lambda a, b: a[:, :1].expand(2, 4, 6) * b + b.unsqueeze(0).squeeze(0),
    "detach": lambda a, b: a.detach() * b,
    "roll": lambda a, b: torch.roll(a, (1, -2), (1, 2)) * b.roll(3) + torch.flip(a, (0, 2)) * b.flip(1),
    "movedim": lambda a, b: a.movedim((0, 1), (2, 0)) * b.movedim(0, -1).swapdims(0, 0),
    "pixels": lambda a, b: F.pixel_unshuffle(F.pixel_shuffle(a.reshape(1, 8, 2, 3), 2), 2).reshape(2, 4, 6) * b,
    "select": lambda a, b: a.index_select(1, torch.tensor([3, 0, 0, 1])) * b,
    "addcmul": lambda a, b: torch.addcmul(a[0], a, b, value=0.5) + torch.lerp(a, b[:, :1], b) + a.lerp(b, 0.3),
    "baddbmm": lambda a, b: torch.baddbmm(a[:, :, :4], a, b.mT, beta=0.5, alpha=2.0) @ b,
    "logarithms": lambda a, b: a.log_softmax(-1) * F.log_softmax(b, dim=1) + b.logsumexp((0, -1), keepdim=True),
    "logsumexp": lambda a, b: a.logsumexp(1).unsqueeze(1) * b + torch.logsumexp(b, dim=(0, 2)).view(4, 1),
    "normalize": lambda a, b: F.normalize(a, dim=-1) + F.normalize(b, dim=1, eps=2.0) * a,
    "adaptive pool": lambda a, b: F.adaptive_avg_pool1d(a, 4) + F.adaptive_avg_pool2d(b, (3, 4)).repeat(1, 2, 1)[:, :4],
    "index add": lambda a, b: a.index_add(1, ROWS, b, alpha=0.5) + torch.zeros(2, 4, 6).double().index_add_(1, ROWS, b),
    "scatter": lambda a, b: (
        a.scatter(1, PLACES, b) * a.scatter(1, PLACES, 2.0) + a.scatter_add(dim=1, index=PLACES, src=b)
    ),
    "interleave": lambda a, b: (
        a.repeat_interleave(3, 1)[:, 2:6] * b.repeat_interleave(torch.tensor([3, 1]), dim=0)[1:3]
    ),
    "extremes": lambda a, b: a.max(1, keepdim=True).values * b.min(-1)[0].unsqueeze(-1) + a.max() - torch.min(b),
    "larger": lambda a, b: torch.maximum(a, b[:, :1]) * torch.min(a, b) + torch.max(a, a) - torch.minimum(b, b * 1),
    "topk": lambda a, b: a.topk(2, dim=1).values.sum(1, keepdim=True) * b.sort(-1, descending=True)[0],
    "einsum": lambda a, b: torch.einsum("bij,bkj->bik", a, b) @ torch.einsum("...ij,j", b, a[0, 0]).unsqueeze(-1) * a,
    "einsum sums": lambda a, b: torch.einsum("bij,bkl->ik", a, b) @ torch.einsum("...j->...", [b]).mT + a[:1, :, :2],
    "einsum broadcast": lambda a, b: torch.einsum("b...j, ...j -> ...b", a[:, :1], b[:1, 0]).sum() * a * b,
    "variance": lambda a, b: (
        (a - a.mean(-1, keepdim=True)) / (a.var(-1, keepdim=True, unbiased=False) + 0.1).sqrt() * b
    ),
    "deviations": lambda a, b: a.std() + b.std((0, 1), correction=0) * a.var(1, False, True) + b.var(False),
    "norms": lambda a, b: a / a.norm(dim=-1, keepdim=True) + b.norm() * torch.linalg.vector_norm(b, dim=1)[:, None],
    "rms norm": lambda a, b: F.rms_norm(a, (6,), b[0, 0]) * F.rms_norm(b, (4, 6), eps=0.1),
    "accumulated": lambda a, b: operator.iadd(operator.iadd(torch.zeros(2, 4, 6).double(), a * b), b),
    "cumsum": lambda a, b: a.cumsum(1) * torch.cumsum(b, dim=-1),
}


class Sum(nn.Module):
    """Two parameters through a function, so that a sweep has to pull h back to both."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b = nn.Parameter(noise(2, 4, 6, seed=0)), nn.Parameter(noise(2, 4, 6))
        self.function = function

    def forward(self):
        data = torch.zeros(())  # a product with values of parameters alone belongs into a layer
        return self.function(self.a + data, self.b + data)


@pytest.mark.parametrize("record", [record_tape, record_lean_tape])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_closed_forms_are_autograds(name, record):
    module = Sum(FUNCTIONS[name])
    h = module()
    u = noise(*h.shape, seed=2)
    expected = torch.autograd.grad(h, (module.a, module.b), u, materialize_grads=True)
    trained = {id(module.a): "a", id(module.b): "b"}
    grads = sweep(record(module, module, trained), u, Relay(), trained).grads
    for found, exact in zip((grads.get("a"), grads["b"]), expected, strict=True):
        torch.testing.assert_close(found if found is not None else torch.zeros_like(exact), exact)


@pytest.mark.parametrize(
    "pool",
    [
        nn.AdaptiveAvgPool2d(1),
        nn.AdaptiveAvgPool2d((4, 2)),
        nn.Upsample(scale_factor=2),
        nn.Upsample(scale_factor=1.7, mode="nearest-exact"),
        nn.Upsample(size=(5, 8), mode="bilinear"),
        nn.Upsample(scale_factor=(1.5, 2), mode="bilinear", align_corners=True),
        nn.Upsample(scale_factor=1.5, mode="bicubic", recompute_scale_factor=True),
        nn.AvgPool2d(2),
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.AvgPool2d(3, 2, 1),
    ],
    ids=str,
)
def test_pooling_is_pulled_back(pool):
    trunk = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), pool, nn.Flatten()).double()
    x = noise(3, 2, 6, 6)
    split = network(trunk, trunk(x).shape[-1])
    y = torch.randint(0, 3, (3,), generator=generator())
    found = errors(split, LearnedFeedback()(split, x, y, generator=generator()), x, y)
    assert max(found.values()) < 1e-10
