"""Records the calls of ops that a model makes, with their arguments."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.ops.caps import LAYER

_Static = Hashable


@dataclasses.dataclass(frozen=True)
class CallForm:
    """What all calls of one sort have in common: the structure of their arguments, and those that
    are no arrays. An array has None in `statics`, and its shape and dtype in `arrays`.
    """

    tree: Any
    statics: tuple[_Static, ...]
    is_array: tuple[bool, ...]
    arrays: tuple[tuple[tuple[int, ...], str], ...]

    @staticmethod
    def of(leaves: Sequence[Any], tree: Any) -> CallForm:
        """Return the form of flat arguments."""
        is_array = tuple(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)
        pairs = list(zip(leaves, is_array, strict=True))
        statics = tuple(None if array else leaf for leaf, array in pairs)
        arrays = tuple((leaf.shape, str(leaf.dtype)) for leaf, array in pairs if array)
        return CallForm(tree, statics, is_array, arrays)

    def arguments(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments and keywords of a call with these arrays."""
        rest = iter(arrays)
        leaves = [
            next(rest) if array else static
            for static, array in zip(self.statics, self.is_array, strict=True)
        ]
        positional, keywords = jax.tree.unflatten(self.tree, leaves)
        return positional, keywords


@dataclasses.dataclass(frozen=True)
class RecordedCall:
    """One call of an op, with the arrays that it got; of those that were not kept, their shapes."""

    op: str
    form: CallForm
    arrays: tuple[Any, ...]

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional arguments, and the keywords."""
        return self.form.arguments(self.arrays)


def _everything(op: str, array: Any) -> bool:
    return True


def _shape_of(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


@dataclasses.dataclass
class CallRecorder:
    """Stands in for each implementation of an op (`Ops.wrapped`) while `run` traces a model, and
    keeps the calls in their order.

    `keeps`: of which arrays, by op, shape and dtype, the numbers are kept. `same_layers`: no
    implementation reads the number of the layer (`Ops.shares_layers`), so calls of several layers
    are of one sort.
    """

    options: Mapping[str, Any]
    same_layers: bool
    keeps: Callable[[str, Any], bool] = _everything
    calls: list[RecordedCall] = dataclasses.field(default_factory=list)
    implementations: dict[str, Any] = dataclasses.field(default_factory=dict)
    _traced: list[tuple[str, CallForm, list[Any]]] = dataclasses.field(default_factory=list)

    def wrap(self, op: str, implementation: Any) -> Callable[..., Any]:
        """Return what records the calls of an implementation."""
        self.implementations[op] = implementation
        return functools.partial(self._call, op)

    def _call(self, op: str, *arguments: Any, **keywords: Any) -> Any:
        given = keywords
        if self.same_layers and LAYER in keywords.get("inputs", ()):
            given = {**keywords, "inputs": {**keywords["inputs"], LAYER: 0}}
        leaves, tree = jax.tree.flatten((arguments, given))
        form = CallForm.of(leaves, tree)
        arrays = [jnp.asarray(x) for x, a in zip(leaves, form.is_array, strict=True) if a]
        self._traced.append((op, form, arrays))
        return self.implementations[op](*arguments, **keywords)

    def recording(
        self, function: Callable[..., Any]
    ) -> Callable[..., tuple[Any, list[RecordedCall]]]:
        """Return a function that runs `function`, which calls ops, and returns its result, and the
        calls with the arrays that they got. It is compiled once. Of arrays that the recorder does
        not keep, only shape and dtype are returned.
        """
        found: list[tuple[str, CallForm, list[Any]]] = []

        def traced(*arguments: Any) -> tuple[Any, list[list[Any]]]:
            self._traced.clear()
            result = function(*arguments)
            found[:] = [(op, form, [_shape_of(x) for x in xs]) for op, form, xs in self._traced]
            kept = [[x for x in xs if self.keeps(op, x)] for op, _, xs in self._traced]
            self._traced.clear()
            return result, kept

        compiled = jax.jit(traced, compiler_options=dict(self.options))

        def run(*arguments: Any) -> tuple[Any, list[RecordedCall]]:
            result, kept = compiled(*arguments)
            calls = []
            for (op, form, shapes), arrays in zip(found, kept, strict=True):
                rest = iter(arrays)
                both = tuple(next(rest) if self.keeps(op, one) else one for one in shapes)
                calls.append(RecordedCall(op, form, both))
            return result, calls

        return run

    def run(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Compile and run a function of arrays that calls ops, and keep their calls."""
        self.calls += self.recording(function)(*arguments)[1]

    def sorts(self) -> list[list[RecordedCall]]:
        """Return the calls of each op and form, in the order of the first of each."""
        found: dict[tuple[str, CallForm], list[RecordedCall]] = {}
        for call in self.calls:
            found.setdefault((call.op, call.form), []).append(call)
        return list(found.values())
