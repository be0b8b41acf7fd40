"""Configurations of the chosen kernels: the part that knows them, and what each bucket of an engine
gets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from enginebay.cache import KVLayout
from enginebay.config import EngineConfig
from enginebay.engine import AttentionProblem
from enginebay.errors import UnsupportedError
from enginebay.ops.bound import AttentionImpl
from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnSpec, Bucket, Mode
from enginebay.ops.tuning import Source, Tuning, Untuned, candidates_of
from enginebay.registry import Registry


def choose_tuning(registry: Registry, config: EngineConfig) -> Tuning:
    """The registered part of the highest priority, for `tuned` other than "off"."""
    able = registry.ready("tuning")
    if able and config.tuned != "off":
        made: Tuning = registry.load(able[0])(registry, config)
        return made
    if config.tuned == "require":
        raise UnsupportedError(
            "tuned = 'require', and no plugin knows tuned configurations",
            "a plugin that registers a part of kind tuning, such as bench",
            "Install one, or leave it out.",
        )
    return Untuned()


@dataclasses.dataclass(frozen=True)
class BucketConfig:
    """The configuration of a phase's attention kernel in one of an engine's buckets; None: there is
    nothing to choose.
    """

    phase: Mode
    implementation: str
    spec: AttnSpec
    bucket: Bucket
    layout: KVLayout
    config: Any
    source: Source | None


def bucket_configs(
    tuned: Tuning,
    attention: Mapping[str, AttentionImpl],
    env: Env,
    specs: Mapping[str, AttnSpec],
    problems: Iterable[AttentionProblem],
    *,
    num_shards: int = 1,
) -> list[BucketConfig]:
    """What each of an engine's problems gets, for each of its groups' `specs`. In mode "require"
    UnsupportedError for a miss.
    """
    found: dict[BucketConfig, None] = {}
    for bucket, layouts in problems:
        impl = attention[bucket.mode]
        for group, spec in specs.items():
            local = spec.per_shard(num_shards)
            layout = dataclasses.replace(
                layouts[group],
                num_kv_heads=local.num_kv_heads,
                num_pages=bucket.seqs * bucket.pages_per_seq,
            )
            here = (env, local, bucket, layout)
            config: Any = None
            source: Source | None = None
            if candidates_of(impl, *here):
                config, source = tuned.config("attention", impl, *here)
            found[BucketConfig(bucket.mode, impl.name, local, bucket, layout, config, source)] = (
                None
            )
    return list(found)
