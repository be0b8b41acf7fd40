"""Serialised models: a description in JSON, and the weights as the engine uses them in safetensors.

    NAME.asgraph     JSON: configuration, special tokens, dtype, and each weight's arrays
    NAME.asparam     safetensors: the arrays of the weights, fused and quantised already
    NAME.tokenizer/  the files of the tokenizer and generation_config.json

So a serialised model is loaded without any conversion. The crc32 of each array is in the
description; `verify` compares it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from enginebay.contracts.model import Checkpoint, Model, TokenInfo
from enginebay.errors import CheckpointError, InputError, shown
from enginebay.json_text import parse_json
from enginebay.weights import QuantizedArray, StoredArray, Weight, WeightFormat, WeightSpec
from enginebay_dashinfer.runtime_config import GRAPH_SUFFIX, PARAM_SUFFIX
from enginebay_models.safetensors_file import read_file

FORMAT = "enginebay serialised model"
FORMAT_VERSION = 1
TOKENIZER_FOLDER = ".tokenizer"
NOT_COPIED = (".safetensors", ".bin", ".gguf", ".pt", ".index.json")
"""Suffixes of files of a checkpoint's folder that are not copied: they hold weights."""

DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of a serialised model, besides those of quantised weights."""

PARTS = ("values", "scales", "zero_points")
"""The arrays of a quantised weight."""

ALIGNMENT = 64
PIECE_BYTES = 32 << 20
AGAIN = "Serialise the model again."

WeightPlace = Callable[[str, WeightSpec], Sharding | None]
BytesProgress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    """What NAME.asgraph says. `arrays`: name of an array -> its dtype, shape and crc32; the arrays
    of a quantised weight have names such as "PATH:values". `quantized`: path of a quantised weight
    -> its method, and how its inputs are rounded. `num_bytes`: size of NAME.asparam.
    """

    config: dict[str, Any]
    architecture: str
    dtype: str
    quantization: str
    token_info: dict[str, Any]
    sampling_defaults: dict[str, Any]
    arrays: dict[str, dict[str, Any]]
    quantized: dict[str, list[str]]
    num_bytes: int
    enginebay: str
    format: str = FORMAT
    format_version: int = FORMAT_VERSION


@dataclasses.dataclass(frozen=True, slots=True)
class AsFileInfo:
    """The versions of enginebay that wrote the files of a serialised model, and of this one."""

    create_version_graph: str
    create_version_param: str
    current_version_engine: str


class StoredModel:
    """A serialised model, opened: a Checkpoint whose weights need no conversion.

    CheckpointError for a file that is missing, damaged, or of another format.
    """

    def __init__(self, graph: str | Path, param: str | Path) -> None:
        self.graph, self.param = Path(graph), Path(param)
        self.description = read_description(self.graph)
        found = self.param.stat().st_size if self.param.is_file() else None
        if found != self.description.num_bytes:
            size = "is missing" if found is None else f"has {found} bytes"
            allowed = f"a file of {self.description.num_bytes} bytes, as {self.graph.name} says"
            raise CheckpointError(f"{self.param} {size}", allowed, AGAIN)
        self.folder = self.graph.with_suffix(TOKENIZER_FOLDER)
        self.config: Mapping[str, Any] = self.description.config
        self.architecture = self.description.architecture
        tokens = dict(self.description.token_info)
        self.token_info = TokenInfo(
            tuple(tokens["eos_token_ids"]), tokens["bos_token_id"], tokens["pad_token_id"]
        )
        self.sampling_defaults: Mapping[str, Any] = self.description.sampling_defaults
        self.quantization = self.description.quantization

    def quantized_weights(self, model: Model) -> Mapping[str, QuantizedArray]:
        """Return the StoredArrays of the quantised weights of `model`, by path."""
        known, found = self.description.arrays, {}
        for path, spec in model.weight_specs().items():
            if path not in self.description.quantized:
                continue
            parts = {}
            for part in PARTS:
                if (facts := known.get(f"{path}:{part}")) is not None:
                    shape = tuple(facts["shape"])
                    own = WeightSpec(shape, (*spec.axes[: len(shape) - 1], None))
                    array = spec if part == "values" else own
                    parts[part] = StoredArray(array, facts["dtype"])
            method, activations = self.description.quantized[path]
            zero_points = parts.get("zero_points")
            found[path] = QuantizedArray(
                parts["values"], parts["scales"], zero_points, method, activations
            )
        return found

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the arrays that a CPU uses as they lie in the file: all but those of 4 bits."""
        whole = (one for one in self.description.arrays.values() if not is_nibbles(one["dtype"]))
        return sum(math.prod(one["shape"]) * jnp.dtype(one["dtype"]).itemsize for one in whole)

    def versions(self) -> AsFileInfo:
        """Return the versions that wrote the files."""
        written = self.description.enginebay
        return AsFileInfo(written, written, importlib.metadata.version("enginebay"))

    @property
    def num_token_ids(self) -> int | None:
        """Return the number of ids in the files of the tokenizer."""
        from enginebay_models.token_count import count_token_ids

        return count_token_ids(self.folder)

    def load_tokenizer(self) -> Any:
        """Load the tokenizer of the folder."""
        from enginebay_models.tokenizer import load_tokenizer

        return load_tokenizer(self.folder)

    def load_weights(
        self,
        model: Model,
        *,
        form: WeightFormat,
        place: WeightPlace,
        verify: bool = False,
        progress: BytesProgress | None = None,
    ) -> dict[str, Weight]:
        """Load every weight of `model`. A CPU uses the arrays where the file is mapped into memory.
        CheckpointError for a model or a format of weights that the files were not made for.
        """
        stored = read_file(self.param)
        specs, sources = model.weight_specs(), model.tensor_sources()
        made = {path: spec for path, spec in specs.items() if not sources[path].names}
        arrays = {path: form.stored(path, spec) for path, spec in specs.items() if path not in made}
        self._check({name: one for path in arrays for name, one in named(path, arrays[path])})
        done = 0
        weights: dict[str, Weight] = {}
        for path, empty in made.items():  # such as places for adapters
            whole = sources[path].build([], tuple(slice(0, size) for size in empty.shape))
            weights[path] = jax.device_put(
                whole.astype(empty.dtype or form.dtype), place(path, empty)
            )
        for path, spec in arrays.items():
            parts: dict[str, Any] = {}
            for name, one in named(path, spec):
                values = self._read(name, stored[name].raw(), verify=verify)
                parts[name] = jax.block_until_ready(jax.device_put(values, place(path, one.spec)))
                stored[name].forget()
                done += values.nbytes
                if progress is not None:
                    progress(done, self.description.num_bytes)
            weights[path] = reassembled(path, spec, parts)
        return weights

    def _check(self, wanted: Mapping[str, StoredArray]) -> None:
        known = self.description.arrays
        for name in {**wanted, **known}:
            here = [wanted[name].dtype, list(wanted[name].spec.shape)] if name in wanted else None
            there = [known[name]["dtype"], known[name]["shape"]] if name in known else None
            if here != there:
                raise CheckpointError(
                    f"{shown(name)} of {self.param.name} is {there} where the model has {here}",
                    "a model that was serialised for this dtype, quantisation and one device",
                    "Serialise it again with these settings.",
                )

    def _read(self, name: str, raw: np.ndarray, *, verify: bool) -> np.ndarray:
        facts = self.description.arrays[name]
        if verify and zlib.crc32(raw) != facts["crc32"]:
            given = f"array {shown(name)} of {self.param.name}, whose checksum differs"
            raise CheckpointError(given, "the file as it was written", AGAIN)
        return unpacked(raw, facts["dtype"], tuple(facts["shape"]))


def read_description(graph: Path) -> Description:
    """Read NAME.asgraph. CheckpointError for a file that no serialisation of this version wrote."""
    allowed = f"a description that serialize_to_path() wrote (format {FORMAT_VERSION})"
    try:
        plain = parse_json(graph.read_bytes())
        description = Description(**plain)
        for facts in description.arrays.values():
            jnp.dtype(facts["dtype"]), tuple(facts["shape"]), int(facts["crc32"])
        if description.dtype not in DTYPES:
            raise ValueError(description.dtype)
    except OSError as error:
        raise CheckpointError(f"{graph}: {error.strerror}", allowed, "Check model_dir().") from None
    except (InputError, TypeError, KeyError, ValueError, AttributeError):
        raise CheckpointError(f"{graph} cannot be read", allowed, AGAIN) from None
    if (description.format, description.format_version) != (FORMAT, FORMAT_VERSION):
        given = f"{graph} of format {shown(description.format)} {description.format_version}"
        raise CheckpointError(given, allowed, AGAIN)
    return description


def write_model(
    checkpoint: Checkpoint,
    weights: Mapping[str, Weight],
    form: WeightFormat,
    prefix: Path,
) -> tuple[Path, Path]:
    """Write a model as NAME.asgraph, NAME.asparam and NAME.tokenizer beside `prefix`, and return
    the paths of the first two. `weights` are whole, on one device.

    The description is written last, so that an interrupted call leaves no model that opens. Files
    with the same names are replaced, not changed: a model that was loaded from them goes on.
    """
    graph, param = Path(f"{prefix}{GRAPH_SUFFIX}"), Path(f"{prefix}{PARAM_SUFFIX}")
    graph.parent.mkdir(parents=True, exist_ok=True)
    graph.unlink(missing_ok=True)
    listed = [pair for path, weight in weights.items() for pair in named(path, weight)]
    # Arrays whose sizes keep the next one aligned come first.
    listed.sort(key=lambda pair: packed_bytes(pair[1]) % ALIGNMENT != 0)
    unfinished = param.with_name(f"{param.name}.unfinished")
    arrays = _write_arrays(unfinished, dict(listed))
    unfinished.replace(param)
    folder = graph.with_suffix(TOKENIZER_FOLDER)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in checkpoint.folder.iterdir():
        if file.is_file() and not file.name.endswith(NOT_COPIED):
            shutil.copyfile(file, folder / file.name)
    description = Description(
        config=dict(checkpoint.config),
        architecture=checkpoint.architecture,
        dtype=form.dtype,
        quantization=form.name,
        token_info=dataclasses.asdict(checkpoint.token_info),
        sampling_defaults=dict(checkpoint.sampling_defaults),
        arrays=arrays,
        quantized={path: [one.method, one.activations] for path, one in form.quantized.items()},
        num_bytes=param.stat().st_size,
        enginebay=importlib.metadata.version("enginebay"),
    )
    text = json.dumps(dataclasses.asdict(description), indent=1)
    graph.write_text(text, encoding="utf-8")
    return graph, param


def _write_arrays(param: Path, arrays: Mapping[str, jax.Array]) -> dict[str, dict[str, Any]]:
    """Write the arrays as a safetensors file of bytes; returns dtype, shape and crc32 of each."""
    facts: dict[str, dict[str, Any]] = {}
    header: dict[str, Any] = {}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + packed_bytes(array)
        header[name] = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with param.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, array in arrays.items():
            crc = 0
            for piece in pieces(array):
                crc = zlib.crc32(piece, crc)
                file.write(piece)
            facts[name] = {"dtype": str(array.dtype), "shape": list(array.shape), "crc32": crc}
    return facts


def named(path: str, weight: Any) -> list[tuple[str, Any]]:
    """Return the arrays of a weight (or of its plan) with their names."""
    if not isinstance(weight, QuantizedArray):
        return [(path, weight)]
    each = zip(PARTS, (weight.values, weight.scales, weight.zero_points), strict=True)
    return [(f"{path}:{part}", one) for part, one in each if one is not None]


def reassembled(path: str, plan: Any, parts: Mapping[str, Any]) -> Weight:
    """Return the weight that `named` took apart."""
    if not isinstance(plan, QuantizedArray):
        return parts[path]
    values, scales = parts[f"{path}:values"], parts[f"{path}:scales"]
    zero_points = parts.get(f"{path}:zero_points")
    return dataclasses.replace(plan, values=values, scales=scales, zero_points=zero_points)


def is_nibbles(dtype: Any) -> bool:
    """Whether two values of this dtype lie in one byte."""
    return bool(jax.dtypes.itemsize_bits(jnp.dtype(dtype)) == 4)


def packed_bytes(array: jax.Array) -> int:
    """Return the bytes of an array in the file."""
    return -(-array.size // 2) if is_nibbles(array.dtype) else array.size * array.dtype.itemsize


def pieces(array: jax.Array) -> Iterator[np.ndarray]:
    """Yield the bytes of an array in row-major order. Of two 4-bit values the first is in the low
    half of their byte.
    """
    flat = np.asarray(array).reshape(-1)
    step = PIECE_BYTES // max(flat.dtype.itemsize, 1)
    for start in range(0, flat.size, step):
        part = flat[start : start + step]
        if not is_nibbles(array.dtype):
            yield part.view(np.uint8)
            continue
        nibbles = part.astype(np.int8).view(np.uint8) & 0xF
        padded = np.append(nibbles, np.uint8(0)) if nibbles.size % 2 else nibbles
        yield padded[0::2] | padded[1::2] << 4


def unpacked(raw: np.ndarray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the array whose bytes `pieces` made."""
    if not is_nibbles(dtype):
        return raw.view(jnp.dtype(dtype)).reshape(shape)
    nibbles = np.stack([raw & 0xF, raw >> 4], axis=-1).reshape(-1)[: int(np.prod(shape))]
    if jnp.issubdtype(jnp.dtype(dtype), jnp.signedinteger):
        nibbles = (nibbles ^ 8).astype(np.int8) - 8
    return nibbles.astype(jnp.dtype(dtype)).reshape(shape)
