"""Looks up the configuration of the chosen attention kernels in each bucket of an engine, and
checks that there is one where a configuration requires it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from enginebay.compose.kernels import ChosenKernels
from enginebay.compose.ops import ATTENTION
from enginebay.compose.plan import Plan
from enginebay.contracts.cache import KVLayout
from enginebay.contracts.engine import AttentionProblem, Engine
from enginebay.ops.spec import AttnSpec, Bucket, Mode
from enginebay.ops.tunable import candidates_of
from enginebay.ops.tuning import ConfigSource


@dataclasses.dataclass(frozen=True)
class BucketConfig:
    """The configuration of the attention kernel in one bucket of an engine, and its source. Both
    are None for a kernel without configurations.
    """

    phase: Mode
    implementation: str
    spec: AttnSpec
    bucket: Bucket
    layout: KVLayout
    config: Any
    source: ConfigSource | None


def bucket_configs(
    kernels: ChosenKernels, problems: Iterable[AttentionProblem]
) -> list[BucketConfig]:
    """Return the configuration for each problem and cache group. UnsupportedError for a problem
    that is not tuned, with tuned = "require".
    """
    found: dict[BucketConfig, None] = {}
    for bucket, layouts in problems:
        impl = kernels.attention[bucket.mode]
        for group, spec in kernels.specs.items():
            num_pages = bucket.seqs * bucket.pages_per_seq
            layout = dataclasses.replace(
                layouts[group], num_kv_heads=spec.num_kv_heads, num_pages=num_pages
            )
            here = (kernels.env, spec, bucket, layout)
            config: tuple[Any, ConfigSource | None] = (None, None)
            if candidates_of(impl, *here):
                config = kernels.tuned.config(ATTENTION, impl, *here)
            found[BucketConfig(bucket.mode, impl.name, spec, bucket, layout, *config)] = None
    return list(found)


def kernel_configs(plan: Plan, engine: Engine) -> list[BucketConfig]:
    """Return the kernel configuration of attention in every bucket of the engine, with its
    source.
    """
    return bucket_configs(plan.kernels, engine.attention_problems())


def require_tuned(plan: Plan) -> None:
    """With tuned = "require", raise UnsupportedError for a bucket of the plan's engine that is not
    tuned: now, and not when a step is first compiled.
    """
    if plan.config.tuned == "require":
        bucket_configs(plan.kernels, plan.kernels.problems())
