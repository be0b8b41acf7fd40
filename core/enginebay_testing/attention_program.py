"""One attention kernel, compiled for one case and called with the arrays of any of its problems."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from enginebay.contracts.cache import KVLayout
from enginebay.ops.bound import AttentionImpl
from enginebay.ops.caps import Env
from enginebay.ops.tunable import candidates_of
from enginebay_testing.attention_cases import AttentionCase
from enginebay_testing.attention_inputs import AttentionInputs, read_contents, write_places
from enginebay_testing.case_runs import kit_jit, taken
from enginebay_testing.op_kit import numbers_of


class AttentionResult(NamedTuple):
    """The results of a step: out [T, Hq, D], the cache, and log-sum-exp [T, Hq] or None."""

    out: np.ndarray
    cache: dict[str, np.ndarray]
    lse: np.ndarray | None
    layout: KVLayout

    @property
    def read(self) -> tuple[jax.Array, jax.Array]:
        """Return what the layout reads from the cache (see `contents`)."""
        return read_contents(self.layout, self.cache)


class AttentionProgram:
    """The jitted step of a case, which donates its cache. Problems of the case with other seeds
    need no compilation. With `quickly`, XLA optimizes little on a CPU. Results are poisoned on the
    device when they have been copied.
    """

    def __init__(
        self,
        impl: AttentionImpl,
        case: AttentionCase,
        layout_type: type[KVLayout],
        env: Env,
        *,
        quickly: bool = False,
    ) -> None:
        spec, layout = case.spec, case.layout(layout_type)
        config = chosen_config(impl, env, case, layout)

        self._writes = "fused_write" in impl.caps.features
        self._layout, self._shared = layout, spec.kv_shared

        def step(q: Any, k: Any, v: Any, cache: Any, batch: Any, per_head: Any) -> Any:
            return impl(q, k, v, cache, batch, spec=spec, layout=layout, config=config, **per_head)

        self._call = (kit_jit if quickly else jax.jit)(step, donate_argnums=(3,))

    def __call__(self, problem: AttentionInputs) -> AttentionResult:
        """Run a problem on a copy of its cache."""
        cache: Any = {name: np.asarray(array) for name, array in problem.cache.items()}
        k, v = (None, None) if self._shared or not self._writes else (problem.k, problem.v)
        if not self._shared and not self._writes:
            new = (np.asarray(array) for array in (problem.batch.slots, problem.k, problem.v))
            cache = write_places(self._layout, cache, *new)
        arguments = (problem.q, k, v, cache, problem.batch, problem.inputs)
        out, after, lse = self._call(*arguments)
        out, after, lse = taken((out, dict(after), lse), arguments)
        return AttentionResult(out, after, lse, self._layout)


def chosen_config(impl: AttentionImpl, env: Env, case: AttentionCase, layout: KVLayout) -> Any:
    """Return the kernel's default configuration for a case, or the candidate with the smallest or
    largest numbers.
    """
    default = impl.default_config(env, case.spec, case.bucket, layout)
    if case.config == "default":
        return default
    found = [default, *candidates_of(impl, env, case.spec, case.bucket, layout)]
    return (min if case.config == "small" else max)(
        found, key=lambda config: sum(numbers_of(config))
    )
