"""The GPT trunk: token ids to hidden states, ending at the final LayerNorm.

The vocabulary projection is the head's. :meth:`GPT.tied_linear` makes it on the trunk's own token table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init

from splitfg.models._init import linear
from splitfg.sites import ResidualPath

INIT_STD = 0.02
"""GPT-2's standard deviation of initial weights."""

# Queries whose scores exist at once: fewer are slower, more take more memory.
_QUERIES = 256


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of a GPT.

    Attributes:
        layers: Transformer blocks L.
        width: Model width d.
        heads: Attention heads; divides ``width``.
        context: Longest sequence T, the rows of the position table.
        vocab: Rows of the token table.
        init: How linear layers begin. ``gpt2``: N(0, 0.02²), the residual writers (``proj``, ``out``) divided by √(2L),
            biases 0. ``torch``: U(±1/√fan_in), biases too, as :class:`torch.nn.Linear` begins by itself.
    """

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 128
    vocab: int = 50257
    init: Literal["gpt2", "torch"] = "gpt2"

    def __post_init__(self) -> None:
        """Refuse sizes no model can have."""
        sizes = {name: getattr(self, name) for name in ("layers", "width", "heads", "context", "vocab")}
        problems = [f"{name} must be at least 1, got {size}" for name, size in sizes.items() if size < 1]
        if not problems and self.width % self.heads:
            problems.append(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.init not in ("gpt2", "torch"):
            problems.append(f"init must be 'gpt2' or 'torch', got {self.init!r}")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layer, 4 d."""
        return 4 * self.width


PRESETS = {
    "small8": GPTConfig(),
    "small16": GPTConfig(layers=8, width=384, heads=6, context=256),
    "medium": GPTConfig(layers=12, width=512, heads=8, context=512),
    "gpt2": GPTConfig(layers=12, width=768, heads=12, context=1024),
}
"""``small8`` is the paper's model; the others continue the family up to the size of GPT-2."""


def _linear(config: GPTConfig, n: int, m: int, *, writer: bool = False, generator: torch.Generator) -> nn.Linear:
    """A linear layer as ``config.init`` says; a ``writer`` adds to the residual stream."""
    if config.init == "torch":
        return linear(n, m, generator=generator)
    layer: nn.Linear = skip_init(nn.Linear, n, m, device=generator.device)
    # 1/√(2L): the stream's variance does not grow with the number of residual writes
    std = INIT_STD / math.sqrt(2 * config.layers) if writer else INIT_STD
    nn.init.normal_(layer.weight, std=std, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


class CausalSelfAttention(nn.Module):
    """softmax(Q Kᵀ / √d_head + causal mask) V per head, between a fused qkv layer and a projection.

    Plain matrix products and softmax: fused attention kernels have no forward-mode rule. Scores exist for a block of
    queries at a time, so that memory grows with T and not with T².
    """

    def __init__(self, config: GPTConfig, *, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = _linear(config, config.width, 3 * config.width, generator=generator)
        self.proj = _linear(config, config.width, config.width, writer=True, generator=generator)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        """Map x ``(B, T, d)`` to ``(B, T, d)``; ``future`` ``(T, T)`` is true where a query may not look."""
        split = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(-3, -2) for part in split.unbind(-3))
        y: Tensor = self.proj(_attend(q, k, v, future).transpose(-3, -2).flatten(-2))
        return y


def _attend(q: Tensor, k: Tensor, v: Tensor, future: Tensor) -> Tensor:
    """Softmax attention of q, k, v ``(..., T, d_head)``, some queries at a time, each block over the keys before it."""
    blocks = []
    for start in range(0, q.shape[-2], _QUERIES):
        stop = min(start + _QUERIES, q.shape[-2])
        scores = (q[..., start:stop, :] @ k[..., :stop, :].mT) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(future[start:stop, :stop], -math.inf).softmax(dim=-1)
        blocks.append(weights @ v[..., :stop, :])
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-2)


class FeedForward(nn.Module):
    """out(GELU(fc(x))) with the exact (erf) GELU."""

    def __init__(self, config: GPTConfig, *, generator: torch.Generator) -> None:
        super().__init__()
        self.fc = _linear(config, config.width, config.hidden, generator=generator)
        self.out = _linear(config, config.hidden, config.width, writer=True, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Map x ``(B, T, d)`` to ``(B, T, d)``."""
        y: Tensor = self.out(F.gelu(self.fc(x)))
        return y


class Block(nn.Module):
    """Two pre-norm residual writes: x += attention(LN(x)), then x += mlp(LN(x))."""

    def __init__(self, config: GPTConfig, *, generator: torch.Generator) -> None:
        super().__init__()
        device = generator.device
        self.norm1 = nn.LayerNorm(config.width, device=device)
        self.attention = CausalSelfAttention(config, generator=generator)
        self.norm2 = nn.LayerNorm(config.width, device=device)
        self.mlp = FeedForward(config, generator=generator)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        """The residual stream after this block, ``(B, T, d)``."""
        x = x + self.attention(self.norm1(x), future)
        written: Tensor = x + self.mlp(self.norm2(x))
        return written


class GPT(nn.Module):
    """The trunk of a causal transformer: token ids ``(B, T)``, int64, to h ``(B, T, width)``.

    h = LN(Block_L(... Block_1(token[x] + position[:T]))). Both tables begin as N(0, 0.02²), norms as 1 and 0, linear
    layers as ``config.init`` says.

    Args:
        config: Sizes.
        generator: Source of the initial parameters.

    Attributes:
        token: The token table, an ``nn.Embedding`` whose weight a head may share.
        position: The learned position table ``(context, width)``.
    """

    def __init__(self, config: GPTConfig, *, generator: torch.Generator) -> None:
        super().__init__()
        self.config = config
        device = generator.device
        self.token = skip_init(nn.Embedding, config.vocab, config.width, device=device)
        self.position = nn.Parameter(torch.empty(config.context, config.width, device=device))
        for table in (self.token.weight, self.position):
            nn.init.normal_(table, std=INIT_STD, generator=generator)
        self.blocks = nn.ModuleList(Block(config, generator=generator) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """The hidden states h.

        Raises:
            ValueError: If x is not ``(B, T)`` int64 with T at most ``config.context``.
        """
        self._check(x)
        length = x.shape[-1]
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        stream = self.token(x) + self.position[:length]
        for block in self.blocks:
            stream = block(stream, future)
        h: Tensor = self.norm(stream)
        return h

    def tied_linear(self, *, bias: bool = True) -> nn.Linear:
        """A vocabulary projection whose weight *is* this trunk's token table; the bias is its own and zero.

        Logits = h W_tokenᵀ + b, h ``(..., width)`` to ``(..., vocab)``.
        """
        weight = self.token.weight
        layer = nn.Linear(self.config.width, self.config.vocab, bias=False, device="meta")
        layer.weight = weight
        if bias:
            layer.bias = nn.Parameter(torch.zeros(self.config.vocab, device=weight.device, dtype=weight.dtype))
        return layer

    def residual_path(self) -> ResidualPath:
        """The token table, every block's two writers, and the positions beside the tokens."""
        writers = [f"blocks.{i}.{name}" for i in range(self.config.layers) for name in ("attention.proj", "mlp.out")]
        return ResidualPath(("token", *writers), top="norm", added={"position": "token"})

    def _check(self, x: Tensor) -> None:
        """Refuse inputs that no lookup can read; ids beyond the table are the data pipeline's to refuse."""
        problems = []
        if x.dtype != torch.int64:
            problems.append(f"token ids must be int64, got {x.dtype}: convert with x.long()")
        if x.ndim != 2:
            problems.append(f"token ids must have shape (B, T), got {tuple(x.shape)}")
        elif not 1 <= x.shape[1] <= self.config.context:
            problems.append(
                f"sequence length {x.shape[1]} is outside 1..{self.config.context}, the rows of the position "
                "table: use shorter windows or a config with a larger context"
            )
        if problems:
            raise ValueError("; ".join(problems))
