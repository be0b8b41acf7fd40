"""What an op is, apart from its implementations: a record that a plugin registers."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Op:
    """One op, registered through the hook `register_ops` under its `name`.

    A fused op names the ops that it is `made_of`, none of them fused; it is used where an
    implementation of it is as good as theirs. The other ops have an implementation in every plan.
    """

    name: str
    made_of: tuple[str, ...] = ()
