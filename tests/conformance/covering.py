"""Chooses cases of a kernel such that each pair of traits of any case is in a chosen case."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from enginebay.ops.caps import Env
from enginebay.registry import Entry, Registry
from enginebay.testing import kernels
from enginebay.testing.attention_cases import AttentionCase
from enginebay.testing.attention_suite import attention_checks
from enginebay.testing.suites import layouts_of

Traits = Mapping[str, object]


def traits_of(case: AttentionCase, layout: str) -> Traits:
    """The traits of a case, by which `covering` compares it with others.

    "lengths" and "else" set apart a case that tests a single edge, such as padding rows.
    """
    spec = case.spec
    home = "row" if case.rows_are_pages else "contiguous" if case.contiguous else "paged"
    return {
        "mode": case.mode,
        "layout": layout,
        "dtype": spec.q_dtype,
        "home": (home, case.page_size),
        "heads": (spec.num_kv_heads, spec.group, spec.head_dim),
        "feature": (spec.window, spec.softcap, spec.sinks, spec.return_lse, spec.scale, spec.causal),
        "shared": spec.kv_shared,
        "lengths": (case.q_lens, case.kv_lens, case.capacity, case.max_kv_len),
        "else": (case.constant_v, case.poison == case.poison, case.padding_rows),  # NaN
    }


def covering(cases: Mapping[str, Traits], kept: set[str]) -> set[str]:
    """`kept` and a few names more: each pair of traits of any case is in a named case.

    A greedy set cover: add the case with the most missing pairs until none is missing.
    """
    pairs = {name: set(itertools.combinations(traits.items(), 2)) for name, traits in cases.items()}
    kept = set(kept)
    left = set().union(*pairs.values()).difference(*(pairs.pop(name) for name in kept))
    while left:
        best = max(pairs, key=lambda name: len(pairs[name] & left))
        kept.add(best)
        left -= pairs.pop(best)
    return kept


def cases_that_are_left_out(registry: Registry, entry: Entry, env: Env) -> set[str]:
    """Names of attention checks that can be left out: other checks have their pairs of traits.

    Checks that `enginebay check` runs, and checks that the kernel refuses, are never left out.
    """
    kernel = registry.load(entry)
    layouts = {layout.__name__: layout for layout in layouts_of(registry, kernel)}
    served: dict[str, Traits] = {}
    representative: set[str] = set()
    for check in attention_checks(kernel, env, list(layouts.values())):
        layout = check.name.partition("[")[2].rstrip("]")
        if layout in layouts and kernels.why_not(kernel, check.case, layouts[layout], env) is None:
            served[check.name] = traits_of(check.case, layout)
            representative |= {check.name} if check.representative else set()
    return served.keys() - covering(served, representative)
