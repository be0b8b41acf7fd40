"""The state of a process that a kernel must leave as it is: JAX's configuration, the environment,
the functions and constants that judge and time a kernel, random states, and processors.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

WATCHED = (
    *("builtins", "time", "random", "gc", "threading", "os", "ctypes"),
    *("numpy", "numpy.random", "numpy.linalg", "numpy.testing"),
    *("jax", "jax.numpy", "jax.lax", "jax.nn", "jax.random", "jax.tree"),
)
"""Modules whose attributes may not be replaced. Attributes that an import adds are no change."""

OWN_PACKAGES = ("enginebay", "enginebay_testing", "enginebay_bench", "enginebay_xla")
"""Packages whose attributes, methods and constants may not be replaced either."""

_MISSING = object()


@dataclasses.dataclass(frozen=True)
class _Place:
    """One value: how a change is named, its token, and the function that sets it back, if any.
    Tokens of two times are compared by identity and then by equality.
    """

    change: str
    token: Any
    put_back: Callable[[], None] | None = None


@dataclasses.dataclass(frozen=True)
class ProcessState:
    """What `now` found, by name."""

    places: dict[str, _Place]

    @classmethod
    def now(cls) -> ProcessState:
        """Return the state of this process."""
        found = (*_config(), *_environment(), *_modules(), *_settings())
        return cls({place.change: place for place in found})

    def changes(self) -> list[str]:
        """Return what differs now, such as "changes jax.config.jax_enable_x64"; what was added
        since counts for the environment only.
        """
        after = ProcessState.now().places
        texts = [
            change
            for change, place in self.places.items()
            if not _is_same(place.token, after[change].token if change in after else _MISSING)
        ]
        return texts + [c for c in after if c.startswith(_VARIABLE) and c not in self.places]

    def restore(self) -> None:
        """Set back what differs and can be set back."""
        for change in self.changes():
            place = self.places.get(change)
            if place is None:
                os.environ.pop(change.removeprefix(_VARIABLE), None)
            elif place.put_back is not None:
                place.put_back()

    def undoing(self, earlier: ProcessState, later: ProcessState) -> ProcessState:
        """Return this state, but with what changed between two others as it was in the earlier."""
        places = dict(self.places)
        for change in {**earlier.places, **later.places}:
            old, new = earlier.places.get(change), later.places.get(change)
            if old is None and change.startswith(_VARIABLE):
                places.pop(change, None)
            elif old is not None and not _is_same(old.token, new.token if new else _MISSING):
                places[change] = old
        return ProcessState(places)


class OwnChanges:
    """What changed in a process while one part was listed or checked, which also checks others."""

    def __init__(self, loading: tuple[ProcessState, ProcessState]) -> None:
        """`loading`: the states before and after all plugins were loaded, which counts for all."""
        self._spans = [loading]
        self._since: ProcessState | None = None

    def begin(self) -> None:
        """Note that the part's turn begins."""
        self._since = ProcessState.now()

    def end(self) -> None:
        """Note that the part's turn ends, and another's begins."""
        if self._since is not None:
            self._spans.append((self._since, ProcessState.now()))
            self._since = None

    def before(self) -> ProcessState:
        """Return the present state without what changed in the part's turns."""
        state = now = ProcessState.now()
        spans = [*self._spans, *([] if self._since is None else [(self._since, now)])]
        for earlier, later in reversed(spans):
            state = state.undoing(earlier, later)
        return state


_VARIABLE = "changes the environment variable "
_OF_JAX = ("MOSAIC_GPU_CUDA_ROOT",)
"""Variables that an import of JAX's own modules sets."""


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    plain = (int, float, str, bytes, bool, frozenset)
    return type(one) is type(other) and isinstance(one, plain) and one == other


def _config() -> Iterator[_Place]:
    for name, value in dict(jax.config.values).items():

        def put_back(name: str = name, value: Any = value) -> None:
            jax.config.update(name, value)

        yield _Place(f"changes jax.config.{name}", value, put_back)


def _environment() -> Iterator[_Place]:
    for name, value in dict(os.environ).items():
        if name in _OF_JAX:
            continue

        def put_back(name: str = name, value: str = value) -> None:
            os.environ[name] = value

        yield _Place(f"{_VARIABLE}{name}", value, put_back)


def _modules() -> Iterator[_Place]:
    for name, module in list(sys.modules.items()):
        is_own = name.partition(".")[0] in OWN_PACKAGES
        if not isinstance(module, types.ModuleType) or not (is_own or name in WATCHED):
            continue
        for key, value in list(vars(module).items()):
            if key.startswith("__") and is_own:
                continue
            if name in WATCHED and (key.startswith("_") or not callable(value)):
                continue
            yield _attribute(module, f"{name}.{key}", key, value)
            if is_own and isinstance(value, type) and value.__module__ == name:
                for method, function in list(vars(value).items()):
                    if isinstance(function, types.FunctionType | classmethod | staticmethod):
                        yield _attribute(value, f"{name}.{key}.{method}", method, function)
    array = type(jax.numpy.zeros(()))
    for method in ("block_until_ready", "__array__", "copy_to_host_async", "is_ready"):
        if method in vars(array):
            yield _attribute(array, f"jax.Array.{method}", method, vars(array)[method])


def _attribute(owner: Any, name: str, key: str, value: Any) -> _Place:
    """The place of an attribute. The token of a function has its code and defaults, the token of a
    mapping or a list its items.
    """
    inside: Any = None
    if isinstance(value, types.FunctionType):
        keywords = value.__kwdefaults__ or {}
        inside = (value.__code__, value.__defaults__, *(x for kv in keywords.items() for x in kv))
    elif isinstance(value, dict):
        inside = tuple(x for item in value.items() for x in item)
    elif isinstance(value, list):
        inside = tuple(value)
    elif hasattr(value, "tolerance") and isinstance(value.tolerance, dict):  # the record of an op
        inside = tuple(x for item in value.tolerance.items() for x in item)

    def put_back() -> None:
        if vars(owner).get(key) is not value:
            setattr(owner, key, value)
        if isinstance(value, types.FunctionType):
            value.__code__, value.__defaults__ = inside[0], inside[1]
            value.__kwdefaults__ = dict(zip(inside[2::2], inside[3::2], strict=True)) or None
        elif inside is not None and not isinstance(value, list):
            mapping = value if isinstance(value, dict) else value.tolerance
            mapping.clear()
            mapping.update(zip(inside[::2], inside[1::2], strict=True))

    return _Place(f"replaces {name}", (value, inside), put_back)


def _settings() -> Iterator[_Place]:
    state = random.getstate()
    yield _Place("changes the state of random", state, lambda: random.setstate(state))
    drawn = np.random.get_state(legacy=False)  # noqa: NPY002  # the state that all code shares
    token = (drawn["state"]["key"].tobytes(), drawn["state"]["pos"])
    yield _Place(
        "changes the state of numpy.random",
        token,
        lambda: np.random.set_state(drawn),  # noqa: NPY002
    )
    if hasattr(os, "sched_getaffinity"):
        cores = frozenset(os.sched_getaffinity(0))
        yield _Place(
            "changes the processors of the process", cores, lambda: os.sched_setaffinity(0, cores)
        )
    yield _Place("changes the priority of the process", os.getpriority(os.PRIO_PROCESS, 0))
    here = str(Path.cwd())
    yield _Place("changes the working folder", here, lambda: os.chdir(here))
    yield _Place("turns the garbage collector off or on", gc.isenabled(), gc.enable)
    switch = sys.getswitchinterval()
    yield _Place("changes the switch interval", switch, lambda: sys.setswitchinterval(switch))
    yield _Place("sets a profiler", sys.getprofile())
    small = np.float32(1e-38) * np.array(1e-3, np.float32)
    yield _Place("changes the floating-point mode", bool(small != 0))
