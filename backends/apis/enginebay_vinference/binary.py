"""Trees of arrays as safetensors files. Use them for states whose caches are too large for JSON.

A file has one tensor of bytes for each array. The file's metadata holds the format, the tree with a
checksum of each array, and a checksum of the tree. Reading a file therefore detects a flipped bit
anywhere in it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import save_file

from enginebay.errors import InputError, shown_text
from enginebay.json_text import parse_json
from enginebay_shared.stored import Storage

FORMAT = "enginebay.tree.2"
WITHOUT_CHECKSUMS = "enginebay.tree.1"
"""The format of older versions. It is refused, because damage in such a file cannot be detected."""


def write_binary(path: Path, fields: Mapping[str, Any], storage: Storage) -> None:
    """Write a mapping of trees. The file appears only when it is complete."""
    tensors: dict[str, np.ndarray] = {}

    def keep(array: np.ndarray) -> dict[str, Any]:
        name = f"{len(tensors):05d}"
        tensors[name] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        return {"tensor": name}

    tree = json.dumps(
        {name: storage.to_plain(value, keep) for name, value in fields.items()}, allow_nan=False
    )
    part = path.with_name(path.name + ".part")
    metadata = {"format": FORMAT, "tree": tree, "crc32": str(zlib.crc32(tree.encode()))}
    save_file(tensors, part, metadata=metadata)
    part.replace(path)


def read_binary(path: Path, storage: Storage) -> dict[str, Any]:
    """Return the mapping that write_binary() wrote.

    InputError for a file that is missing, damaged or of another kind.
    """
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            _check_format(path, metadata.get("format"))
            if str(zlib.crc32(metadata["tree"].encode())) != metadata["crc32"]:
                raise _damaged(path, "the checksum of its header does not match")
            plain = parse_json(metadata["tree"])

            def load(head: Mapping[str, Any]) -> bytes:
                return file.get_tensor(head["tensor"]).tobytes()

            return {name: storage.from_plain(value, load) for name, value in plain.items()}
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (OSError, safetensors.SafetensorError, *_MALFORMED) as error:
        raise _damaged(path, f"{type(error).__name__}: {shown_text(str(error))}") from error


_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def _check_format(path: Path, found: str | None) -> None:
    if found == WITHOUT_CHECKSUMS:
        raise InputError(
            "a state saved by an older version, without checksums",
            f"a file of format {FORMAT}",
            "Generate the state again and save it with this version.",
        )
    if found != FORMAT:
        raise InputError(
            "a file of another kind", "a file that SampleState.save() wrote", "Pass its path."
        )


def _damaged(path: Path, why: str) -> InputError:
    return InputError(
        f"{path} cannot be read ({why})",
        "a complete, unchanged file that SampleState.save() wrote",
        "Use another copy, or save the state again.",
    )
