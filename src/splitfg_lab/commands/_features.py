"""Test which forward-mode features this version of torch has."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Feature:
    """A feature: whether it works, whether splitfg needs it, and a detail."""

    name: str
    works: bool
    needed: bool
    detail: str


def probe_features(device: torch.device) -> Iterator[Feature]:
    """Test every feature on a device, the slow ones last."""
    yield _probe("forward mode (jvp)", _check_jvp, device, needed=True)
    yield _probe("many tangents at once (vmap over jvp)", _check_vmap, device, needed=True)
    yield _probe("jvp through attention, math backend", _check_attention, device, needed=False)
    yield _probe("jvp inside torch.compile", _check_compile, device, needed=False)


def _probe(name: str, check: Callable[[torch.device], str], device: torch.device, *, needed: bool) -> Feature:
    # any exception means that the feature does not work
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Feature(name, True, needed, check(device))
    except Exception as error:
        return Feature(name, False, needed, f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}")


def _f(x: Tensor) -> Tensor:
    return torch.tanh(x @ x.T).sum(-1)


def _point(device: torch.device, seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)


def _push(x: Tensor, v: Tensor) -> Tensor:
    tangent: Tensor = jvp(_f, (x,), (v,))[1]
    return tangent


def _check_jvp(device: torch.device) -> str:
    x, v = _point(device, 0, 4, 4), _point(device, 1, 4, 4)
    step = 1e-6
    measured = (_f(x + step * v) - _f(x - step * v)) / (2 * step)
    torch.testing.assert_close(_push(x, v), measured, rtol=1e-6, atol=1e-6)
    return "agrees with finite differences"


def _check_vmap(device: torch.device) -> str:
    x, stack = _point(device, 0, 4, 4), _point(device, 1, 3, 4, 4)
    together = vmap(lambda v: _push(x, v))(stack)
    torch.testing.assert_close(together, torch.stack([_push(x, v) for v in stack]))
    return "agrees with one after another"


def _check_attention(device: torch.device) -> str:
    x, v = _point(device, 0, 1, 2, 4, 8).float(), _point(device, 1, 1, 2, 4, 8).float()

    def attend(q: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, q, q, is_causal=True)

    with sdpa_kernel(SDPBackend.MATH):
        jvp(attend, (x,), (v,))
    return "fused attention kernels have no forward-mode rule; this one has"


def _check_compile(device: torch.device) -> str:
    x, v = _point(device, 0, 4, 4), _point(device, 1, 4, 4)
    compiled = torch.compile(_push, fullgraph=True)
    torch.testing.assert_close(compiled(x, v), _push(x, v))
    return "agrees with eager"
