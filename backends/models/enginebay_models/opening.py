"""Opens a stored model by the kind of its file: a GGUF file, or a Hugging Face checkpoint."""

from __future__ import annotations

from pathlib import Path

from enginebay_models.gguf.header import is_gguf
from enginebay_models.gguf.source import GgufSource
from enginebay_models.source import CheckpointSource


def open_stored_model(name_or_path: str) -> GgufSource | CheckpointSource:
    """Open "demo", a folder, a hub id, or a GGUF file. CheckpointError when it cannot be used."""
    try:
        path = Path(name_or_path).expanduser()
        found = is_gguf(path)
    except (OSError, ValueError, RuntimeError):  # no path; the other source says why
        found = False
    if found:
        return GgufSource(name_or_path)
    return CheckpointSource(name_or_path)
