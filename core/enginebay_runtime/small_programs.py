"""compiled_program: the small programs of an executor that are no steps, such as the one that
copies a page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from enginebay.jax_config import seen_entries
from enginebay.memory_maps import require_maps
from enginebay_runtime.stored_programs import trace_settings
from enginebay_runtime.view import ExecutorView


def compiled_program(
    executor: ExecutorView,
    name: tuple[object, ...],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    donated: int | tuple[int, ...] = (),
    outputs: Any = None,
) -> Any:
    """Load the program of a function from the executor's store; if it is not there, trace, compile
    and store it.

    `name` tells the function, with all that it closes over, from others of the executor.
    `arguments` are arrays or their shapes. `outputs`: shardings of the results, None: as JAX
    chooses.
    """
    described = jax.tree.map(abstract_array, arguments)
    store, options = executor.store, executor.compile_options
    stored_name = (name, described, donated, outputs, options, trace_settings())
    with executor.compilations.timed():
        found = None if store is None else store.load(*stored_name)
        if found is None:
            require_maps(f"the program {name[0]}")
            jitted = jax.jit(function, donate_argnums=donated, out_shardings=outputs)
            with seen_entries() as entries:
                found = jitted.lower(*described).compile(compiler_options=options)
            if store is not None and entries:
                store.save(found, entries[-1:], *stored_name)
    return found


def abstract_array(array: Any) -> jax.ShapeDtypeStruct:
    """Return shape, dtype and, for an array on devices, the sharding."""
    sharding = array.sharding if hasattr(array, "sharding") else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
