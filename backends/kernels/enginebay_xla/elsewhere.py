"""XLA's kernels under another name, for a plugin that wants them so. Under their own name, `xla`,
they serve every platform.
"""

from __future__ import annotations

from enginebay.plugins.hooks import Declaration, Register
from enginebay_xla import plugin


def register_xla_kernels(register: Register, name: str, platform: str) -> None:
    """Register every kernel of XLA but attention for another platform, under a name of yours.

    The kernels keep their capabilities, such as the quantised weights that they read. Attention is
    left out because its Caps name platforms: register a copy of `xla_attention` with other Caps.
    """
    found: list[Declaration] = []
    plugin.register_kernels(Register("kernel", found.append))
    for one in found:
        if one.op != "attention":
            register(
                name,
                one.target,
                op=one.op,
                platforms=(platform,),
                summary=one.summary,
                requires=one.requires,
                capabilities=one.capabilities,
            )
