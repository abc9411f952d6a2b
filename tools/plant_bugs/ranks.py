"""Bugs of estimates on several processes, and of logs of scores."""

from tools.plant_bugs.bug import Bug

ESTIMATES = "tests/contract/test_distributed.py"
TROUBLE = "tests/contract/test_distributed_trouble.py"
LOG = "tests/contract/test_score_log.py"
STAGES = "tests/contract/test_stage_groups.py"
STAGE_SKIPS = "tests/contract/test_stage_skips.py"
ROWS = f"{ESTIMATES}::test_rows_of_all_processes_give_the_estimate_of_one"

BUGS = (
    Bug(
        "ranks: every process weighs the same",
        "distributed/_reduce.py",
        "return own / count, Total",
        "return torch.ones_like(own) / ranks.size, Total",
        (f"{ROWS}[backprop]",),
    ),
    Bug(
        "ranks: scores of divided tangents count once per process",
        "distributed/_reduce.py",
        "message = torch.cat([facts * float(share.first),",
        "message = torch.cat([facts,",
        (f"{ESTIMATES}::test_divided_tangents_give_the_estimate_of_one",),
    ),
    Bug(
        "ranks: products of gradients weighed like gradients",
        "distributed/_estimator.py",
        "p * weight.square().to(p.dtype)",
        "p * weight.to(p.dtype)",
        (f"{ROWS}[anchored_feedback]",),
    ),
    Bug(
        "ranks: a line search that takes every process for as large",
        "distributed/_reduce.py",
        "own.to(values) * values]))",
        "values]))",
        (f"{TROUBLE}::test_a_line_search_measures_the_rows_of_all_processes",),
    ),
    Bug(
        "ranks: a hash without places",
        "distributed/_replicas.py",
        "((part ^ (part >> 15) ^ place) * odd).sum()",
        "(part >> 15).sum()",
        (f"{TROUBLE}::test_replicas_with_swapped_numbers_are_found",),
    ),
    Bug(
        "ranks: noise of the first rows in every process",
        "tangents/_rows.py",
        "return whole[generator.first : generator.first + generator.rows]",
        "return whole[: generator.rows]",
        (f"{ROWS}[activity_fg]",),
    ),
    Bug(
        "stages: a group that pulls the stream without its skip",
        "distributed/_stage_pulls.py",
        "return above + share if self.stage.path.residual else share",
        "return share",
        (f"{STAGES}::test_groups_in_stages_give_the_estimate_of_one_process",),
    ),
    Bug(
        "stages: a group that is pulled once too seldom",
        "distributed/_stage_pulls.py",
        "last = min(self.pull.pulls, self._from_top(blocks)) - 1",
        "last = min(self.pull.pulls, max(1, self._from_top(blocks) - 1)) - 1",
        (f"{STAGES}::test_as_many_pulls_as_groups_are_backprop",),
    ),
    Bug(
        "stages: noise inside groups",
        "distributed/_stage_batches.py",
        "for i in range(self._group, len(given), self._group)}",
        "for i in range(1, len(given))}",
        (f"{STAGES}::test_maps_between_groups_are_those_of_one_process",),
    ),
    Bug(
        "stages: cuts inside groups are accepted",
        "distributed/_stage_problems.py",
        "inside = [cut for cut in cuts if cut % group]",
        "inside = []",
        (f"{STAGES}::test_cuts_inside_groups_are_an_error",),
    ),
    Bug(
        "stages: skips carry the whole refinement",
        "distributed/_stage_pulls.py",
        "self._along_skip(j, refined - at[j])",
        "self._along_skip(j, refined)",
        (f"{STAGE_SKIPS}::test_skips_in_stages_give_the_estimate_of_one_process",),
    ),
    Bug(
        "stages: a stage leaves the skip of its first block out",
        "distributed/_stage_skips.py",
        "messages.send_down(delta)",
        "messages.send_down(found[0])",
        (f"{STAGE_SKIPS}::test_skips_in_stages_give_the_estimate_of_one_process[written-same-1-pair]",),
    ),
    Bug(
        "score log: the generator is not in the checksum",
        "distributed/_score_log.py",
        "found = zlib.crc32(bytes(generator.get_state().tolist()), found)",
        "found = zlib.crc32(b'', found)",
        (f"{LOG}::test_an_edited_log_is_an_error_at_its_step", f"{LOG}::test_a_killed_and_resumed_training_replays"),
    ),
    Bug(
        "score log: the trunk is not in the checksum",
        "distributed/_score_log.py",
        "return zlib.crc32(json.dumps(digests(split)).encode(), found) if self.checks_trunk(step) else found",
        "return found",
        (f"{LOG}::test_another_training_than_the_logged_one_is_an_error",),
    ),
)
