"""A trace of calls: which ops the steps of a run called, with which arguments. Its file is read by
the commands that repeat the calls with other kernels.

The file is an .npz archive: `header` is JSON, and `array_N` are arrays whose numbers were saved.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import io
import json
import math
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from enginebay.errors import InputError, UnsupportedError, error_line
from enginebay.folders import write_whole
from enginebay.ops.spec import AttnSpec, Bucket
from enginebay.regular_files import read_regular

FORMAT = 1
MAX_FILE_BYTES, MAX_BYTES = 1 << 30, 4 << 30
"""Max bytes of a file, and of its arrays when they are unpacked."""

OWN = ("enginebay.ops.", "enginebay.weights", "enginebay_runtime.call_trace")
"""Modules with records of calls, which are imported for a file; others must be imported already."""

MAX_TOKENS = 1 << 26
"""Max tokens of a cache, and of a step."""


@dataclasses.dataclass(frozen=True)
class TracedArray:
    """An argument of a call: shape, name of the dtype, and the numbers if they were saved.
    ValueError for a shape of more than MAX_BYTES.
    """

    shape: tuple[int, ...]
    dtype: str
    values: np.ndarray | None = None

    def __post_init__(self) -> None:
        num_bytes = math.prod(self.shape) * jnp.dtype(self.dtype).itemsize
        if not 0 <= num_bytes <= MAX_BYTES:
            raise ValueError(f"an array of {num_bytes} bytes, at most {MAX_BYTES}")


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """`num_calls` calls of an op in a step with equal arguments, in which TracedArrays stand for
    arrays. `kernel`: the implementation that ran.
    """

    op: str
    kernel: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    num_calls: int


@dataclasses.dataclass(frozen=True)
class TracedAttention:
    """`num_calls` calls of attention by layers of one cache group, whose cache has `num_pages`
    pages of `page_size` tokens. The rows and the page tables are those of the step.
    """

    group: str
    kernel: str
    spec: AttnSpec
    num_pages: int
    page_size: int
    num_calls: int


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """One step of a run, the `number`-th one. `q_lens`, `kv_lens` int32 [S] and the page `tables`
    int32 [S, P] by cache group are those of the bucket, with 0 on padding.
    """

    number: int
    bucket: Bucket
    q_lens: np.ndarray
    kv_lens: np.ndarray
    tables: Mapping[str, np.ndarray]
    attention: tuple[TracedAttention, ...]
    calls: tuple[TracedCall, ...]

    @property
    def name(self) -> str:
        """The number, the mode and the size, such as "step 12, decode, 8 rows"."""
        rows = int((np.asarray(self.kv_lens) > 0).sum())
        tokens = "" if self.bucket.mode == "decode" else f", {int(self.q_lens.sum())} tokens"
        return f"step {self.number}, {self.bucket.mode}, {rows} row{'s' * (rows != 1)}{tokens}"


@dataclasses.dataclass(frozen=True)
class CallTrace:
    """The steps of a run that were captured. `run` tells of model, engine, device and versions;
    `layout` is the name of the cache's layout.
    """

    run: Mapping[str, str]
    layout: str
    steps: tuple[TracedStep, ...]

    def write(self, path: Path) -> None:
        """Write the file, which is there whole or not at all. UnsupportedError for an argument that
        cannot be saved, and for more than MAX_BYTES.
        """
        arrays: dict[bytes, np.ndarray] = {}
        header = {
            "format": FORMAT,
            "run": dict(self.run),
            "layout": self.layout,
            "steps": [_encoded(step, arrays) for step in self.steps],
        }
        if sum(array.nbytes for array in arrays.values()) > MAX_BYTES:
            raise UnsupportedError(
                f"a trace of more than {MAX_BYTES} bytes",
                "fewer numbers",
                "Set capture.ops and capture.max_steps, or leave capture.values out.",
            )
        text = np.frombuffer(json.dumps(header).encode(), np.uint8)
        named: dict[str, Any] = {f"array_{n}": array for n, array in enumerate(arrays.values())}
        file = io.BytesIO()
        np.savez_compressed(file, header=text, **named)
        write_whole(path, file.getvalue())

    @staticmethod
    def read(path: Path) -> CallTrace:
        """Read a file. InputError for one that is no trace, is damaged or too large, or has records
        of packages that are not imported.
        """
        data = read_regular(path, MAX_FILE_BYTES)
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                unpacked = sum(one.file_size for one in archive.infolist())
            if unpacked > MAX_BYTES:
                raise ValueError(f"its arrays have {unpacked} bytes, at most {MAX_BYTES} are read")
            with np.load(io.BytesIO(data), allow_pickle=False) as found:
                arrays = functools.cache(found.__getitem__)
                header = json.loads(arrays("header").tobytes())
                if header.get("format") != FORMAT:
                    raise ValueError(f"its format is {header.get('format')!r}, not {FORMAT}")
                steps = tuple(_decoded(step, arrays) for step in header["steps"])
            for step in steps:
                _check_step(step)
            return CallTrace(dict(header["run"]), str(header["layout"]), steps)
        except Exception as error:  # whatever a damaged archive, header or record raises
            raise InputError(
                f"{path} is no trace of calls ({error_line(error)})",
                f"a file of format {FORMAT} that --capture wrote",
                "Capture it again.",
            ) from error


def _check_step(step: Any) -> None:
    """Raise ValueError for a step whose fields do not fit together."""
    if not isinstance(step, TracedStep):
        raise TypeError("its steps are no TracedSteps")
    bucket, rows = step.bucket, (step.q_lens, step.kv_lens)
    kinds = (bucket, Bucket), (step.tables, dict), (step.attention, tuple), (step.calls, tuple)
    if not all(isinstance(value, kind) for value, kind in (*kinds, (step.number, int))):
        raise ValueError("a step has fields of other types")
    sizes = dataclasses.replace(bucket, mode="mixed", rows_are_pages=False)
    for size in dataclasses.astuple(sizes):
        if type(size) not in (int, str, bool) or (type(size) is int and not 0 < size <= MAX_TOKENS):
            raise ValueError(f"a bucket has the size {size!r}")
    for lens in rows:
        is_array = isinstance(lens, np.ndarray) and lens.dtype == np.int32
        if not is_array or lens.shape != (bucket.seqs,):
            raise ValueError("lengths are no int32 of each row")
    if bool((step.kv_lens > bucket.max_kv_len).any() or (step.kv_lens < 0).any()):
        raise ValueError("a row is longer than its bucket")
    live = step.kv_lens > 0
    q_lens = np.where(live, step.q_lens, 0)
    if bool((q_lens < 0).any() or (q_lens > step.kv_lens).any()) or q_lens.sum() > bucket.tokens:
        raise ValueError("rows have more new tokens than there are")
    for one in step.attention:
        _check_attention(one, step)
    for call in step.calls:
        is_call = isinstance(call, TracedCall) and isinstance(call.op, str)
        if not is_call or not isinstance(call.arguments, tuple) or type(call.keywords) is not dict:
            raise ValueError("a call has fields of other types")


def _check_attention(one: Any, step: TracedStep) -> None:
    if not isinstance(one, TracedAttention) or not isinstance(one.spec, AttnSpec):
        raise TypeError("attention has fields of other types")
    table, size = step.tables[one.group], one.page_size
    if type(size) is not int or type(one.num_pages) is not int or size < 1 or one.num_pages < 1:
        raise ValueError("a cache has no pages")
    if size * one.num_pages > MAX_TOKENS:
        raise ValueError(f"a cache has {size * one.num_pages} tokens, at most {MAX_TOKENS}")
    if not isinstance(table, np.ndarray) or table.dtype != np.int32 or table.ndim != 2:
        raise ValueError("a page table is no int32 [S, P]")
    is_short = table.shape[1] * size < int(step.kv_lens.max(initial=0))
    if (
        is_short
        or len(table) != step.bucket.seqs
        or not ((table >= 0) & (table < one.num_pages)).all()
    ):
        raise ValueError("a page table does not fit the cache")


def _encoded(value: Any, arrays: dict[bytes, np.ndarray]) -> Any:
    """Return a value as JSON; each different array is added to `arrays`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray):
        plain = _plain(value)
        digest = hashlib.sha256(
            repr((plain.shape, plain.dtype)).encode() + plain.tobytes()
        ).digest()
        number = [*arrays].index(digest) if digest in arrays else len(arrays)
        arrays.setdefault(digest, plain)
        return {"array": number, "of": str(value.dtype)}
    if isinstance(value, np.dtype | type | type(jnp.float32)):
        return {"dtype": str(jnp.dtype(value))}
    if isinstance(value, tuple):
        return {"tuple": [_encoded(one, arrays) for one in value]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _encoded(one, arrays) for key, one in value.items()}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return {
            "record": f"{kind.__module__}:{kind.__qualname__}",
            "fields": {name: _encoded(getattr(value, name), arrays) for name in fields},
        }
    raise UnsupportedError(
        f"an argument of type {type(value).__name__} in a trace",
        "numbers, texts, dtypes, tuples, mappings, dataclasses and arrays",
        "Leave its op out of capture.ops.",
    )


def _decoded(value: Any, arrays: Callable[[str], np.ndarray]) -> Any:
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays(f"array_{int(value['array'])}").view(jnp.dtype(value["of"]))
    if "dtype" in value:
        return jnp.dtype(value["dtype"])
    if "tuple" in value:
        return tuple(_decoded(one, arrays) for one in value["tuple"])
    if "dict" in value:
        return {key: _decoded(one, arrays) for key, one in value["dict"].items()}
    fields = {name: _decoded(one, arrays) for name, one in value["fields"].items()}
    return _record(value["record"])(**fields)


def _record(name: str) -> type:
    """Return a dataclass by "module:name"."""
    module, _, attribute = name.partition(":")
    if module not in sys.modules and module.startswith(OWN):
        importlib.import_module(module)
    found = getattr(sys.modules.get(module), attribute, None)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ValueError(f"{name!r} is no dataclass of an imported module")
    return found


def _plain(array: np.ndarray) -> np.ndarray:
    """Return an array that NumPy can save: the numbers of another package's dtype as integers."""
    own = array.dtype.kind in "biuf"
    return array if own else array.view(f"u{array.dtype.itemsize}")
