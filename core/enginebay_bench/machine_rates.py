"""The rates of this machine: bytes read and copied per second by the size of an array, and
operations per second of products by dtype and number of rows.

`python -m enginebay_bench.machine_rates` measures with one processor of the host: it reads a
`OneProcessor` from stdin and writes the rates to stdout.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import jax
import jax.numpy as jnp
from pydantic import Field, TypeAdapter

log = logging.getLogger("enginebay")

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
KIB, MIB = 1 << 10, 1 << 20
SAMPLE_S = 0.01
"""Least seconds of a sample, unless one call takes longer."""

LOOP_BYTES = 8 * MIB
LOOP_FLOPS = 20e6
"""A compiled loop repeats a small operation until it has read these bytes, or computed these
operations, so that launching the program takes little of the time.
"""

MAX_READ_ROWS = 1024
CHILD_LIMIT_S = 600.0

RateT = TypeVar("RateT")


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What is measured. num_bytes: sizes of arrays. dtypes and num_rows: products [rows, width] x
    [width, width]. rounds: how often each is measured; the best counts. case_s: a case of which the
    rounds so far took longer is measured no more.
    """

    num_bytes: tuple[int, ...] = (
        *(16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB),
        *(64 * MIB, 256 * MIB),
    )
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "int8")
    num_rows: tuple[int, ...] = (1, 8, 32, 256, 1024)
    width: int = 1024
    rounds: int = 12
    case_s: float = 1.5


SWEEP = Sweep()


@dataclasses.dataclass(frozen=True)
class MemoryRate:
    """The rates for arrays of a size. A copy counts the bytes that it reads and those that it
    writes.
    """

    num_bytes: int
    read_bytes_per_s: Rate
    copy_bytes_per_s: Rate


@dataclasses.dataclass(frozen=True)
class ProductRate:
    """The rate of a product [num_rows, width] x [width, width], two operations for each of its
    multiplications.
    """

    dtype: str
    num_rows: int
    flops_per_s: Rate


@dataclasses.dataclass(frozen=True)
class Rates:
    """The rates that a number of processors reaches, and the seconds of a launch."""

    memory: tuple[MemoryRate, ...]
    products: tuple[ProductRate, ...]
    launch_s: Rate


@dataclasses.dataclass(frozen=True)
class MachineRates:
    """The rates with all processors, as XLA uses them, and with one processor of the host; None
    where a device computes, or the host has only one.
    """

    device: str
    num_processors: int
    all: Rates
    one: Rates | None = None

    def read_bytes_per_s(self, num_bytes: float) -> float:
        """Return the rate at which arrays of together `num_bytes` are read: that of the nearest
        measured size which is not smaller, or of the largest one.
        """
        by_size = sorted(self.all.memory, key=lambda one: one.num_bytes)
        larger = (one for one in by_size if one.num_bytes >= num_bytes)
        return next(larger, by_size[-1]).read_bytes_per_s

    def flops_per_s(self, dtype: str) -> float:
        """Return the best rate of products in a dtype. A dtype that was not measured has the rate
        of the widest measured one.
        """
        rates: dict[str, float] = {}
        for one in self.all.products:
            rates[one.dtype] = max(rates.get(one.dtype, 0.0), one.flops_per_s)
        widest = max(rates, key=lambda name: jnp.dtype(name).itemsize)
        return rates.get(dtype, rates[widest])


@dataclasses.dataclass(frozen=True)
class OneProcessor:
    """What the process measures that may use one processor only."""

    backend: str
    options: Mapping[str, str | bool | int]
    sweep: Sweep


def measure_machine(
    device: jax.Device, name: str, options: Mapping[str, Any], sweep: Sweep
) -> MachineRates:
    """Measure a device, named `name` in the result, and one processor of the host if the device is
    the host. Takes some seconds; with other programs on the machine the rates are too low.

    `options` are XLA's, as `Platform.compile_options` returns them.
    """
    count = num_processors(device)
    everything = measure_rates(device, options, sweep)
    one = None
    if measures_one(device):
        one = _measured_apart(OneProcessor(device.platform, options, sweep))
    return MachineRates(name, count, everything, one)


def measures_one(device: jax.Device) -> bool:
    """Return whether one processor of the host is measured too."""
    return num_processors(device) > 1 and hasattr(os, "sched_setaffinity")


def num_processors(device: jax.Device) -> int:
    """Return how many processors of the host compute; 1 for a device of its own."""
    if device.platform != "cpu":
        return 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def measure_rates(device: jax.Device, options: Mapping[str, Any], sweep: Sweep) -> Rates:
    """Measure the rates of a device by all processors that this process may use. Each round
    measures every case once, so that a disturbance does not take all samples of one case.
    """
    with jax.default_device(device):
        cases = {
            **{
                (name, size): _read_case(size, dots=name == "dots", options=options)
                for name in ("sums", "dots")
                for size in sweep.num_bytes
            },
            **{("copy", size): _copy_case(size, options) for size in sweep.num_bytes},
            **{
                (dtype, rows): _product_case(dtype, rows, sweep.width, options)
                for dtype in sweep.dtypes
                for rows in sweep.num_rows
            },
            ("launch", 0): _launch_case(options),
        }
        best = _best_rates(cases, sweep)
    memory = tuple(
        MemoryRate(size, max(best["sums", size], best["dots", size]), best["copy", size])
        for size in sweep.num_bytes
    )
    products = tuple(
        ProductRate(dtype, rows, best[dtype, rows])
        for dtype in sweep.dtypes
        for rows in sweep.num_rows
    )
    return Rates(memory, products, 1 / best["launch", 0])


@dataclasses.dataclass
class _Case:
    """A compiled program and its argument, which the result replaces; `work` is what a call
    does: bytes, operations, or one launch.
    """

    program: Callable[[Any], Any]
    argument: Any
    work: float
    num_calls: int = 1
    seconds: float = 0.0
    best: float = 0.0

    def sample(self) -> None:
        """Measure `num_calls` calls."""
        argument = self.argument
        started_s = time.perf_counter()
        for _ in range(self.num_calls):
            argument = self.program(argument)
        jax.block_until_ready(argument)
        spent_s = time.perf_counter() - started_s
        self.argument = argument
        self.seconds += spent_s
        self.best = max(self.best, self.num_calls * self.work / spent_s)


def _best_rates(cases: Mapping[RateT, _Case], sweep: Sweep) -> dict[RateT, float]:
    """Return the best rate of each case, in units of its work per second."""
    for case in cases.values():
        case.sample()  # touches the memory
        case.best = 0.0
        case.sample()
        case.num_calls = max(1, int(SAMPLE_S * case.best / case.work))
        case.seconds = 0.0
    for _ in range(sweep.rounds):
        for case in cases.values():
            if case.seconds < sweep.case_s:
                case.sample()
    return {name: case.best for name, case in cases.items()}


def _compiled(function: Callable[[Any], Any], argument: Any, options: Mapping[str, Any]) -> Any:
    jitted = jax.jit(function, donate_argnums=0, compiler_options=dict(options))
    return jitted.lower(argument).compile()


def _num_loops(work: float, least: float) -> int:
    return max(1, round(least / work))


def _read_case(num_bytes: int, *, dots: bool, options: Mapping[str, Any]) -> _Case:
    """Sums of the rows of an array, or their dot products with a vector, whichever a kernel of
    XLA reads faster with. Each depends on the one before, so none is left out.
    """
    num_rows = max(1, min(MAX_READ_ROWS, num_bytes // (4 * KIB)))
    array = jnp.ones((num_rows, num_bytes // 4 // num_rows), jnp.float32)
    count = _num_loops(num_bytes, LOOP_BYTES)

    def program(argument: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        array, sums = argument

        def step(_: Any, sums: jax.Array) -> jax.Array:
            if dots:
                return array @ jnp.ones(array.shape[1]).at[0].set(sums[0])
            return jax.lax.reduce(array, sums[0], jax.lax.add, (1,))

        return array, jax.lax.fori_loop(0, count, step, sums)

    argument = (array, jnp.zeros(num_rows))
    return _Case(_compiled(program, argument, options), argument, float(num_bytes) * count)


def _copy_case(num_bytes: int, options: Mapping[str, Any]) -> _Case:
    """Writes an array, changed by the number of the copy, to another array of the same size."""
    count = _num_loops(2.0 * num_bytes, LOOP_BYTES)

    def program(argument: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        source, target, number = argument

        def step(i: Any, _: jax.Array) -> jax.Array:
            return source ^ (number + i)

        return source, jax.lax.fori_loop(0, count, step, target), number + 1

    source = jnp.ones(num_bytes // 4, jnp.int32)
    argument = (source, jnp.copy(source), jnp.int32(1))
    return _Case(_compiled(program, argument, options), argument, 2.0 * num_bytes * count)


def _product_case(dtype: str, rows: int, width: int, options: Mapping[str, Any]) -> _Case:
    """Products of a row's activations with a weight, as the layers of a model make them."""
    kind = jnp.dtype(dtype)
    flops = 2.0 * rows * width * width
    count = _num_loops(flops, LOOP_FLOPS)
    is_float = jnp.issubdtype(kind, jnp.floating)
    total = jnp.float32 if is_float else jnp.int32
    highest = jax.lax.Precision.HIGHEST if dtype == "float32" else None

    def program(argument: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        weight, x = argument

        def step(_: Any, x: jax.Array) -> jax.Array:
            dims = (((1,), (1,)), ((), ()))
            product = jax.lax.dot_general(
                x, weight, dims, precision=highest, preferred_element_type=total
            )
            return product.astype(kind)

        return weight, jax.lax.fori_loop(0, count, step, x)

    # The mean of a row of ones is 1, so the numbers of floats stay where they are.
    weight = jnp.full((width, width), 1 / width if is_float else 1, kind)
    argument = (weight, jnp.ones((rows, width), kind))
    return _Case(_compiled(program, argument, options), argument, flops * count)


def _launch_case(options: Mapping[str, Any]) -> _Case:
    argument = jnp.zeros(8)
    return _Case(_compiled(lambda x: x + 1, argument, options), argument, 1.0)


def _measured_apart(asked: OneProcessor) -> Rates | None:
    """Measure in a process that may use one processor; None if it fails."""
    text = TypeAdapter(OneProcessor).dump_json(asked)
    command = [sys.executable, "-m", "enginebay_bench.machine_rates"]
    try:
        child = subprocess.run(
            command, input=text, capture_output=True, timeout=CHILD_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        log.warning("one processor was not measured: %s %s", error, said.decode(errors="replace"))
        return None
    return TypeAdapter(Rates).validate_json(child.stdout.splitlines()[-1])


def main() -> None:
    """Measure with one processor, and print the rates as a line of JSON."""
    asked = TypeAdapter(OneProcessor).validate_json(sys.stdin.read())
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before XLA makes its threads
    device = jax.local_devices(backend=asked.backend)[0]
    print(json.dumps(dataclasses.asdict(measure_rates(device, asked.options, asked.sweep))))


if __name__ == "__main__":
    main()
