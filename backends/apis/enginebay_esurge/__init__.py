"""The eSurge API over the paged engine: requests by id, prompts that are fitted to the context,
pausing, and exchange of weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginebay.on_demand import on_demand

if TYPE_CHECKING:
    from enginebay.outputs import CompletionOutput
    from enginebay_esurge.errors import BusyError, NoTemplateError, NotRunningError
    from enginebay_esurge.esurge import eSurge
    from enginebay_esurge.outputs import RequestOutput

__all__ = [
    "BusyError",
    "CompletionOutput",
    "NoTemplateError",
    "NotRunningError",
    "RequestOutput",
    "eSurge",
]

# Names are imported at first use, so that listing plugins does not import JAX.
__getattr__, __dir__ = on_demand(
    __name__,
    {
        "enginebay.outputs": "CompletionOutput",
        "enginebay_esurge.errors": "BusyError NoTemplateError NotRunningError",
        "enginebay_esurge.esurge": "eSurge",
        "enginebay_esurge.outputs": "RequestOutput",
    },
)
