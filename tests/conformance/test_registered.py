"""Every registered part keeps the contract of its kind: a new plugin is tested by existing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest

from enginebay.plugins.registry import Entry, load_registry
from enginebay_testing.attention_cases import REPRESENTATIVE
from enginebay_testing.suites import EVERYTHING, label, part_checks, select

SHARES_STATE = ("engine", "model", "sampler")
"""Kinds whose checks share weights and compiled programs: all of a part in one process."""

ATTENTION = "kernel:attention"
"""Kernels whose checks run in one process, as they share programs."""

CASES_IN_SHORT = {"attention": 10}
"""Of the constructed cases of an op the first so many: each covers more pairs of values than those
after it.
"""
LONG_CASES = {"attention": 5}
"""Of the cases in short, the number of first cases that are not marked `long`."""
LONG_PARTS = ("kernel:attention:jax_nn", "layout:nhd", "layout:tpu_rpa")
"""Parts whose checks are long: another part of the kind stays, and runs most of the same code."""
OTHER_OPS_IN_SHORT = 6

SEVERAL_ENGINES = ("chunk_sizes", "decode_steps", "state_moves", "hidden_states")
"""Of an engine's checks, by parts of their names, those that make engines of their own, or compile
programs that no other check needs: slow ones.
"""
ORACLE = "engine:vinference"
SLOW_BUT_OF_THE_ORACLE = ("logprobs", "compiling_can_be")
"""The same of engines that are not the oracle of the others: what the core does for all of them."""
OTHER_OPTIONS = "engine:esurge"
OPTIONS_IN_SHORT = ("declaration", "ledger")
"""The same of an engine that is engine:oengine with other options: what depends on the size of its
pages.
"""
OPTIONS_AT_ALL = (*OPTIONS_IN_SHORT, "released")
"""And with those that are slow. The others run on engine:oengine alone, which is the same code."""
LONG_OF_ENGINES = {
    ORACLE: (
        *("nothing_compiles", "recomputed", "dropped", "penalised"),
        *(
            "do_not_wait",
            "put_restores",
            "same_buckets",
            "stop_tokens",
            "seeded",
            *SLOW_BUT_OF_THE_ORACLE,
        ),
    ),
    OTHER_OPTIONS: ("ledger",),
    "engine:oengine": ("nothing_compiles",),
}
"""Long checks of engines, by parts of their names. engine:oengine passes most in `make test`."""
SETTINGS_IN_SHORT = ("[all]", "[temperature]")
"""Of the settings whose draws are counted, those that are not long."""
SAID_BY_OTHERS = {
    "equal_keys_and_positions_give_equal_tokens",
    "greedy_rows_do_not_depend_on_the_batch",
    "neighbouring_draws_are_independent",
}
"""Long checks of sampler:standard, of which row_does_not_depend_on_the_batch, those of the counted
draws, and sampler:greedy say most.
"""
SHARDED_IN_SHORT = {
    "deepseek_v2": "",
    "gemma3": "",
    "llama": "24",
    "mistral": "2",
    "qwen2": "2",
    "qwen3": "4",
    "qwen3_moe": "2",
}
"""Over how many devices families run; the other number is slow. They split weights by the same
code.
"""

LONG_OF_FAMILIES = (
    *("padding_changes_nothing", "_devices_equal_one", "rows_are_independent"),
    *("chunked_prefill_equals_whole", "decode_equals_prefill_of_everything"),
)
FAMILIES_IN_SHORT = ("llama",)
"""The checks of a model family that compile most, and the families whose checks are not long.
Stored logits hold the others in `make test`.
"""

QUANTISED_IN_SHORT = "layout[float32-"
"""Of the checks of a layout's quantised storages, how the names begin of those that are not long:
the dtype of computation changes little of them.
"""
STORAGES = ("int8", "uint4", "fp8")

RARE_FAMILIES = (
    *("apertus", "arcee", "bloom", "codegen", "cohere", "cohere2", "deepseek_v3", "dots1"),
    *(
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "falcon",
        "falcon_h1",
        "gemma",
        "gemma2",
        "glm4",
        "glm4_moe",
    ),
    *("glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite"),
    *(
        "granitemoe",
        "granitemoehybrid",
        "granitemoeshared",
        "helium",
        "hunyuan_v1_dense",
        "internlm3",
        "lfm2_moe",
        "minimax_m2",
        "ministral",
        "ministral3",
    ),
    *("mixtral", "mpt", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmoe", "opt"),
    *("phi", "phi3", "phimoe", "qwen2_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
)
"""Families of which `make test` holds the logits of one checkpoint, in tests/parity, alone."""


COMPILED = ("kernel:lora:native",)
"""Parts whose C++ is compiled once: another process would wait for it."""


def group_of(part: str, kind: str) -> str | None:
    """Whose checks run in one process, as they share compiled programs."""
    if part.startswith(ATTENTION):
        return ATTENTION
    return part if kind in SHARES_STATE or part in COMPILED else None


def slow_checks(entry: Entry, names: Iterable[str]) -> set[str]:
    """Those of a part's checks that `make test` leaves to `make test-all`."""
    part = label(entry)
    if part == OTHER_OPTIONS:
        return {name for name in names if not any(word in name for word in OPTIONS_IN_SHORT)}
    if entry.kind == "engine":
        costly = SEVERAL_ENGINES if part == ORACLE else SEVERAL_ENGINES + SLOW_BUT_OF_THE_ORACLE
        return {name for name in names if any(word in name for word in costly)}
    if entry.kind == "model" and entry.name in RARE_FAMILIES:
        return {name for name in names if name != "declaration_holds"}
    if entry.kind == "model":
        numbers = SHARDED_IN_SHORT.get(entry.name, "24")
        return {
            name for name in names if name.endswith("_devices_equal_one") and name[0] not in numbers
        }
    return slow_cases(entry.op, list(names)) if entry.kind == "kernel" else set()


def long_checks(entry: Entry, names: list[str]) -> set[str]:
    """The checks of a part that `make test` leaves to `make test-long`."""
    if label(entry) in LONG_PARTS:
        return set(names)
    if entry.kind == "model" and entry.name not in FAMILIES_IN_SHORT:
        return {name for name in names if name.endswith(LONG_OF_FAMILIES)}
    if entry.kind == "kernel" and entry.op in LONG_CASES:
        return late_cases(names, LONG_CASES[entry.op])
    if entry.kind == "layout":
        quantised = {name for name in names if name.rstrip("]").endswith(STORAGES)}
        return {name for name in quantised if not name.startswith(QUANTISED_IN_SHORT)}
    if entry.kind == "sampler":
        counted = {name for name in names if "frequencies[" in name}
        counted = {name for name in counted if not name.endswith(SETTINGS_IN_SHORT)}
        return counted | (SAID_BY_OTHERS if label(entry) == "sampler:standard" else set())
    costly = LONG_OF_ENGINES.get(label(entry), ())
    return {name for name in names if any(word in name for word in costly)}


def slow_cases(op: str, names: list[str]) -> set[str]:
    """The cases of a kernel that `make test-all` alone runs."""
    return late_cases(names, CASES_IN_SHORT.get(op, OTHER_OPS_IN_SHORT))


def late_cases(names: list[str], num_first: int) -> set[str]:
    """The cases of a kernel but for the first ones, and for those with a name that stand for all
    named ones.
    """
    named = {
        name
        for name in names
        if name.partition("[")[0] in {*REPRESENTATIVE, "rows_are_independent"}
    }
    others = [name for name in names if "[" in name and name not in named]
    return set(others[num_first:])


def is_left_out(part: str, name: str) -> bool:
    """Said by another part that runs the same code."""
    return part == OTHER_OPTIONS and not any(word in name for word in OPTIONS_AT_ALL)


def registered_checks() -> Iterator[pytest.ParameterSet]:
    registry = load_registry()
    for entry in select(registry, EVERYTHING):
        part = label(entry)
        checks = [
            (name, check)
            for name, check in part_checks(registry, entry)
            if not is_left_out(part, name)
        ]
        names = [name for name, _ in checks]
        slow, long = slow_checks(entry, names), long_checks(entry, names)
        group = group_of(part, entry.kind)
        for name, check in checks:
            marks = [] if group is None else [pytest.mark.xdist_group(group)]
            marks += [pytest.mark.slow] if name in slow else []
            marks += [pytest.mark.long] if name in long - slow else []
            yield pytest.param(check, id=f"{part}-{name}", marks=marks)


@pytest.mark.parametrize("check", list(registered_checks()))
def test_registered_part_keeps_its_contract(check: Callable[[], None]) -> None:
    check()
