"""What the planted plugin declares."""

from __future__ import annotations

from enginebay.plugins.hooks import Register, hookimpl

NORMS = ("wrong", "not_a_number", "raises", "asserts", "exits", "crashes", "hangs", "declines")


@hookimpl
def register_kernels(register: Register) -> None:
    for name in NORMS:
        register(name, f"enginebay_planted.norms:{name}", op="rms_norm")
    register("kills_the_importer", "enginebay_planted.kills_the_importer:norm", op="rms_norm")
    register(
        "needs_more", "enginebay_planted.norms:wrong", op="rms_norm", requires=("no_such_module",)
    )
    for name in ("toy", "toy_wrong", "toy_copies"):
        register(
            name,
            f"enginebay_planted.toys:{name}",
            op="attention",
            platforms=("npu",),
            capabilities={"compiler": "enginebay_planted.toy_compiler:compiler"},
        )
    register(
        "toy_norm",
        "enginebay_planted.toys:toy_norm",
        op="rms_norm",
        platforms=("npu",),
        capabilities={"compiler": "enginebay_planted.toy_compiler:compiler"},
    )
