"""Forward-mode automatic differentiation."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor
from torch.func import jvp, vmap
from torch.utils import dlpack

from splitfg.errors import raise_if
from splitfg.numerics import outside_inference_mode
from splitfg.types import Params, TrunkFunction


@dataclass(frozen=True)
class ForwardMode:
    """Computes J·v exactly by forward-mode AD, and stores nothing for a backward pass.

    One pass computes h once and batches the tangents of a chunk over it. ``chunk=1`` is the paper's loop, whose memory
    grows neither with K nor with depth; ``chunk=None`` pushes all K tangents in one pass, which is fastest.

    Args:
        chunk: Tangents per pass; ``None`` for all.

    Raises:
        SplitError: If ``chunk`` is less than 1.

    Example:
        >>> import torch
        >>> import splitfg
        >>> f = lambda params: params["w"] ** 2
        >>> params, tangents = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.eye(2)}
        >>> h, dh = splitfg.ForwardMode()(f, params, tangents)
        >>> dh
        tensor([[2., 0.],
                [0., 4.]])
    """

    chunk: int | None = None

    def __post_init__(self) -> None:
        raise_if(chunk_problems(self.chunk))

    @property
    def biased(self) -> bool:
        """``False``: J·v is exact."""
        return False

    def __call__(self, f: TrunkFunction, params: Params, tangents: Params) -> tuple[Tensor, Tensor]:
        """Return ``h`` and ``dh[k] = J v_k`` of shape ``(c, *h.shape)``."""
        with outside_inference_mode():
            return forward_jvps(f, params, {name: _with_own_storage(v) for name, v in tangents.items()})


def forward_jvps(f: TrunkFunction, params: Params, tangents: Params) -> tuple[Tensor, Tensor]:
    """Return ``h`` and ``dh`` of a stack of tangents; a pure function of tensors, which can be traced."""

    def push(tangent: Params) -> tuple[Tensor, Tensor]:
        pushed: tuple[Tensor, Tensor] = jvp(f, (params,), (tangent,))  # type: ignore[assignment]
        return pushed

    if next(iter(tangents.values())).shape[0] == 1:
        h, dh = push({name: v.squeeze(0) for name, v in tangents.items()})
        return h, dh.unsqueeze(0)
    both: tuple[Tensor, Tensor] = vmap(push, out_dims=(None, 0), randomness="same")(tangents)  # type: ignore[arg-type]
    return both


def _with_own_storage(tangents: Tensor) -> Tensor:
    """Wrap the same memory in a storage of its own: forward mode copies tangents that view a larger storage."""
    if torch.compiler.is_compiling():
        return tangents
    try:
        wrapped: Tensor = dlpack.from_dlpack(dlpack.to_dlpack(tangents))  # type: ignore[attr-defined]
    except (RuntimeError, BufferError, TypeError):  # DLPack does not support this kind of tensor
        return tangents
    return wrapped


def chunk_problems(chunk: object) -> list[str]:
    """List the problems of a chunk size."""
    if chunk is None or (not isinstance(chunk, bool) and isinstance(chunk, Integral) and int(chunk) >= 1):
        return []
    return [f"chunk must be at least 1 (or None for all), got {chunk}"]
