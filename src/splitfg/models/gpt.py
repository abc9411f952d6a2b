"""The GPT trunk: maps token ids to hidden states, up to the final LayerNorm.

The vocabulary projection belongs to the head; :meth:`GPT.tied_linear` creates one tied to the token table.
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
from splitfg.sites import Activities, BlockPath, PathBlock, ResidualPath

INIT_STD = 0.02
"""GPT-2's standard deviation of initial weights."""

# Queries per block of attention scores: fewer take more time, more take more memory.
_QUERIES = 256


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of a GPT.

    Attributes:
        layers: Transformer blocks L.
        width: Model width d.
        heads: Attention heads; must divide ``width``.
        context: Longest sequence T, the rows of the position table.
        vocab: Rows of the token table.
        init: Initialisation of linear layers. ``gpt2``: N(0, 0.02²), with the residual writers (``proj``, ``out``)
            divided by √(2L), and biases 0. ``torch``: U(±1/√fan_in) for weights and biases, the default of
            :class:`torch.nn.Linear`.

    Raises:
        ValueError: If sizes are not positive or do not fit, or ``init`` is unknown.
    """

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 128
    vocab: int = 50257
    init: Literal["gpt2", "torch"] = "gpt2"

    def __post_init__(self) -> None:
        """Validate the sizes."""
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
    """Return a linear layer initialised by ``config.init``; a ``writer`` adds to the residual stream."""
    if config.init == "torch":
        return linear(n, m, generator=generator)
    layer: nn.Linear = skip_init(nn.Linear, n, m, device=generator.device)
    # 1/√(2L) keeps the variance of the residual stream independent of depth
    std = INIT_STD / math.sqrt(2 * config.layers) if writer else INIT_STD
    nn.init.normal_(layer.weight, std=std, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


class CausalSelfAttention(nn.Module):
    """softmax(Q Kᵀ / √d_head + causal mask) V per head, between a fused qkv layer and a projection.

    Uses matrix products and softmax, since fused attention kernels have no forward-mode rule. Computes scores for one
    block of queries at a time, so that memory grows with T and not with T².
    """

    def __init__(self, config: GPTConfig, *, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = _linear(config, config.width, 3 * config.width, generator=generator)
        self.proj = _linear(config, config.width, config.width, writer=True, generator=generator)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        """Map x ``(B, T, d)`` to ``(B, T, d)``; ``future`` ``(T, T)`` is true at keys after the query."""
        q, k, v = self._heads(x)
        y: Tensor = self.proj(_attend(q, k, v, future).transpose(-3, -2).flatten(-2))
        return y

    def attention_weights(self, x: Tensor, future: Tensor) -> Tensor:
        """Return the weights ``(B, heads, T, T)``; see :class:`~splitfg.sites.AttentionLayer`."""
        q, k, _ = self._heads(x)
        return _weights(q, k, future)

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k and v, each ``(B, heads, T, d_head)``."""
        split = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        return tuple(part.transpose(-3, -2) for part in split.unbind(-3))


def _weights(q: Tensor, k: Tensor, future: Tensor) -> Tensor:
    scores = (q @ k.mT) / math.sqrt(q.shape[-1])
    return scores.masked_fill(future, -math.inf).softmax(dim=-1)


def _attend(q: Tensor, k: Tensor, v: Tensor, future: Tensor) -> Tensor:
    """Compute causal attention of q, k, v ``(..., T, d_head)`` by blocks of queries, each over the keys up to it."""
    blocks = []
    for start in range(0, q.shape[-2], _QUERIES):
        stop = min(start + _QUERIES, q.shape[-2])
        weights = _weights(q[..., start:stop, :], k[..., :stop, :], future[start:stop, :stop])
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
        """Return the residual stream after this block, ``(B, T, d)``."""
        x = x + self.attention(self.norm1(x), future)
        written: Tensor = x + self.mlp(self.norm2(x))
        return written


class GPT(nn.Module):
    """The trunk of a causal transformer: maps token ids ``(B, T)``, int64, to h ``(B, T, width)``.

    h = LN(Block_L(... Block_1(token[x] + position[:T]))). Both tables are initialised from N(0, 0.02²), norms with 1
    and 0, and linear layers by ``config.init``.

    Args:
        config: Sizes.
        generator: Source of the initial parameters.

    Attributes:
        token: The token table, an ``nn.Embedding`` whose weight a head may share.
        position: The learned position table ``(context, width)``.

    Example:
        >>> import torch
        >>> import splitfg
        >>> from splitfg.models import GPT, GPTConfig
        >>> config = GPTConfig(layers=1, width=8, heads=2, context=16, vocab=50)
        >>> trunk = GPT(config, generator=torch.Generator().manual_seed(0))
        >>> trunk(torch.randint(0, 50, (2, 16))).shape
        torch.Size([2, 16, 8])
        >>> network = splitfg.Split(trunk, splitfg.LinearHead(trunk.tied_linear()), tied="exclude")
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
        """Return the hidden states h.

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
        """Return a vocabulary projection that shares the token table as its weight; its bias is zero.

        Logits = h W_tokenᵀ + b, from h ``(..., width)`` to ``(..., vocab)``.
        """
        weight = self.token.weight
        layer = nn.Linear(self.config.width, self.config.vocab, bias=False, device="meta")
        layer.weight = weight
        if bias:
            layer.bias = nn.Parameter(torch.zeros(self.config.vocab, device=weight.device, dtype=weight.dtype))
        return layer

    def residual_path(self) -> ResidualPath:
        """Return the residual stream: the token table with the positions, then two writers per block."""
        writers = [f"blocks.{i}.{name}" for i in range(self.config.layers) for name in ("attention.proj", "mlp.out")]
        return ResidualPath(("token", *writers), top="norm", added={"position": "token"})

    def activities(self) -> Activities:
        """Return the sites of activity tangents: every layer of the blocks.

        Tangents train neither tokens nor positions; a head that shares the token table trains it (``Tied.EXCLUDE``).
        Attention mixes the tokens of a sequence, so a score belongs to a whole sequence.
        """
        names = ("norm1", "attention.qkv", "attention.proj", "norm2", "mlp.fc", "mlp.out")
        layers = (f"blocks.{i}.{name}" for i in range(self.config.layers) for name in names)
        return Activities(tuple(layers), top="norm")

    def block_path(self) -> BlockPath:
        """Return attention and feed-forward layer of every block, each with its norm, on the residual stream."""
        blocks = [
            PathBlock((f"blocks.{i}.{norm}", f"blocks.{i}.{name}"), writer=f"blocks.{i}.{name}.{writer}")
            for i in range(self.config.layers)
            for norm, name, writer in (("norm1", "attention", "proj"), ("norm2", "mlp", "out"))
        ]
        added = {"position": "token"}
        return BlockPath(tuple(blocks), residual=True, top="norm", writers=("token",), added=added)

    def _check(self, x: Tensor) -> None:
        """Validate dtype and shape; not the values of the ids, which would synchronise with the GPU."""
        problems = []
        if x.dtype != torch.int64:
            problems.append(f"token ids must be int64, got {x.dtype}: convert with x.long()")
        if x.ndim != 2:
            problems.append(f"token ids must have shape (B, T), got {tuple(x.shape)}: add a batch dimension or reshape")
        elif not 1 <= x.shape[1] <= self.config.context:
            problems.append(
                f"sequence length {x.shape[1]} is outside 1..{self.config.context}, the rows of the position "
                "table: use shorter windows or a config with a larger context"
            )
        if problems:
            raise ValueError("; ".join(problems))
