"""Tables of tuned configurations, and the rules by which a step finds its entry.

An entry is found by op, implementation, version, kind of device, spec, cache layout (name and page
size) and bucket. A step uses, in this order:

1. the entry of exactly this bucket;
2. the entry of the smallest larger bucket of the same mode: no fewer tokens, rows, query and
   context lengths;
3. the implementation's own default.

Ops without phases have no layout. Their bucket is the number of rows, and their spec is the sizes
and dtypes of the arguments, as the implementation names them. An entry is ignored if its
configuration is neither the default nor a candidate for the bucket. All entries are ignored if the
spec requires `deterministic`, because other block sizes add in another order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from enginebay.contracts.cache import KVLayout
from enginebay.errors import ConfigError, UnsupportedError
from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnSpec, Bucket, Mode
from enginebay.ops.tunable import candidates_of
from enginebay.ops.tuning import ConfigSource, OpProblem, TunableOp
from enginebay.validation import describe_validation

TunedMode = Literal["auto", "off", "require"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TunedEntry(_Frozen):
    """The fastest configuration for one problem. `config` None: measured, but the implementation
    has no choice.

    `spec` has the fields of AttnSpec that differ from the defaults, except `scale`, which does not
    change the speed. `roofline` is the share of this machine's limit; `default_median_s` is the
    time of the default configuration.
    """

    spec: dict[str, int | float | str | bool]
    layout: str
    page_size: int
    bucket: dict[str, int | str | bool]
    config: dict[str, int | float | str | bool] | None
    median_s: float
    default_median_s: float
    roofline: float


class TunedTable(_Frozen):
    """All entries of one version of an implementation on one kind of device, and how they were
    measured.
    """

    format: Literal[1] = 1
    op: str
    impl: str
    version: str
    device_kind: str
    environment: dict[str, Any]
    command: str
    entries: tuple[TunedEntry, ...]


def read_table(text: str, name: str) -> TunedTable:
    """Parse a table from JSON; ConfigError with its name when it is invalid."""
    try:
        return TunedTable.model_validate_json(text)
    except ValidationError as error:
        problem = describe_validation(error, TunedTable)
        raise ConfigError(f"table of tuned kernels {name}: {problem}") from None


def spec_key(spec: AttnSpec) -> dict[str, int | float | str | bool]:
    """Return the fields of a spec that identify a problem: those that differ from AttnSpec's
    defaults, except the scale.
    """
    fields = {f.name: (f.default, getattr(spec, f.name)) for f in dataclasses.fields(spec)}
    return {n: value for n, (default, value) in fields.items() if n != "scale" and value != default}


def bucket_key(bucket: Bucket) -> dict[str, int | str | bool]:
    """Return the bucket's sizes except pages_per_seq, which follows from context and page size."""
    return {n: v for n, v in dataclasses.asdict(bucket).items() if n != "pages_per_seq"}


@dataclasses.dataclass(frozen=True)
class TableKey:
    """The key of a problem in a table; `text` describes the problem in messages."""

    spec: dict[str, int | float | str | bool]
    layout: str
    page_size: int
    bucket: dict[str, int | str | bool]
    text: str

    @staticmethod
    def of_attention(spec: AttnSpec, bucket: Bucket, layout: KVLayout) -> TableKey:
        """Return the key of an attention problem."""
        text = f"{bucket} of {spec_key(spec)} in layout {layout.name}, page size {layout.page_size}"
        return TableKey(spec_key(spec), layout.name, layout.page_size, bucket_key(bucket), text)

    @staticmethod
    def of_op(problem: OpProblem) -> TableKey:
        """Return the key of a problem of an op without phases."""
        sizes = dict(problem.sizes)
        return TableKey({**sizes}, "", 0, {"rows": problem.rows}, f"{problem.rows} rows of {sizes}")


def device_kind(env: Env) -> str:
    """Return the name of the device in tables."""
    return env.device_kind or env.platform


def _is_next(entry: Mapping[str, Any], bucket: Mapping[str, Any]) -> bool:
    """Return whether an entry's bucket has the same mode and is not smaller in any size."""
    same = ("mode", "rows_are_pages")
    return all(
        entry.get(n) == bucket[n] if n in same else entry.get(n, 0) >= bucket[n] for n in bucket
    )


def _size(entry: TunedEntry) -> float:
    return math.prod(value for value in entry.bucket.values() if not isinstance(value, bool | str))


@dataclasses.dataclass(frozen=True)
class TunedConfigs:
    """Chooses the configuration of a kernel for each problem, from the tables of an engine: the
    user's before those of packages. Without tables, each kernel has its default.
    """

    tables: tuple[TunedTable, ...] = ()
    mode: TunedMode = "off"

    def of(self, op: str, impl: Any, env: Env) -> tuple[TunedTable, ...]:
        """Return the tables of an implementation and its version on this kind of device."""
        wanted = (op, impl.name, str(impl.version), device_kind(env))
        return tuple(t for t in self.tables if (t.op, t.impl, t.version, t.device_kind) == wanted)

    def config(
        self, op: str, impl: Any, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
    ) -> tuple[Any, ConfigSource]:
        """Return the configuration of an implementation for a problem, by the rules of this module,
        and its source.

        UnsupportedError in mode "require" when there are candidates but no table has an entry.
        """
        default = impl.default_config(env, spec, bucket, layout)
        choices = candidates_of(impl, env, spec, bucket, layout)
        if spec.deterministic:
            return default, "default"
        return self._choose(
            op, impl, env, TableKey.of_attention(spec, bucket, layout), default, choices
        )

    def op_config(
        self, op: str, impl: TunableOp, env: Env, problem: OpProblem
    ) -> tuple[Any, ConfigSource]:
        """Like `config`, for an op without phases."""
        default, choices = impl.default_config(env, problem), impl.candidates(env, problem)
        return self._choose(op, impl, env, TableKey.of_op(problem), default, choices)

    def bound(self, op: str, impl: Any, env: Env) -> Any:
        """Return an implementation of an op without phases that uses the configurations of this
        object. An implementation without configurations is returned as it is.
        """
        if not isinstance(impl, TunableOp):
            return impl
        return impl.tuned(lambda problem: self.op_config(op, impl, env, problem)[0])

    def _choose(
        self, op: str, impl: Any, env: Env, place: TableKey, default: Any, choices: Sequence[Any]
    ) -> tuple[Any, ConfigSource]:
        if self.mode == "off" or not choices:
            return default, "default"
        for table in self.of(op, impl, env):
            for entry, source in _matching(table.entries, place):
                found = next(
                    (c for c in (default, *choices) if dataclasses.asdict(c) == entry.config), None
                )
                if found is not None:
                    return found, source
        if self.mode == "require":
            raise UnsupportedError(
                f"{op} {impl.name} {impl.version} has no tuned configuration for {place.text}, "
                f"on {device_kind(env)}",
                "problems that a table of tuned kernels has",
                'Run `enginebay tune`, or set tuned = "auto".',
            )
        return default, "default"

    def faster_than(
        self, op: str, impls: Sequence[Any], env: Env, specs: Sequence[AttnSpec], mode: Mode
    ) -> tuple[Any, str] | None:
        """Return the fastest implementation by these tables and the reason, or None. The first is
        compared with others by the buckets of a mode in which both were measured, with geometric
        means of the times.
        """
        first, *others = impls
        if self.mode == "off":
            return None
        mine = self._medians(op, first, env, specs, mode)
        best: tuple[float, Any, int] | None = None
        for other in others:
            theirs = self._medians(op, other, env, specs, mode)
            common = sorted(mine.keys() & theirs.keys())
            if not common:
                continue
            ratio = math.exp(sum(math.log(theirs[k] / mine[k]) for k in common) / len(common))
            if ratio < (best[0] if best else 1.0):
                best = (ratio, other, len(common))
        if best is None:
            return None
        ratio, other, count = best
        return (
            other,
            f"measured fastest: {ratio:.2f} of the time of {first.name} over {count} tuned buckets",
        )

    def _medians(
        self, op: str, impl: Any, env: Env, specs: Sequence[AttnSpec], mode: Mode
    ) -> dict[str, float]:
        keys = [spec_key(spec) for spec in specs]
        medians: dict[str, float] = {}
        for table in self.of(op, impl, env):
            for e in table.entries:
                if e.spec in keys and e.bucket.get("mode") == mode:
                    medians.setdefault(
                        f"{sorted(e.spec.items())} {e.layout} {e.page_size} {e.bucket}", e.median_s
                    )
        return medians


def _matching(
    entries: Iterable[TunedEntry], place: TableKey
) -> list[tuple[TunedEntry, ConfigSource]]:
    """Return the entries that may serve a problem, the best match first."""
    here = (place.spec, place.layout, place.page_size)
    same = [e for e in entries if (e.spec, e.layout, e.page_size) == here and e.config is not None]
    exact: list[tuple[TunedEntry, ConfigSource]] = [
        (e, "tuned") for e in same if e.bucket == place.bucket
    ]
    larger = [e for e in same if e.bucket != place.bucket and _is_next(e.bucket, place.bucket)]
    return exact + [(e, "tuned for a larger bucket") for e in sorted(larger, key=_size)]
