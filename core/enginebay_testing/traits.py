"""The values of an attention problem on each axis; the axes are the columns of the
support matrix.
"""

from __future__ import annotations

from collections.abc import Iterator

from enginebay.ops.caps import FEATURE_OF
from enginebay.ops.spec import AttnSpec

AXES = ("mode", "dtype", "head_dim", "group", "page_size", "feature")
"""The axes of an attention problem. `feature` is what only some layers have, named as in
`Caps.features`.
"""

FEATURES = ("window", "softcap", *FEATURE_OF.values(), "lse", "kv_share", "mla")


def traits_of(spec: AttnSpec, mode: str, page_size: int) -> dict[str, str]:
    """Return a problem's value on each axis; several features are joined by "+", none is ""."""
    on = (
        spec.window is not None,
        spec.softcap is not None,
        *(name in spec.inputs for name in FEATURE_OF),
        spec.return_lse,
        spec.kv_shared,
        spec.v_is_k_prefix,
    )
    return {
        "mode": mode,
        "dtype": spec.q_dtype,
        "storage": spec.kv_storage or "",
        "head_dim": str(spec.head_dim),
        "group": str(spec.group),
        "page_size": str(page_size),
        "feature": "+".join(name for name, has in zip(FEATURES, on, strict=True) if has),
    }


def trait_values(traits: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each axis with each of its values: a case with two features counts for both."""
    for axis, value in traits.items():
        for one in value.split("+") if axis == "feature" else (value,):
            if one:
                yield axis, one
