"""A linear head whose outputs are divided between processes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from splitfg.distributed._ranks import Ranks
from splitfg.errors import SplitError
from splitfg.heads import CrossEntropy, Head
from splitfg.numerics import wide
from splitfg.splitting.checks import skip_checks
from splitfg.types import HeadGradient, Params

CLOSED_FORM = "use an estimator that takes its closed form, such as SplitFG, and no line search; or a LinearHead"
"""The cure where a divided head would be differentiated or perturbed."""

_GIVEN_UP = -1
"""In the place of the number of rows of a process that has none, because of an error."""


class GivenUpError(SplitError):
    """Another process of a divided head cannot go on."""


class ShardedHead(Head):
    """A linear layer with cross-entropy whose classes are divided between processes, as are the rows of its weight.

    Every process holds the rows of W for its classes, and h and targets of its own rows of the batch. It gets h of all
    processes, computes the outputs of its classes for all rows, and the processes exchange the maximum and the sum of
    exponentials of every row. With δ_s the derivative by the outputs of shard s,

        dL/dW_s = δ_sᵀ h,    u = Σ_s δ_s W_s.

    A step sends 2 B d numbers and a few for every row, instead of the C d numbers of the head's gradient: less if the
    batch has fewer than C / 2 rows. Loss, u and gradients are those of the whole batch, so the gradient of a shard is
    exact and needs no further exchange; clipping counts the norms of all shards. The table of a tied model cannot be
    divided, since the trunk reads all of it. Its outputs have no derivative, so estimators that differentiate or
    perturb the head, such as :class:`~splitfg.ForwardGradient`, raise an error.

    Args:
        ranks: The processes, all with different rows.
        layer: The whole layer, equal in all processes; only this process's rows are kept.
        ignore_index: Target value of rows to ignore.

    Raises:
        SplitError: If processes divide tangents, or there are fewer classes than processes.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from torch import nn
        >>> from splitfg.distributed import Ranks, ShardedHead
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> head = ShardedHead(Ranks(), nn.Linear(8, 3))
        >>> head(torch.randn(16, 8), torch.randint(0, 3, (16,))).u.shape
        torch.Size([16, 8])
        >>> dist.destroy_process_group()
    """

    def __init__(self, ranks: Ranks, layer: nn.Linear, *, ignore_index: int = -100) -> None:
        loss = CrossEntropy(ignore_index=ignore_index)
        loss.targets_elsewhere = True
        super().__init__(loss)
        classes, parts = layer.out_features, ranks.row_parts
        if ranks.tangent_parts > 1 or classes < parts:
            raise SplitError([f"{classes} classes cannot be divided between {ranks}: use more classes, and rows alone"])
        self._ranks, self.classes, self._width, self._ignored = ranks, classes, layer.in_features, ignore_index
        self._counts: dict[int, list[int]] = {}
        self._left = 0
        self.start, self.stop = classes * ranks.row_part // parts, classes * (ranks.row_part + 1) // parts
        self.weight = nn.Parameter(layer.weight.detach()[self.start : self.stop].clone())
        bias = None if layer.bias is None else layer.bias.detach()[self.start : self.stop].clone()
        self.bias = None if bias is None else nn.Parameter(bias)

    @property
    def in_features(self) -> int:
        """Width of h."""
        return self._width

    @property
    def out_features(self) -> int:
        """Number of classes of all processes together."""
        return self.classes

    @property
    def reverse_mode(self) -> bool:
        """``False``: the gradient has a closed form."""
        return False

    def outputs(self, params: Params, h: Tensor) -> Tensor:
        """Compute the outputs of all classes for this process's rows; a collective operation.

        Raises:
            SplitError: If a derivative of the outputs is needed, which messages would lose.
        """
        if _differentiated(h, *params.values()):
            raise SplitError([f"the outputs of a ShardedHead cannot be differentiated: {CLOSED_FORM}"])
        rows = self._row_counts(h)
        everything = self._ranks.gather_rows(h.reshape(-1, self._width).contiguous(), rows)
        own = nn.functional.linear(everything, params["weight"], params.get("bias"))
        columns = [self.classes * (i + 1) // len(rows) - self.classes * i // len(rows) for i in range(len(rows))]
        shards = self._ranks.gather_rows(own.T.contiguous(), columns)
        first = sum(rows[: self._ranks.row_part])
        return shards.T[first : first + rows[self._ranks.row_part]].reshape(*h.shape[:-1], self.classes)

    def _exact(self, h: Tensor, target: Tensor, normaliser: Tensor) -> HeadGradient:
        ranks, rows = self._ranks, self._row_counts(h)
        flat = h.reshape(-1, self._width).contiguous()
        everything = ranks.gather_rows(flat, rows)
        targets = ranks.gather_rows(target.reshape(-1), rows)
        counted = targets.ne(self._ignored)
        logits = nn.functional.linear(everything, self.weight.detach(), _detached(self.bias)).to(wide(h.dtype))
        top = ranks.gather(logits.amax(1)).amax(0)
        logits -= top[:, None]
        inside = (targets >= self.start) & (targets < self.stop) & counted
        column = (targets - self.start).clamp(0, self.stop - self.start - 1)[:, None]
        picked = logits.gather(1, column)[:, 0].where(inside, 0.0)
        sums = torch.stack([logits.exp().sum(1), picked])
        total, label = ranks.sum_(sums)
        scale = counted.to(total) / self._all_targets(normaliser.to(total))
        delta = logits.exp_().mul_((scale / total)[:, None])
        delta.scatter_add_(1, column, -(scale * inside)[:, None])
        loss = ((total.log() - label) * scale).sum()
        delta = delta.to(h.dtype)
        u = ranks.sum_(delta @ self.weight.detach())
        first = sum(rows[: ranks.row_part])
        grads = {"weight": delta.T @ everything} | ({} if self.bias is None else {"bias": delta.sum(0)})
        return HeadGradient(loss, u[first : first + len(flat)].reshape(h.shape), grads)

    def expect(self, exchanges: int) -> None:
        """Expect at least so many exchanges in the estimate that begins now."""
        self._left = exchanges

    def give_up(self, error: Exception) -> None:
        """Let the other processes raise an error in the next exchange, if they wait for this one there."""
        if self._left > 0 and not isinstance(error, GivenUpError):
            self._exchanged(_GIVEN_UP)

    def _all_targets(self, own: Tensor) -> Tensor:
        """Return the number of targets of all processes."""
        count = self._ranks.sum_(own.clone())
        if not skip_checks() and bool(count == 0):
            raise SplitError(["no process has a target that counts, so the loss is 0/0: skip such batches"])
        return count

    def _row_counts(self, h: Tensor) -> list[int]:
        own = h[..., 0].numel()
        if not skip_checks():  # a captured step has the rows of the steps before it
            found = self._exchanged(own)
            if _GIVEN_UP in found:
                raise GivenUpError(["another process has failed before its head"])
            self._counts[own] = found
        return self._counts[own]

    def _exchanged(self, own: int) -> list[int]:
        self._left -= 1
        counts = self._ranks.gather(torch.tensor([own], device=self._ranks.device))
        return [int(n) for n in counts.flatten()]


def _differentiated(*values: Tensor) -> bool:
    """Whether a tensor carries a tangent, or the graph of a backward pass."""
    backward = torch.is_grad_enabled() and any(v.requires_grad for v in values)
    return backward or any(forward_ad.unpack_dual(v).tangent is not None for v in values)


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()
