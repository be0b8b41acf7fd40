"""Import paths of version 0.1 whose modules have moved: they lead to the modules of today, with a
DeprecationWarning.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

FORMER_NAMES = {
    "enginebay.adapters": "enginebay.contracts.adapters",
    "enginebay.cache": "enginebay.contracts.cache",
    "enginebay.cache_shape": "enginebay.contracts.cache_shape",
    "enginebay.constraint": "enginebay.contracts.constraint",
    "enginebay.engine": "enginebay.contracts.engine",
    "enginebay.executor": "enginebay.contracts",
    "enginebay.executor.commands": "enginebay.contracts.commands",
    "enginebay.executor.parts": "enginebay.contracts.executor",
    "enginebay.hooks": "enginebay.plugins.hooks",
    "enginebay.llm": "enginebay.serving",
    "enginebay.llm.events": "enginebay.serving.events",
    "enginebay.llm.segments": "enginebay.serving.segments",
    "enginebay.loop": "enginebay.serving",
    "enginebay.loop.observer": "enginebay.serving.observer",
    "enginebay.model": "enginebay.contracts.model",
    "enginebay.platform": "enginebay.contracts.platform",
    "enginebay.prefix_key": "enginebay.contracts.prefix_key",
    "enginebay.processor": "enginebay.contracts.processor",
    "enginebay.proposer": "enginebay.contracts.proposer",
    "enginebay.registry": "enginebay.plugins.registry",
    "enginebay.sampler": "enginebay.contracts.sampler",
    "enginebay.scheduler": "enginebay.contracts.scheduler",
    "enginebay_byhand": "enginebay.compose",
    "enginebay_byhand.cases": "enginebay.compose.quick_cases",
    "enginebay_executor": "enginebay_runtime",
    "enginebay_executor.codec": "enginebay_runtime.codec",
    "enginebay_executor.local": "enginebay_runtime.local",
    "enginebay_executor.rules": "enginebay.ops.partition_rules",
    "enginebay_executor.shadow_report": "enginebay.shadow_report",
    "enginebay_executor.step": "enginebay_runtime.step",
    "enginebay_numerics": "enginebay.ops",
    "enginebay_numerics.head_rotation": "enginebay.ops.head_rotation",
    "enginebay_numerics.sampling": "enginebay.ops.sampling",
    "enginebay_server.parsing.contract": "enginebay.contracts.output_format",
    "enginebay_stepping": "enginebay_runtime",
    "enginebay_stepping.assemble": "enginebay_runtime.assemble",
    "enginebay_stepping.engine": "enginebay_runtime.engine",
    "enginebay_stepping.geometry": "enginebay_runtime.geometry",
    "enginebay_stepping.rows": "enginebay_runtime.rows",
    "enginebay_stepping.rows.make": "enginebay_runtime.rows.make",
    "enginebay_vinference.functions": "enginebay_vinference.state_steps",
    "enginebay_vinference.slot_sizes": "enginebay_contiguous.slot_sizes",
}
"""The documented import paths of version 0.1, each with that of today."""


class FormerNames:
    """Finds the modules of FORMER_NAMES, with the methods of `importlib.abc.MetaPathFinder` and of
    `Loader`. These classes are not imported, because their module takes 20 ms.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for a former name, and None for every other one."""
        if name not in FORMER_NAMES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Return None: a module is made as usual, and replaced by `exec_module`."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of today in the place of `module`."""
        name, now = module.__name__, FORMER_NAMES[module.__name__]
        warnings.warn(f"{name} is {now} now", DeprecationWarning, stacklevel=2)
        sys.modules[name] = importlib.import_module(now)


def find_former_names() -> None:
    """Let imports of former names succeed, from now on."""
    if not any(isinstance(finder, FormerNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, FormerNames())  # the first: packages have moved, too
