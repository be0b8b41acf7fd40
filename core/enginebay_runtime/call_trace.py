"""A trace of calls: which ops the steps of a run called, with which arguments. Its file is read by
the commands that repeat the calls with other kernels.

The file is an .npz archive: `header` is JSON, and `array_N` are arrays whose numbers were saved.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from enginebay.errors import InputError, UnsupportedError
from enginebay.folders import write_whole
from enginebay.ops.spec import AttnSpec, Bucket
from enginebay.regular_files import read_regular

FORMAT = 1
MAX_FILE_BYTES, MAX_BYTES = 1 << 30, 4 << 30
"""Max bytes of a file, and of its arrays when they are unpacked."""

OWN = "enginebay"


@dataclasses.dataclass(frozen=True)
class TracedArray:
    """An argument of a call: shape, name of the dtype, and the numbers if they were saved."""

    shape: tuple[int, ...]
    dtype: str
    values: np.ndarray | None = None


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
        cannot be saved.
        """
        arrays: list[np.ndarray] = []
        header = {
            "format": FORMAT,
            "run": dict(self.run),
            "layout": self.layout,
            "steps": [_encoded(step, arrays) for step in self.steps],
        }
        text = np.frombuffer(json.dumps(header).encode(), np.uint8)
        named: dict[str, Any] = {f"array_{n}": array for n, array in enumerate(arrays)}
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
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                header = json.loads(arrays["header"].tobytes())
                if header.get("format") != FORMAT:
                    raise ValueError(f"its format is {header.get('format')!r}, not {FORMAT}")
                steps = tuple(_decoded(step, arrays) for step in header["steps"])
            if not all(isinstance(step, TracedStep) for step in steps):
                raise ValueError("its steps are no TracedSteps")
            return CallTrace(dict(header["run"]), str(header["layout"]), steps)
        except (ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
            raise InputError(
                f"{path} is no trace of calls ({error})",
                f"a file of format {FORMAT} that --capture wrote",
                "Capture it again.",
            ) from error


def _encoded(value: Any, arrays: list[np.ndarray]) -> Any:
    """Return a value as JSON; arrays are appended to `arrays`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray):
        arrays.append(_plain(value))
        return {"array": len(arrays) - 1, "of": str(value.dtype)}
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


def _decoded(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays[f"array_{int(value['array'])}"].view(jnp.dtype(value["of"]))
    if "dtype" in value:
        return jnp.dtype(value["dtype"])
    if "tuple" in value:
        return tuple(_decoded(one, arrays) for one in value["tuple"])
    if "dict" in value:
        return {key: _decoded(one, arrays) for key, one in value["dict"].items()}
    fields = {name: _decoded(one, arrays) for name, one in value["fields"].items()}
    return _record(value["record"])(**fields)


def _record(name: str) -> type:
    """Return a dataclass by "module:name". A file does not get modules imported, besides those of
    enginebay.
    """
    module, _, attribute = name.partition(":")
    if module not in sys.modules and module.partition(".")[0].split("_")[0] == OWN:
        importlib.import_module(module)
    found = getattr(sys.modules.get(module), attribute, None)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ValueError(f"{name!r} is no dataclass of an imported module")
    return found


def _plain(array: np.ndarray) -> np.ndarray:
    """Return an array that NumPy can save: the numbers of another package's dtype as integers."""
    own = array.dtype.kind in "biuf"
    return array if own else array.view(f"u{array.dtype.itemsize}")
