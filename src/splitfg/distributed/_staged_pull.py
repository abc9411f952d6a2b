"""A trunk whose blocks lie on different processes, pulled without a backward pass through the pipeline."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from splitfg.distributed._ranks import Ranks
from splitfg.distributed._reduce import failed, squares_elsewhere
from splitfg.distributed._replicas import check_facts, check_replicas, common_facts
from splitfg.distributed._stage_batches import Constant, Constants, batch_parts
from splitfg.distributed._stage_forward import Stage, forward
from splitfg.distributed._stage_maps import collect_maps, draw_noise, map_change
from splitfg.distributed._stage_messages import StageMessages
from splitfg.distributed._stage_problems import cut_problems, even_cuts, setting_problems
from splitfg.distributed._stage_pulls import StagePulls
from splitfg.errors import SplitError, raise_if
from splitfg.estimators import Measure, ParallelPull, mean_rows
from splitfg.feedback import LearnedMaps, MeanJacobian
from splitfg.numerics import add_into, norm
from splitfg.sites import (
    BlockPath,
    pull_back,
    under,
)
from splitfg.splitting import Role, Split
from splitfg.splitting.checks import check_batch, check_h, check_loss
from splitfg.types import Estimate, HeadGradient, Inputs, Params, Stats, Target


class StagedPull:
    """A :class:`~splitfg.ParallelPull` whose blocks are divided between processes: stages of a pipeline.

    Every process calls it with the same rows. Micro-batches pass upwards through the stages; the last one computes the
    head and r = dL/dx_L, and broadcasts r. Then all stages pull their blocks at the same time: none waits for another
    one's reverse pass, as stages of a pipeline with backpropagation do. Further pulls, and layers that write to a
    residual stream, take one exchange of shares each, of the size of r. The estimate equals that of
    :class:`~splitfg.ParallelPull` in one process, up to rounding; with as many pulls as blocks, backpropagation.

    Every stage holds whole groups of a ``ParallelPull(group=k)``. Gradients pass from block to block inside a group and
    are predicted between groups. A stage pulls its blocks one after the other in any case, so groups cost no time.

    With ``ParallelPull(skips=True)`` all stages still pull at the same time. Refined gradients then pass along skips
    from the last stage to the first, in S - 1 messages one after the other. With ``UnchangedFeedback`` so does the
    prediction, before the first pull.

    With S stages of n blocks each, M micro-batches, a block's forward pass on one of them as the unit of time, and
    reverse passes of two units, the longest way through a step with one pull is

        (M + S - 1) n + 2 M n    here (3 M n with ``recompute``),
        (M + S - 1) 3 n          with the schedules of GPipe and 1F1B.

    With :class:`~splitfg.MeanJacobian`, noise moves up through the stages beside the micro-batches, the last stage
    broadcasts the response together with r, and every process changes the maps of its own groups, after one more sum of
    the size of r.

    ``grads`` of the estimate holds the parameters of this process's stage, :meth:`owned`, so that an optimizer steps
    these alone. Parameters that trunk and head share get their whole gradient in every process. The processes begin
    with equal parameters; those of other stages are stale until :meth:`collect` copies them. ``stats.norms`` are those
    of the whole gradient, and clipping counts the norms of all stages.

    Args:
        pull: The estimator, with ``UnchangedFeedback``, ``RandomMaps`` or ``MeanJacobian`` as its feedback.
        ranks: The processes; by default all, one stage each.
        micro_batches: Parts of the batch that pass through the stages one after the other.
        cuts: The number of the first block of every stage but the first, each the first of a group; by default all have
            as many groups, as far as possible.
        recompute: Compute the inside of a block again when it is pulled, with the puller of ``pull``: memory is that of
            the stream and one block. By default every stage keeps its activations, as pipelines do.

    Raises:
        SplitError: If the mesh has other processes than stages, a setting is out of range, or the feedback is another
            one. On the first call, if there are fewer groups than stages, cuts divide a group, or the path does not fit
            the trunk.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from torch import nn
        >>> import splitfg
        >>> from splitfg.distributed import StagedPull
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or connect()
        >>> network = splitfg.split(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)))
        >>> x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
        >>> staged = StagedPull(splitfg.ParallelPull(pulls=2), micro_batches=4)
        >>> estimate = staged(network, x, y, generator=torch.Generator())
        >>> estimate.stats.block_backward, sorted(staged.owned(network))[:2]
        (2, ['0.bias', '0.weight'])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        pull: ParallelPull,
        ranks: Ranks | None = None,
        *,
        micro_batches: int = 1,
        cuts: Sequence[int] | None = None,
        recompute: bool = False,
    ) -> None:
        self.pull, self.ranks = pull, Ranks() if ranks is None else ranks
        self.micro_batches, self.cuts = micro_batches, None if cuts is None else tuple(cuts)
        self.recompute = recompute
        raise_if(setting_problems(pull, self.ranks, micro_batches))
        self._messages = StageMessages(self.ranks)
        self._constants = Constants(pull.group)

    def __repr__(self) -> str:
        return f"StagedPull({self.pull!r}, micro_batches={self.micro_batches}, cuts={self.cuts})"

    @property
    def is_last(self) -> bool:
        """Whether this process holds the top of the trunk and the head."""
        return self.ranks.rank == self.ranks.size - 1

    def blocks(self, path: BlockPath, stage: int | None = None) -> range:
        """Return the numbers of a stage's blocks; by default of this process's."""
        stage, stages, group = self.ranks.rank if stage is None else stage, self.ranks.size, self.pull.group
        cuts = even_cuts(path, group, stages) if self.cuts is None else self.cuts
        raise_if(cut_problems(cuts, path, group, stages))
        bounds = (0, *cuts, len(path.blocks))
        return range(bounds[stage], bounds[stage + 1])

    def owned(self, split: Split, stage: int | None = None) -> tuple[str, ...]:
        """Return the names of the trained parameters of a stage; shared ones belong to the last."""
        path, stage = self.pull.blocks_of(split), self.ranks.rank if stage is None else stage
        names = [name for i in self.blocks(path, stage) for name in path.blocks[i].modules]
        names += path.writers if stage == 0 else ()
        last = stage == self.ranks.size - 1
        names += [path.top] if last and path.top is not None else []
        inside = {id(p) for name in names for p in split.trunk.get_submodule(name).parameters()}
        inside |= {id(split.trunk.get_parameter(name)) for name in path.added} if stage == 0 else set()
        head = split.head_params()
        return tuple(
            name
            for name, p in split.model.named_parameters()
            if name in split.trained_params() and (last if name in head else id(p) in inside)
        )

    @torch.no_grad()
    def collect(self, split: Split) -> None:
        """Copy every stage's parameters and maps to all processes, to evaluate or save the model."""
        params = dict(split.model.named_parameters())
        path, maps = self.pull.blocks_of(split), self.pull.feedback
        if isinstance(maps, MeanJacobian):
            stages = range(self.ranks.size)
            owners = {path.blocks[i].name: stage for stage in stages for i in self.blocks(path, stage)}
            collect_maps(self.ranks, self._messages, maps, owners)
        for stage in range(self.ranks.size):
            for name in self.owned(split, stage):
                params[name].copy_(self._messages.broadcast(params[name], stage))

    def __call__(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator | None = None) -> Estimate:
        """Estimate the gradient of this stage's parameters; see :class:`~splitfg.estimators.Estimator`."""
        self._check(split, x, y, generator)
        path = self.pull.blocks_of(split)
        own = self.blocks(path)
        constant = self._constants(split, path, own, x, noise=isinstance(self.pull.feedback, MeanJacobian))
        with torch.no_grad():
            parts, noise = (
                batch_parts(x, len(y), self.micro_batches),
                self._noise(split, path, constant, len(y), generator),
            )
            again = self.recompute
            stage = forward(split, path, own, constant.further, self._messages, parts, keep=not again, noise=noise)
            exact, top, r = self._head(split, stage, y, constant.h_shape)
            change = Params()
            if noise is not None:
                r, response = r
                change = self._change(path, constant, noise, response)
            pulls = StagePulls(stage, self.pull, self._messages, r, grads=top)
            pulls.run()
            trunk = split.named_trunk_grads(pulls.grads)
            return self._estimate(split, path, exact, trunk, change, pulls.reverse_passes)

    def mean_over_rows(self, split: Split, measure: Measure, x: Inputs, y: Target, count: int) -> Tensor:  # noqa: ARG002
        """Raise an error: no process holds the whole trunk, which a line search runs."""
        raise SplitError(["no process of a StagedPull holds the whole trunk: leave line_search out"])

    def learned_state(self) -> dict[str, LearnedMaps]:
        """Return the maps if they are learned; those of other stages are stale until :meth:`collect`."""
        return self.pull.learned_state()

    def update_state(self, split: Split, estimate: Estimate) -> None:
        """Change the maps of this stage's blocks, and count the step."""
        self.pull.update_state(split, estimate)

    def _noise(
        self, split: Split, path: BlockPath, constant: Constant, rows: int, generator: torch.Generator | None
    ) -> dict[int, Tensor] | None:
        """Return noise for the outputs of this stage's groups; ``None`` if the step measures nothing."""
        maps = self.pull.feedback
        if not isinstance(maps, MeanJacobian) or not maps.due or not constant.between:
            return None
        raise_if([] if generator is not None else ["learned maps draw noise: pass a generator"])
        assert generator is not None
        like = next(split.trunk.parameters())
        return draw_noise(path, constant.between, rows, self.blocks(path), like, generator)

    def _change(self, path: BlockPath, constant: Constant, noise: Mapping[int, Tensor], response: Tensor) -> Params:
        assert isinstance(self.pull.feedback, MeanJacobian)
        features = sum(mean_rows(path, response.new_empty(1, *shape)).shape[-1] for shape in constant.between.values())
        return map_change(self.ranks, path, self.pull.feedback, noise, response, features)

    def _check(self, split: Split, x: Inputs, y: Target, generator: torch.Generator | None) -> None:
        """Validate the batch; the first call compares the processes, and tells all of them of a bad batch in one."""
        if self._constants.known:
            check_batch(split, x, y, generator, tangents=False)
            return
        error: Exception | None = None
        try:
            check_batch(split, x, y, generator, tangents=False)
        except Exception as problem:
            error = problem
        if self.ranks.sum_(torch.tensor(float(error is not None), device=self.ranks.device)) > 0:
            raise failed(self.ranks, error)
        self._compare(split, generator)

    def _compare(self, split: Split, generator: torch.Generator | None) -> None:
        params: Params = dict(split.model.named_parameters())
        check_facts(self.ranks, {"estimator": repr(self)} | common_facts(params, generator))
        check_replicas(self.ranks, params)

    def _head(self, split: Split, stage: Stage, y: Target, h_shape: torch.Size) -> tuple[HeadGradient, Params, Tensor]:
        """Compute head and top in the last stage; returns the head, the top's gradients, and r in all stages.

        In a step with a measurement, r and the response at the top, stacked, are one message.
        """
        exact, error, device = HeadGradient(torch.zeros(()), torch.zeros(()), {}), None, stage.output.device
        r, top = None, Params()
        if self.is_last:
            try:
                exact, top, r = self._exact(split, stage, y, h_shape)
            except Exception as problem:
                error = problem
        facts = torch.stack([exact.loss.double(), exact.u.double().norm(), torch.tensor(float(error is not None))])
        facts = self._messages.broadcast(facts.to(device), self.ranks.size - 1)
        if facts[2] > 0:
            raise failed(self.ranks, error)
        if r is not None and stage.response is not None:
            r = torch.stack([r, stage.response])
        r = self._messages.broadcast_from_top(r, device)
        loss, u = facts[0].to(r.dtype), facts[1].to(r.dtype)
        return HeadGradient(loss, u, exact.grads), top, r

    def _exact(self, split: Split, stage: Stage, y: Target, h_shape: torch.Size) -> tuple[HeadGradient, Params, Tensor]:
        path, x = stage.path, stage.output
        module = None if path.top is None else split.trunk.get_submodule(path.top)
        h = (x if module is None else module(x)).reshape(len(x), *h_shape)
        check_h(split, h, y)
        exact = split.head(h, y)
        check_loss(exact.loss)
        if module is None:
            return exact, {}, exact.u.reshape(x.shape)
        assert path.top is not None
        r, own = pull_back(module, x, exact.u)
        return exact, under(path.top, own), r

    def _estimate(
        self, split: Split, path: BlockPath, exact: HeadGradient, trunk: Params, change: Params, reverse_passes: int
    ) -> Estimate:
        own = add_into(split.named_head_grads(exact.grads), trunk)
        shared = self._shared(split, own)
        grads = own | shared
        names = sorted(name for name in split.trained_params() if name not in shared)
        elsewhere = squares_elsewhere(self.ranks, grads, names, like=exact.u)
        passes = self.ranks.sum_(torch.tensor(float(reverse_passes), device=exact.u.device))
        parts = {"trunk": split.trunk_params(), "head": split.head_params()}
        norms = {"u": exact.u} | {part: _norm(grads, elsewhere, names).to(exact.u) for part, names in parts.items()}
        biased = self.pull.own_block or self.pull.pulls < path.groups(self.pull.group)
        jvps = self.pull.feedback.jvps
        stats = Stats(jvps=jvps, block_backward=round(float(passes)), biased=biased, norms=norms)
        return Estimate(exact.loss, grads, stats, change, elsewhere=elsewhere)

    def _shared(self, split: Split, grads: Params) -> Params:
        """Sum the gradients of parameters that trunk and head share over all processes, each of which has a copy."""
        names = sorted(name for name, role in split.roles.items() if role is Role.TIED)
        params = dict(split.model.named_parameters())
        return {n: self.ranks.sum_(grads.get(n, torch.zeros_like(params[n])).clone()) for n in names}


def _norm(grads: Params, elsewhere: Params, names: Collection[str]) -> Tensor:
    """Return the norm of the gradients of some parameters, in all processes together."""
    own = norm({n: g for n, g in grads.items() if n in names}).double().square()
    return sum((square for n, square in elsewhere.items() if n in names), start=own).sqrt()
