"""PrefixKey: the facts besides token ids that decide whether two rows may share cached pages."""

from __future__ import annotations

import dataclasses

DIGEST_BYTES = 16
"""Length of a hash. BLAKE2b is collision resistant, so an attacker cannot make a prompt that has
the hash of another prompt and reads its pages.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixKey:
    """Two rows share the cache of a common prefix only if their token ids and their keys agree.

    `weights`: names the engine's weights and their version. `salt`: the request's `cache_salt`.
    Rows that differ in one of these share nothing. `embeds`: a pair (position, hash) for each
    position with an embedding; rows share the pages before the first embedding that differs.
    `adapter`: the key of the request's adapter; rows with different adapters share nothing.
    """

    weights: str = ""
    salt: str = ""
    embeds: tuple[tuple[int, bytes], ...] = ()
    adapter: str = ""


NO_KEY = PrefixKey()
