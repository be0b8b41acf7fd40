"""Reads single values of a GGUF file's metadata and checks their types; errors name the key."""

from __future__ import annotations

from typing import Any

import numpy as np

from enginebay.errors import CheckpointError, shown
from enginebay_models.fields import MAX_SIZE, is_number
from enginebay_models.gguf.header import GgufFile


class Metadata:
    """The metadata of a file. A key that begins with "." has the architecture before it:
    ".block_count" of a llama is "llama.block_count".

    Every method raises CheckpointError for a value of a wrong type, and for a key that is absent
    when `default` is None and the method does not return None.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._values = file.metadata
        self.architecture = ""
        self.architecture = self.text("general.architecture")

    def key(self, name: str) -> str:
        """Return the whole key."""
        return f"{self.architecture}{name}" if name.startswith(".") else name

    def get(self, name: str) -> Any:
        """Return a value as the file has it, or None."""
        return self._values.get(self.key(name))

    def text(self, name: str, default: str | None = None) -> str:
        """Return a text."""
        value = self._given(name, default)
        if not isinstance(value, str):
            raise self.refused(name, "a text")
        return value

    def whole(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return an integer from `least` to MAX_SIZE. A key with one number per layer is read if
        all of them are equal.
        """
        value = self._given(name, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_SIZE:
            raise self.refused(name, f"a whole number from {least} up, the same for all layers")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self._given(name, default)
        if not is_number(value) or value <= 0:
            raise self.refused(name, "a positive number")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self._given(name, default)
        if not isinstance(value, bool):
            raise self.refused(name, "true or false")
        return value

    def texts(self, name: str) -> list[str]:
        """Return a list of texts."""
        value = self._given(name, None)
        if not isinstance(value, list):
            raise self.refused(name, "a list of texts")
        return value

    def numbers(self, name: str, count: int) -> np.ndarray | None:
        """Return an array of at least `count` finite numbers, cut to it; None when it is absent."""
        value = self.get(name)
        if value is None:
            return None
        if (
            not isinstance(value, np.ndarray)
            or value.size < count
            or not np.isfinite(value.astype(np.float64)).all()
        ):
            raise self.refused(name, f"{count} numbers")
        return value[:count]

    def refused(self, name: str, allowed: str) -> CheckpointError:
        """Return the error for the value of a key."""
        key, value = self.key(name), self.get(name)
        what = f"no {key}" if value is None else f"{key} = {shown(value)}"
        return CheckpointError(
            f"{self._file.path} has {what}", allowed, "Choose another file, or convert it anew."
        )

    def _given(self, name: str, default: Any) -> Any:
        value = self.get(name)
        return default if value is None else value
