"""Trees of arrays as safetensors files: for states of real sizes, whose caches are too large for JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import save_file

from enginebay.errors import InputError, explain
from enginebay_vinference.plain import from_plain, to_plain

FORMAT = "enginebay.tree.1"


def write_binary(path: Path, fields: Mapping[str, Any]) -> None:
    """Write a mapping of trees; the file appears whole or not at all."""
    tensors: dict[str, np.ndarray] = {}

    def keep(array: np.ndarray) -> dict[str, Any]:
        name = f"{len(tensors):05d}"
        tensors[name] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        return {"tensor": name}

    tree = json.dumps({name: to_plain(value, keep) for name, value in fields.items()}, allow_nan=False)
    part = path.with_name(path.name + ".part")
    save_file(tensors, part, metadata={"format": FORMAT, "tree": tree})
    part.replace(path)


def read_binary(path: Path) -> dict[str, Any]:
    """The mapping that write_binary() wrote; InputError when the file is missing, cut short or another one."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise InputError(
                    explain(
                        f"{path}, a file of another kind",
                        "one that a state was saved to",
                        "Correct the path.",
                    )
                )
            plain = json.loads(metadata["tree"])
            return {
                name: from_plain(value, lambda head: file.get_tensor(head["tensor"]).tobytes())
                for name, value in plain.items()
            }
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(
            explain(
                f"{path} cannot be read ({error})", "a file that a state was saved to", "Was it cut short?"
            )
        ) from error
