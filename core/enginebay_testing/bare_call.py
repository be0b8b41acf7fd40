"""The program of a process in which nothing checks or times: it calls a kernel on a quick case, as
an engine would. `kernel_trial` passes this source to another Python process, so that the kernel
finds no module, argument or stack frame of a check.

The input is a pickled mapping: the names of the op, the kernel and the layout, the number of the
case, and the arrays that replace the case's inputs. The output is the results by name, pickled.
"""

from __future__ import annotations

import functools
import os
import pickle
import sys

import jax
import numpy as np

from enginebay.compose.import_paths import with_paths_of
from enginebay.compose.quick_cases import CheckSetting
from enginebay.config import EngineConfig
from enginebay.ops.spec import AttnSpec
from enginebay.plugins.registry import import_target, load_registry


def main() -> None:
    """Read the input, call the kernel, and write the results."""
    from enginebay.compose.platforms import find_platform

    asked = pickle.load(sys.stdin.buffer)  # noqa: S301  # from the process that started this one
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    op_name, name, layout = asked["op"], asked["kernel"], asked["layout"]
    registry = with_paths_of(load_registry(), [op_name], [name], layout)
    env = find_platform(registry, EngineConfig(platform=asked["platform"])).env()
    kernel = registry.load(registry.find("kernel", name, op_name))
    op = registry.load(registry.find("op", op_name))
    layout_type = registry.load(registry.find("layout", layout))
    spec = AttnSpec(**asked["spec"])
    setting = CheckSetting(env, [spec], layout_type, asked["dtype"], page_size=asked["page_size"])
    cases = list(import_target(op.quick_cases, f"the quick cases of op {op_name!r}")(setting))
    case = cases[asked["case"]]
    inputs = jax.tree.unflatten(jax.tree.structure(case.inputs), asked["leaves"])
    found = jax.jit(functools.partial(case.run, kernel))(*inputs)
    pickle.dump({key: np.asarray(array) for key, array in found.items()}, results)
    results.close()


if __name__ == "__main__":
    main()
