"""Capabilities of attention implementations, as data, and the reasons why an implementation cannot
run a problem.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, runtime_checkable

from enginebay.contracts.cache import KVLayout
from enginebay.ops.head_inputs import HEAD_INPUTS
from enginebay.ops.spec import AttnSpec, Bucket


@dataclasses.dataclass(frozen=True)
class Env:
    """The device that an op runs on: name of the platform ("cpu", "cuda", "tpu"), architecture
    ("sm_90", "v6e", or ""), and device kind.
    """

    platform: str
    arch: str = ""
    device_kind: str = ""


FEATURE_OF = {name: one.feature for name, one in HEAD_INPUTS.items()}
"""The feature by which a kernel declares an input that enginebay knows."""

LAYER = "layer"
"""The input that each layer passes: its number, an int."""


def always(_: object) -> bool:
    """Return True, for a predicate that allows every value."""
    return True


@runtime_checkable
class Interpretable(Protocol):
    """An implementation of an op that can be interpreted on the host, slowly, for checks."""

    def interpreted(self) -> Any:
        """Return the interpreted implementation, which follows the same contract and supports the
        platform "cpu". UnsupportedError, with the reason, when the interpreter is not installed.

        If the interpreter can, it also finds errors that a device hides: races, reads out of
        bounds, and reads of scratch memory that was not written.
        """


@runtime_checkable
class Preparable(Protocol):
    """An implementation of an op whose first call would wait for work that can begin earlier, such
    as the compilation of C++.
    """

    def prepare(self, needs: Mapping[str, Collection[str]]) -> None:
        """Begin this work on threads of its own, and return at once. Errors are raised by the
        first call. `needs`: the values that the engine's weights and cache need of the kernel's
        capabilities, such as {"quantizations": ("int8",)}; with "dtypes" of weights that are not
        quantised, and "kv_dtypes", dtypes or storages of the cache. An engine calls this when its
        kernels are chosen.
        """


@runtime_checkable
class SkipsPadding(Protocol):
    """An implementation of a product in which rows of zeros at the end of a step take no time, so
    that an engine needs fewer sizes of steps. A model's hidden states are zeros on padding.
    """

    def free_padding_rows(self, needs: Mapping[str, Collection[str]]) -> int:
        """Return the largest number of rows of a step, with its padding, for which this holds; 0
        for none. `needs`: as in `Preparable.prepare`, but "dtypes" are those of weights and inputs.
        """


@dataclasses.dataclass(frozen=True)
class Caps:
    """The capabilities of an attention implementation. Sets list the allowed values; predicates
    return whether a value is allowed.

    platforms: names of platforms; empty means any platform, also one that a plugin adds. layouts:
    the cache layouts, in order of preference. modes: the kinds of steps. q_dtypes: dtypes of
    queries. kv_dtypes: dtypes of keys and values, and storages of quantised caches
    (`KVLayout.storage`). features: any of window, softcap, sinks, alibi, lse, kv_share, mla,
    deterministic, fused_write, shard_map, command_buffer, mixed_dtypes. Without the feature
    fused_write, the op kv_write runs first and the implementation receives k = v = None. With mla,
    values are the first columns of the keys. inputs: further arguments that a call takes by name,
    each with its axes, such as `{"bias": ("heads", None), "layer": ()}`. An axis "heads" is split
    over devices as the query heads are; a number has no axes. The model passes them and names them
    in `AttnSpec.inputs`; every model passes "layer", the number of the layer. The features sinks
    and alibi stand for the inputs sinks and slopes.

    arch: whether an architecture of the device is served. head_dim: whether heads of this width
    are. latent_dim: checked in place of head_dim where values are a prefix of keys. group: whether
    this number of query heads per KV head is served. page_size: whether pages of this many tokens
    are. rows: whether a step with this number of rows is, with padding. context: whether a step
    with this longest context is, in tokens.

    compact_decode: a decode call should first copy the cache of its rows into one page per row
    (`Bucket.rows_are_pages`), and run all its steps on this copy. ragged_decode: the cost of a
    decode step depends on the lengths of its rows, not on the longest length of the bucket; engines
    then use one bucket of context lengths, and more buckets of row counts.
    """

    platforms: frozenset[str] = frozenset()
    layouts: tuple[str, ...] = ()
    modes: frozenset[str] = frozenset({"decode", "prefill", "mixed"})
    q_dtypes: frozenset[str] = frozenset({"bfloat16", "float16", "float32"})
    kv_dtypes: frozenset[str] = frozenset({"bfloat16", "float16", "float32"})
    features: frozenset[str] = frozenset()
    inputs: Mapping[str, tuple[str | None, ...]] = dataclasses.field(
        default_factory=dict, hash=False
    )
    arch: Callable[[str], bool] = always
    head_dim: Callable[[int], bool] = always
    latent_dim: Callable[[int], bool] = always
    group: Callable[[int], bool] = always
    page_size: Callable[[int], bool] = always
    rows: Callable[[int], bool] = always
    context: Callable[[int], bool] = always
    compact_decode: bool = False
    ragged_decode: bool = False

    @property
    def splits_rows(self) -> bool:
        """Whether consecutive tokens of one row can be decoded as separate rows with the same
        pages. This needs an implementation that does not write the cache, and whose cost depends on
        each row's own length.
        """
        return self.ragged_decode and "fused_write" not in self.features

    def key_dim(self, spec: AttnSpec) -> bool:
        """Return whether keys of the width in `spec` are supported."""
        return (self.latent_dim if spec.v_is_k_prefix else self.head_dim)(spec.head_dim)

    def serves_platform(self, name: str) -> bool:
        """Return whether the platform of this name is among `platforms`, or these are empty."""
        return not self.platforms or name in self.platforms

    def why_not_here(self, env: Env) -> str | None:
        """Return why the implementation cannot run on a device at all, or None."""
        if not self.serves_platform(env.platform):
            return f"needs platform {' or '.join(sorted(self.platforms))}, this is {env.platform}"
        if not self.arch(env.arch):
            return f"does not support architecture {env.arch or 'unknown'}"
        return None

    def why_not(self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout) -> str | None:
        """Return all reasons why the implementation cannot run this problem, joined; or None."""
        needed = _needed_features(spec)
        unknown = [one for one in spec.inputs if one not in {**FEATURE_OF, **self.inputs}]
        lacking = self.inputs.keys() - {*spec.inputs, LAYER}
        tests = (
            (layout.name in self.layouts, f"layout {layout.name} (has {', '.join(self.layouts)})"),
            (bucket.mode in self.modes, f"mode {bucket.mode}"),
            (spec.q_dtype in self.q_dtypes, f"dtype {spec.q_dtype}"),
            (spec.kv_dtype in self.kv_dtypes, f"cache dtype {spec.kv_dtype}"),
            (
                spec.kv_storage is None or spec.kv_storage in self.kv_dtypes,
                f"cache dtype {spec.kv_storage}",
            ),
            (
                spec.kv_storage is None or spec.kv_storage in layout.storages,
                f"layout {layout.name} for a {spec.kv_storage} cache",
            ),
            (self.key_dim(spec), f"head_dim {spec.head_dim}"),
            (self.group(spec.group), f"{spec.group} query heads per KV head"),
            (self.page_size(layout.page_size), f"page size {layout.page_size}"),
            (self.rows(bucket.seqs), f"{bucket.seqs} rows"),
            (self.context(bucket.max_kv_len), f"a context of {bucket.max_kv_len} tokens"),
            (needed <= self.features, f"features {', '.join(sorted(needed - self.features))}"),
            (not unknown, f"inputs {', '.join(unknown)}"),
            (
                layout.serves_v_prefix or not spec.v_is_k_prefix,
                f"layout {layout.name} for values that are a prefix of keys",
            ),
        )
        reasons = [self.why_not_here(env)] + [
            f"does not support {text}" for ok, text in tests if not ok
        ]
        if lacking:
            reasons.append(f"needs inputs {', '.join(sorted(lacking))}, which the model lacks")
        return "; ".join(r for r in reasons if r) or None


def _needed_features(spec: AttnSpec) -> frozenset[str]:
    wanted = {
        "window": spec.window is not None,
        "softcap": spec.softcap is not None,
        "lse": spec.return_lse,
        "kv_share": spec.kv_shared,
        "mla": spec.v_is_k_prefix,
        "deterministic": spec.deterministic,
        "mixed_dtypes": spec.q_dtype != spec.kv_dtype,
    }
    wanted |= {feature: name in spec.inputs for name, feature in FEATURE_OF.items()}
    return frozenset(name for name, on in wanted.items() if on)
