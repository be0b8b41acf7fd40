"""The small models of the tests, each written once to the checkout's cache.

BRIEF is the first layers of the demo model, with its tokenizer: text, chats, stop texts. Greedily it repeats one token; LATE, the
last layers, does not, so that a wrong cache changes its tokens. TINY has random weights and 96 words: it compiles fastest, and
does not repeat itself either. Tests that name the same model, engine and sizes share compiled programs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

from safetensors.numpy import load_file, save_file

from enginebay.registry import load_registry
from enginebay.testing.tiny import write_tiny_checkpoint

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "backends" / "enginebay_models" / "demo"
MODELS = ROOT / ".cache" / "models"
FIRST, LAST = (0, 1), (4, 5)


def _make(folder: Path, layers: tuple[int, ...]) -> None:
    """The demo model without its other layers, in a new folder."""
    layer = re.compile(r"model\.layers\.(\d+)\.")
    kept = {}
    for name, tensor in load_file(DEMO / "model.safetensors").items():
        at = layer.match(name)
        if at is None:
            kept[name] = tensor
        elif int(at[1]) in layers:
            kept[f"model.layers.{layers.index(int(at[1]))}.{name[at.end() :]}"] = tensor
    for file in DEMO.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    config = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": len(layers)}))
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def _keep(made: Path, name: str) -> str:
    """Move a folder to its name in the cache, unless another process was first."""
    folder = made.parent / name
    try:
        made.rename(folder)
    except OSError:
        shutil.rmtree(made)
    return os.fspath(folder)


def _find_some(kind: str, layers: tuple[int, ...]) -> str:
    """The folder, made by whichever process comes first; its name follows from the demo model's content."""
    digest = hashlib.sha256((DEMO / "model.safetensors").read_bytes()).hexdigest()[:12]
    name = f"{kind}-{len(layers)}-{digest}"
    if (MODELS / name).exists():
        return os.fspath(MODELS / name)
    made = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=MODELS))
    _make(made, layers)
    return _keep(made, name)


def _find_tiny() -> str:
    """The folder; its name follows from its own content, so that a changed generator makes another one."""
    made = write_tiny_checkpoint(Path(tempfile.mkdtemp(prefix="tiny-", dir=MODELS)), load_registry())
    content = b"".join(file.read_bytes() for file in sorted(made.iterdir()))
    return _keep(made, f"tiny-{hashlib.sha256(content).hexdigest()[:12]}")


MODELS.mkdir(parents=True, exist_ok=True)
BRIEF = _find_some("brief", FIRST)
LEAST = _find_some("least", FIRST[:1])
LATE = _find_some("late", LAST)
TINY = _find_tiny()
