"""The eSurge API over the paged engine: requests by id, prompts that are made to fit, pausing, and
new weights in place.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from enginebay.outputs import CompletionOutput
    from enginebay_esurge.errors import BusyError, NoTemplateError, NotRunningError
    from enginebay_esurge.esurge import eSurge
    from enginebay_esurge.outputs import RequestOutput

_HOMES = {
    "BusyError": "enginebay_esurge.errors",
    "CompletionOutput": "enginebay.outputs",
    "NoTemplateError": "enginebay_esurge.errors",
    "NotRunningError": "enginebay_esurge.errors",
    "RequestOutput": "enginebay_esurge.outputs",
    "eSurge": "enginebay_esurge.esurge",
}

__all__ = [
    "BusyError",
    "CompletionOutput",
    "NoTemplateError",
    "NotRunningError",
    "RequestOutput",
    "eSurge",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for, so that importing the package imports no
    JAX.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'enginebay_esurge' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
