"""One estimate from the rows and tangents of several processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from splitfg.compiled import Compile
from splitfg.distributed._ranks import Ranks
from splitfg.distributed._reduce import (
    averaged,
    failed,
    reduced_grads,
    reduced_message,
    squares_elsewhere,
    summed,
    with_targets,
)
from splitfg.distributed._replicas import check_facts, check_replicas, common_facts, generator_fact
from splitfg.distributed._row_shares import RowShares
from splitfg.distributed._sharded_head import ShardedHead
from splitfg.distributed._sharded_parts import head_problems, meet_before_head
from splitfg.errors import SplitError, raise_if
from splitfg.estimators import (
    Estimator,
    LearningEstimator,
    Measure,
    Partial,
    PartialEstimator,
    Share,
    Stateful,
    compiled,
)
from splitfg.splitting import Split
from splitfg.splitting.checks import check_batch, skip_checks
from splitfg.tangents import RowGenerator
from splitfg.types import Estimate, Inputs, Params, Target


class DistributedEstimator:
    """The estimate of a batch whose rows, tangents or both are divided between processes.

    Every process calls it with its own rows and a generator in the same state, and gets the same estimate: that of one
    process on all rows, up to rounding, whatever the estimator. With N_r targets in process r,

        d_k = Σ_r N_r d_k^r / Σ_r N_r.

    The trunk's gradient of :class:`~splitfg.SplitFG` takes K scores and four more numbers a step, whatever the trunk's
    size: every process draws the same tangents, and combines them with the same scores. The head's exact gradient is
    averaged, as gradients of estimators without scores are. Processes along the mesh dimension ``tangents`` push
    different tangents through the trunk, for the same rows.

    The first call compares model, settings, versions and generators between the processes; it and every
    ``check_every``-th call compare all parameters by a hash. A bad batch or a non-finite value in one process raises
    an error in all of them.

    Args:
        estimator: Any estimator. One that is no :class:`~splitfg.estimators.PartialEstimator` must return a mean over
            rows.
        ranks: The processes, or a device mesh of them; by default all processes hold different rows.
        check_every: Calls between two comparisons of all parameters; ``None`` compares once.
        whole_batches: Take batches with the rows of all processes, and use this process's part.
        reduce_head: Average the gradients of the head. If ``False``, the head learns from this process's rows alone;
            see :class:`~splitfg.distributed.LocalHeads`.

    Raises:
        SplitError: If processes divide the tangents of an estimator without any, or there are fewer than processes.

    Example:
        >>> import torch, torch.distributed as dist
        >>> import splitfg
        >>> from splitfg.distributed import DistributedEstimator, Ranks
        >>> from splitfg.testing import example_split
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or connect()
        >>> split, x, y = example_split()
        >>> ranks = Ranks()
        >>> estimator = DistributedEstimator(splitfg.SplitFG(K=4), ranks)
        >>> estimate = estimator(split, *ranks.own_rows(x, y), generator=torch.Generator().manual_seed(0))
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        estimator: Estimator,
        ranks: Ranks | DeviceMesh | None = None,
        *,
        check_every: int | None = 100,
        whole_batches: bool = False,
        reduce_head: bool = True,
    ) -> None:
        self.estimator, self.ranks = estimator, ranks if isinstance(ranks, Ranks) else Ranks(ranks)
        self.check_every, self.whole_batches, self.reduce_head = check_every, whole_batches, reduce_head
        self._calls = 0
        self._shares = RowShares(self.ranks, self._check)
        raise_if(_problems(estimator, self.ranks, check_every))

    def __repr__(self) -> str:
        return f"DistributedEstimator({self.estimator!r}, {self.ranks!r})"

    def __call__(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator) -> Estimate:
        """Estimate the gradient over the rows of all processes; see :class:`~splitfg.estimators.Estimator`."""
        if not skip_checks():
            self._compare(split, generator)
        if self.whole_batches and isinstance(y, Tensor):
            x, y = self.ranks.own_rows(x, y)
        return self._reduced(split, x, y, generator)

    def mean_over_rows(self, split: Split, measure: Measure, x: Inputs, y: Target, count: int) -> Tensor:
        """Average a measurement over the rows of all processes; see :class:`~splitfg.estimators.SharingEstimator`."""
        if self.whole_batches and isinstance(y, Tensor):
            x, y = self.ranks.own_rows(x, y)
        values, error = torch.zeros(count), None
        try:
            self._check(split, x, y)
            values = measure(x, with_targets(split, y))
        except Exception as problem:
            if skip_checks():
                raise
            error = problem
        return averaged(self.ranks, split, x, y, values, error)

    def learned_state(self) -> Mapping[str, Stateful]:
        """Return the learned state of the estimator, which is the same in all processes."""
        return self.estimator.learned_state() if isinstance(self.estimator, LearningEstimator) else {}

    def update_state(self, split: Split, estimate: Estimate) -> None:
        """Update the learned state of the estimator."""
        if isinstance(self.estimator, LearningEstimator):
            self.estimator.update_state(split, estimate)

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture the messages: those of NCCL."""
        return self.ranks.device.type == "cuda"

    def before_replay(self, split: Split, generator: torch.Generator) -> None:
        """Count a replayed call, and compare all parameters if that is due."""
        self._compare(split, generator)

    def compiled(self, split: Split, compile_: Compile) -> tuple[Split, DistributedEstimator]:
        """Compile the estimator; messages stay outside compiled code, and a CUDA graph captures those of NCCL."""
        twin, fast = compiled(split, self.estimator, compile_)
        options = {"whole_batches": self.whole_batches, "reduce_head": self.reduce_head}
        return twin, DistributedEstimator(fast, self.ranks, check_every=self.check_every, **options)

    def _compare(self, split: Split, generator: torch.Generator) -> None:
        local = set(self._own_heads(split))
        params: Params = {name: p for name, p in split.model.named_parameters() if name not in local}
        if self._calls == 0:
            params = {**params, **dict(split.model.named_buffers())}
            check_facts(self.ranks, self._facts() | common_facts(params, generator))
            raise_if(head_problems(split, self.estimator))
            check_replicas(self.ranks, params)
        elif self.check_every is not None and self._calls % self.check_every == 0:
            if isinstance(self.estimator, PartialEstimator):  # others may draw for their own rows
                check_facts(self.ranks, {"generator": generator_fact(generator)}, _DRAWS)
            check_replicas(self.ranks, params)
        self._calls += 1

    def _facts(self) -> dict[str, str]:
        grid = f"{self.ranks.row_parts} x {self.ranks.tangent_parts}"
        options = {name: str(getattr(self, name)) for name in ("check_every", "whole_batches", "reduce_head")}
        return {"estimator": repr(self.estimator), "the grid of rows and tangents": grid, **options}

    def _own_heads(self, split: Split) -> Collection[str]:
        """Return the names of parameters that every process trains for itself."""
        if self.reduce_head and not isinstance(split.head, ShardedHead):
            return ()
        inside = {id(p) for p in split.head.parameters()} - {id(p) for p in split.trunk.parameters()}
        return [name for name, p in split.model.named_parameters() if id(p) in inside]

    def _reduced(self, split: Split, x: Inputs, y: Target, generator: torch.Generator) -> Estimate:
        counted = with_targets(split, y)
        if isinstance(split.head, ShardedHead) and not skip_checks():
            meet_before_head(self.ranks, split.head, self.estimator, y, lambda: self._check(split, x, y))
        share, own = self._shares(self.estimator, split, x, counted, generator)
        part, error = self._part(split, x, counted, own, share)
        if isinstance(own, RowGenerator):
            own.give_back()
        K = self.estimator.needs.scores if isinstance(self.estimator, PartialEstimator) else 0
        weight, total = reduced_message(self.ranks, split, x, y, part, share, scores=K)
        if total is None or part is None:
            raise failed(self.ranks, error)
        grads = reduced_grads(self.ranks, part.grads, weight, self._own_heads(split))
        sums, stats = summed(self.ranks, part.sums), replace(part.stats, **total.stats)
        products = summed(self.ranks, {n: p * weight.square().to(p.dtype) for n, p in part.products.items()})
        whole = replace(part, loss=total.loss, grads=grads, stats=stats, sums=sums, products=products)
        estimate = whole.completed(split)
        return replace(
            estimate, forward_state=split.forward_state([x]), elsewhere=self._elsewhere(split, estimate.grads)
        )

    def _elsewhere(self, split: Split, grads: Params) -> Params:
        """Return the squared norms of the parts of a divided head that other processes hold."""
        if not isinstance(split.head, ShardedHead):
            return {}
        names = sorted(name for name in split.head_params() if name in grads)
        return squares_elsewhere(self.ranks, grads, names, like=next(iter(grads.values())))

    def _part(
        self, split: Split, x: Inputs, y: Target, generator: torch.Generator, share: Share
    ) -> tuple[Partial | None, Exception | None]:
        """Compute this process's part, or return the error to tell the others."""
        try:
            self._check(split, x, y)
            if isinstance(self.estimator, PartialEstimator):
                return self.estimator.part(split, x, y, generator=generator, share=share), None
            estimate = self.estimator(split, x, y, generator=generator)
            raise_if(_state_problems(self.estimator, estimate))
            return Partial(estimate.loss, estimate.grads, estimate.stats), None
        except Exception as error:
            if skip_checks():
                raise
            if isinstance(split.head, ShardedHead):
                split.head.give_up(error)
            return None, error

    def _check(self, split: Split, x: Inputs, y: Target) -> None:
        """Validate this process's rows; dropout and batch statistics, which differ by process, raise an error."""
        if self.whole_batches and isinstance(y, Tensor) and y.ndim and not len(y):
            parts = self.ranks.row_parts
            raise SplitError(
                [f"the batch has fewer rows than the {parts} processes that divide it: use larger batches"]
            )
        check_batch(split, x, y, tangents=False)


def _state_problems(estimator: Estimator, estimate: Estimate) -> list[str]:
    """List the problem of learned state that every process would change by its own rows."""
    if not estimate.state_update:
        return []
    name = type(estimator).__name__
    return [f"{name} learns from the rows of one process, so that its state would differ: make it a PartialEstimator"]


_DRAWS = "draw from it in all processes or in none"


def _problems(estimator: object, ranks: Ranks, check_every: int | None) -> list[str]:
    found = []
    if not callable(estimator) or isinstance(estimator, type | Split):
        found.append(f"estimator must be an Estimator, got {estimator!r}: pass an object such as SplitFG(K=8)")
    if check_every is not None and check_every < 1:
        found.append(f"check_every must be at least 1 (or None), got {check_every}")
    if ranks.tangent_parts > 1:
        name = type(estimator).__name__
        if not isinstance(estimator, PartialEstimator) or not estimator.needs.scores:
            found.append(f"{name} has no tangents to divide: use a mesh with the dimension 'rows' alone")
        elif estimator.needs.scores < ranks.tangent_parts:
            found.append(
                f"K is {estimator.needs.scores} and {ranks.tangent_parts} processes divide the tangents: raise K, or"
                " use fewer processes along 'tangents'"
            )
    return found
