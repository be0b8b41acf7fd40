"""The default values of sampling parameters for one model, which requests use for fields that they
leave out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from enginebay.config import Reason
from enginebay.row_value import AppliedBy, declared
from enginebay.types import SamplingParams

SETTING = "generation_config"

PROCESSOR_OF = {name: one.processor for name, one in declared(SamplingParams, AppliedBy).items()}
"""Field of SamplingParams -> the logits processor that applies it. A sampler may apply penalties
itself.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Default values by field of SamplingParams, and the reason for them."""

    values: Mapping[str, Any]
    reason: Reason

    def missing_in(self, params: SamplingParams) -> dict[str, Any]:
        """Return the defaults for the fields that `params` leaves out.

        A field is not left out if the caller set it to any value, or named its logits processor in
        `processors`.
        """
        return {
            name: value
            for name, value in self.values.items()
            if name not in params.model_fields_set
            and PROCESSOR_OF.get(name) not in params.processors
        }

    def applied_to(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the defaults for the fields that it leaves out. The object itself is
        not changed.
        """
        missing = self.missing_in(params)
        return params.model_copy(update=missing) if missing else params


NO_DEFAULTS = SamplingDefaults({}, Reason(SETTING, "none", "no checkpoint"))
