"""Faults of attention in kernels that are organised in other ways: powers of two, pages in turn,
splits and trees of results.
"""

from __future__ import annotations

from tests.zoo.faults import Fault, Kind, More


def _way(kernel: str, module: str, name: str, kind: Kind | More, old: str, new: str) -> Fault:
    place = f"right.attentions:{kernel}"
    return Fault(f"b_{kernel}_{name}", "attention", kind, place, f"right.{module}", old, new, "B")


FAULTS = (
    _way(
        "thirds",
        "softmaxes",
        "every_split_has_the_sink",
        "split",
        "found = [whole(part) for part in parts]",
        "found = [whole(dataclasses.replace(part, sinks=given.sinks)) for part in parts]",
    ),
    _way(
        "strides",
        "softmaxes",
        "keys_after_whole_strides_are_in_no_split",
        "split",
        "parts = [given.part(i, length, count) for i in range(min(count, length))]",
        "parts = [given.part(i, max(count, length - length % count), count) for i in range(count)]",
    ),
    _way(
        "powers_of_two",
        "attending",
        "sinks_in_units_of_e",
        "scale",
        "sinks = None if problem.sinks is None else problem.sinks * log2e",
        "sinks = problem.sinks",
    ),
    _way(
        "powers_of_two",
        "attending",
        "capped_scores_in_units_of_e",
        "scale",
        "scores = scores if is_plain else scores * log2e",
        "scores = scores if is_plain or problem.slopes is None else scores * log2e",
    ),
    _way(
        "powers_of_two",
        "softmaxes",
        "log_sum_exp_of_two_logarithms",
        "feature",
        "return maximum * math.log(2) + log if self.base2 else maximum + log",
        "return (maximum + log) * math.log(2) if self.base2 else maximum + log",
    ),
    _way(
        "blocks_of_24",
        "softmaxes",
        "keys_of_the_padding_score_zero",
        "border",
        'given.scores, [(0, 0)] * 3 + [(0, missing)], mode="constant", constant_values=-jnp.inf',
        'given.scores, [(0, 0)] * 3 + [(0, missing)], mode="constant", constant_values=0.0',
    ),
    _way(
        "backwards",
        "softmaxes",
        "a_sink_counts_from_the_second_block",
        "accumulator",
        "keep = given.exp(maximum - higher)",
        "keep = jnp.where(i > 0, given.exp(maximum - higher), 0.0)",
    ),
    _way(
        "tree",
        "softmaxes",
        "an_odd_result_is_lost",
        "split",
        "pairs = [found[i : i + 2] for i in range(0, len(found), 2)]",
        "pairs = [found[i : i + 2] for i in range(0, len(found) - 1, 2)]",
    ),
    _way(
        "pages_of_16",
        "attentions",
        "a_window_begins_at_the_next_page",
        "mask",
        "first, stop = queries.first // size, -(-queries.end // size)",
        "first, stop = -(-queries.first // size), -(-queries.end // size)",
    ),
    _way(
        "pages_of_16",
        "attentions",
        "a_page_with_one_key_is_not_read",
        "border",
        "first, stop = queries.first // size, -(-queries.end // size)",
        "first, stop = queries.first // size, (queries.end + size - 2) // size",
    ),
    _way(
        "every",
        "attending",
        "distances_in_sixteen_bits",
        "size",
        "back = (key_positions - queries.position[:, None]).astype(jnp.float32)",
        "back = (key_positions - queries.position[:, None]).astype(jnp.bfloat16)",
    ),
    _way(
        "every",
        "attending",
        "stale_values_are_multiplied_by_zero",
        "border",
        "values = jnp.where(shown.any(axis=0)[:, None, None], v, 0)",
        "values = v",
    ),
    _way(
        "decode_alone",
        "attentions",
        "rows_past_128_read_the_pages_of_the_first",
        "size",
        "pages = batch.page_table",
        "pages = batch.page_table[jnp.arange(batch.bucket.seqs) % 128]",
    ),
    _way(
        "prefill_alone",
        "attentions",
        "last_row_reads_behind_its_prompt",
        "border",
        "tokens = jnp.minimum(problem.batch.cu_q_lens[row] + positions, len(k) - 1)",
        "tokens = jnp.minimum(problem.batch.cu_q_lens[row], len(k) - len(positions)) + positions",
    ),
)
