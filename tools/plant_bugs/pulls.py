"""Bugs in pulls: gradients predicted, then pulled back through single blocks."""

from tools.plant_bugs.bug import Bug

PULLS = "tests/oracle/test_pulls.py"
GROUPS = "tests/oracle/test_pull_groups.py"
SKIPS = "tests/oracle/test_skips.py"
INSIDES = "tests/contract/test_block_insides.py"

BUGS = (
    Bug(
        "a pull that stops one block early",
        "estimators/_pull_pass.py",
        "deltas = at.pulled[:last]",
        "deltas = at.pulled[: max(1, last - 1)]",
        (f"{PULLS}::TestAsManyPullsAsBlocks::test_are_backprop",),
    ),
    Bug(
        "writers learn from the prediction",
        "estimators/_pull_pass.py",
        "delta = at.pulled[0] if self._plan.own_block else at.refined[-1]",
        "delta = at.pulled[0]",
        (f"{PULLS}::test_one_pull_is_the_formula",),
    ),
    Bug(
        "own block learns from the sum",
        "estimators/_pull_pass.py",
        "delta = at.pulled[0] if self._plan.own_block else at.refined[-1]",
        "delta = self._r if self._plan.own_block else at.refined[-1]",
        (f"{PULLS}::test_own_block_takes_the_prediction_for_the_writers_too",),
    ),
    Bug(
        "pulls not added to the stream",
        "estimators/_pull_pass.py",
        "return [above + c for above, c in zip(at.refined, shares, strict=False)]",
        "return list(shares)",
        (f"{PULLS}::test_one_pull_is_the_formula",),
    ),
    Bug(
        "skips carry the whole refinement",
        "estimators/_pull_pass.py",
        "moved = [after - before for before, after, _ in",
        "moved = [after for before, after, _ in",
        (f"{SKIPS}::test_n_pulls_sum_all_paths_through_fewer_than_n_branches",),
    ),
    Bug(
        "a group that begins with every block",
        "estimators/_pull_pass.py",
        "if i % self._plan.group:",
        "if False:",
        (f"{GROUPS}::test_a_group_of_a_chain_is_one_block",),
    ),
    Bug(
        "a group that pulls the stream without its skip",
        "estimators/_pull_pass.py",
        "zip(at.pulled, shares, strict=False)] if residual else shares",
        "zip(at.pulled, shares, strict=False)] if not residual else shares",
        (f"{GROUPS}::test_a_group_of_a_residual_stream_is_autograd_from_its_prediction",),
    ),
    Bug(
        "maps between all blocks of a group",
        "sites/_block_path.py",
        "for i in range(size, len(self.blocks), size))",
        "for i in range(1, len(self.blocks)))",
        (f"{GROUPS}::test_maps_learn_between_groups_alone",),
    ),
    Bug(
        "a skip without its mask",
        "models/resnet.py",
        "        delta = delta * (y > 0)\n        return self.shortcut",
        "        return self.shortcut",
        (f"{SKIPS}::test_a_block_passes_the_gradient_along_its_skip",),
    ),
    Bug(
        "attention weights not transposed",
        "feedback/_attention.py",
        '"bcts,btd->bscd"',
        '"bcst,btd->bscd"',
        ("tests/oracle/test_attention_maps.py::test_predictions_are_the_formula",),
    ),
    Bug(
        "a point sees the attention below it",
        "sites/_attention.py",
        "for k, weights in found if k > i",
        "for k, weights in found if k >= 0",
        ("tests/oracle/test_attention_maps.py::test_every_point_sees_the_heads_above_it",),
    ),
    Bug(
        "pooled prediction without its pixels",
        "estimators/_pull_pass.py",
        "return (found / x[0, 0].numel())",
        "return (found / 1)",
        (f"{PULLS}::test_pooled_maps_learn_the_gradient_summed_over_pixels",),
    ),
    Bug(
        "a writer's gradient not summed over the rows it was broadcast to",
        "estimators/_pull_pass.py",
        "delta.sum_to_size(size)",
        "delta[0].expand(size)",
        ("tests/oracle/test_broadcast_writers.py",),
    ),
    Bug(
        "lookups of a tied table that are added twice",
        "sites/_lookups.py",
        "torch.ops.aten.embedding_dense_backward(rows, first, count, -1, module.scale_grad_by_freq)",
        "rows.index_select(0, first)",
        ("tests/oracle/test_lookups.py",),
    ),
    Bug(
        "a found path without its norm",
        "sites/_find_blocks.py",
        "name = None if top is None else top.name",
        "name = None",
        ("tests/oracle/test_find_blocks.py",),
    ),
    Bug(
        "reverse passes inside blocks not counted",
        "estimators/_pull_pass.py",
        "self.reverse_passes += len(deltas) if to_input else 1",
        "self.reverse_passes += 0",
        ("tests/contract/test_parallel_pull.py::test_keeps_to_the_protocol",),
    ),
    Bug(
        "a block's graph kept until the end",
        "sites/_pulls.py",
        "found = _grads(y, wanted, deltas[-1], last=True)",
        "found = _grads(y, wanted, deltas[-1]); trunk.__dict__.setdefault('kept', []).append(y)",
        ("tests/contract/test_parallel_pull.py::test_no_more_is_saved_for_backward_than_one_block_needs",),
    ),
    Bug(
        "compiled blocks share their constants",
        "compiled/_pulls.py",
        "named = dict(zip(every, params, strict=True))",
        "named = {n: trunk.get_parameter(n).detach() for n in every}",
        ("tests/contract/test_parallel_pull.py::test_equal_blocks_share_compiled_code_and_none_of_their_values",),
    ),
    Bug(
        "writers that are not compared with autograd",
        "sites/_validate_inside.py",
        "if all(close(closed[name], expected[id(p)])",
        "if all(close(closed[name], closed[name])",
        (f"{INSIDES}::test_a_writer_that_does_not_just_write_the_output_raises",),
    ),
    Bug(
        "values that pass beside the stream",
        "sites/_validate_inside.py",
        "reached = _parameters_above(y, x) - own",
        "reached = set[int]()",
        (f"{INSIDES}::test_a_value_that_passes_beside_the_stream_raises",),
    ),
    Bug(
        "writers that read one another",
        "sites/_validate_blocks.py",
        "if any(a.requires_grad for a in seen.reads[name])",
        "if any(a is None for a in seen.reads[name])",
        (f"{INSIDES}::test_writers_that_read_one_another_raise",),
    ),
    Bug(
        "JVPs counted where no tangent is pushed",
        "estimators/parallel_pull.py",
        "jvps = self.feedback.jvps if self._moved(path) else 0",
        "jvps = self.feedback.jvps",
        (f"{INSIDES}::test_one_group_pushes_no_tangent_and_says_so",),
    ),
)
