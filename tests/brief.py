"""The first layers of the demo model, for tests of all that serves a model: a third of it compiles in a third of the time."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "backends" / "enginebay_models" / "demo"
NUM_LAYERS = 2


def _make(folder: Path) -> None:
    """The demo model without its later layers, in a new folder."""
    layer = re.compile(r"model\.layers\.(\d+)\.")
    tensors = load_file(DEMO / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if (at := layer.match(n)) is None or int(at[1]) < NUM_LAYERS}
    for file in DEMO.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    config = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": NUM_LAYERS}))
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def _find() -> str:
    """The folder, made by whichever process comes first; its name follows from the demo model's content."""
    digest = hashlib.sha256((DEMO / "model.safetensors").read_bytes()).hexdigest()[:12]
    folder = ROOT / ".cache" / "models" / f"brief-{NUM_LAYERS}-{digest}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="brief-", dir=folder.parent))
        _make(made)
        try:
            made.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(made)
    return os.fspath(folder)


BRIEF = _find()
