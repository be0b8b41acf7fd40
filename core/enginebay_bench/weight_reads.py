"""Counts how often a compiled step reads each weight, from the text of the compiled program.

`python -m enginebay_bench.weight_reads v6e CONFIG.json` compares a mixed step (rows decode next to
a chunk of a prompt) with a prefill and a decode step, for devices that need not be present.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import pkgutil
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from enginebay.errors import unknown_name
from enginebay.plugins.registry import load_registry
from enginebay_testing.cross_compile import DecodeShape, StepReport, compile_decode_step
from enginebay_testing.toolchains import KernelCompiler

HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
WEIGHT = re.compile(r"\[\\?'([\w.]+)\\?'\]")
SHAPE = re.compile(r"\w+\[([\d,]*)\]")
SLICE = re.compile(r"slice=\{(.*?)\}")
PASSED_ON = ("bitcast", "get-tuple-element", "opt-barrier", "tuple", "while")
"""Operations that pass a value on without reading it."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation. `rest` begins with the operands."""

    name: str
    shape: str
    operation: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """Return the names of the operands."""
        depth, end = 1, len(self.rest)
        for at, sign in enumerate(self.rest):
            depth += (sign in "([{") - (sign in ")]}")
            if not depth:
                end = at
                break
        return re.findall(r"%([\w.-]+)", self.rest[:end])


def count_reads(text: str) -> Mapping[str, float]:
    """Return the reads of each weight by path, in a program whose first argument is a dict of
    weights. Reads in a loop count for one iteration. A slice counts as its share of the weight.

    A TPU program may begin with a weight that the run before it fetched into fast memory, and end
    by fetching that weight for the next run. This counts as one read.
    """
    computations: dict[str, list[Instruction]] = {}
    entry, lines = "", list[Instruction]()
    for line in text.splitlines():
        if header := HEADER.match(line):
            lines = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif found := INSTRUCTION.match(line):
            lines.append(Instruction(found[1], found[2], found[3], found[4]))
    reads: dict[str, float] = collections.defaultdict(float)
    whole: dict[str, Any] = {}
    for one in computations[entry]:
        path = WEIGHT.search(one.rest) if one.operation == "parameter" else None
        if path is not None:
            whole[one.name] = path[1]
    _walk(computations, entry, whole, reads)
    return reads


def _walk(
    computations: Mapping[str, Sequence[Instruction]],
    name: str,
    known: dict[str, Any],
    reads: dict[str, float],
) -> None:
    """Count the reads of a computation; `known` maps each value to its weight, or to the weights of
    a tuple's elements.
    """
    for one in computations[name]:
        given = [known.get(operand) for operand in one.operands]
        if not any(given):
            continue
        if one.operation == "tuple":
            known[one.name] = dict(enumerate(given))
        elif one.operation == "get-tuple-element":
            index = re.search(r"index=(\d+)", one.rest)
            assert index is not None, "get-tuple-element has an index"
            known[one.name] = given[0].get(int(index[1])) if isinstance(given[0], dict) else None
        elif one.operation in PASSED_ON:
            known[one.name] = given[0]
            body = re.search(r"body=%?([\w.-]+)", one.rest)
            if body is not None:
                inside = computations[body[1]]
                own = {i.name: given[0] for i in inside if i.operation == "parameter"}
                _walk(computations, body[1], own, reads)
        elif not _is_for_next_run(one, computations[name]):
            for path in given:
                if isinstance(path, str):
                    reads[path] += _share(one, computations[name])


def _is_for_next_run(one: Instruction, others: Sequence[Instruction]) -> bool:
    """Return whether this starts a copy whose result nothing in the program uses."""
    if one.operation != "copy-start":
        return False
    done = [other.name for other in others if one.name in other.operands]
    return not any(set(done) & set(other.operands) for other in others)


def _share(one: Instruction, others: Sequence[Instruction]) -> float:
    """Return the share of its first operand that an instruction reads: less than 1 for a slice."""
    limits = SLICE.search(one.rest) if one.operation in ("slice", "slice-start") else None
    if limits is None:
        return 1.0
    [operand] = [other for other in others if other.name == one.operands[0]]
    whole = SHAPE.search(operand.shape)
    assert whole is not None, "a value has a shape"
    taken = [
        (int(last) - int(first)) / int(step or 1)
        for first, last, step in re.findall(r"(\d+):(\d+)(?::(\d+))?", limits[1])
    ]
    return math.prod(taken) / math.prod(int(size) for size in whole[1].split(",") if size)


def compare_reads(
    compiler: KernelCompiler, target: str, model: Mapping[str, Any], num_tokens: int
) -> str:
    """Return a line for a target: weights read by a mixed step, and by a prefill and a
    decode step.
    """
    registry, shape = load_registry(), DecodeShape(num_pages=1025)
    mixed_shape = dataclasses.replace(shape, prefill_tokens=num_tokens)
    mixed = compile_decode_step(registry, model, compiler, target, shape=mixed_shape)
    decode = compile_decode_step(registry, model, compiler, target, shape=shape)
    one, other = layer_reads(mixed), layer_reads(decode)
    return (
        f"{target}: {len(one)} weights of layers; a mixed step reads each {_times(one)}, a decode "
        f"step {_times(other)}, so a prefill step plus a decode step read {_sum(one, other)} "
        f"against {_sum(one)}; cache {mixed.cache_bytes} bytes, "
        f"{mixed.compiled.figures['alias_bytes']} of the results reuse it, "
        f"working space {mixed.compiled.figures['temp_bytes']}"
    )


def layer_reads(report: StepReport) -> Mapping[str, float]:
    """Return the reads of layer weights only: embedding and head are read in parts, or by another
    program.
    """
    reads = count_reads(report.compiled.text)
    return {path: num for path, num in reads.items() if path.startswith("layers.")}


def _times(reads: Mapping[str, float]) -> str:
    names = {1.0: "once", 2.0: "twice"}
    counts = sorted({round(num, 2) for num in reads.values()})
    return " or ".join(names.get(num) or f"{num:g} times" for num in counts)


def _sum(*each: Mapping[str, float]) -> str:
    return f"{sum(sum(reads.values()) for reads in each):g}"


def main(target: str, config: str, num_tokens: str = "512") -> None:
    """Print the line of a target: v5e, v6e, sm_90, ..."""
    kernels = (entry.declaration for entry in load_registry().entries if entry.kind == "kernel")
    names = {
        one.capabilities["compiler"] for one in kernels if one and "compiler" in one.capabilities
    }
    compilers = [pkgutil.resolve_name(str(name)) for name in sorted(map(str, names))]
    able = {one: compiler for compiler in compilers for one in compiler.targets}
    if target not in able:
        raise unknown_name("target", target, able)
    model = json.loads(Path(config).read_text())
    print(compare_reads(able[target], target, model, int(num_tokens)))


if __name__ == "__main__":
    main(*sys.argv[1:])
