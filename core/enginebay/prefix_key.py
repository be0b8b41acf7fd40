"""PrefixKey: what the keys and values of a row depend on besides its token ids."""

from __future__ import annotations

import dataclasses
import hashlib
import json

DIGEST_BYTES = 16
"""The length of a hash. BLAKE2b is collision resistant: a prompt cannot be made that has the
hash of another one and so reads its pages.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixKey:
    """Rows share the cache of a beginning only where their token ids and their keys agree.

    `weights` names the engine's weights and their version, and `salt` is the request's
    `cache_salt`: rows with another one share nothing. `embeds` has (position, hash) of each
    position whose content is an embedding; rows share what stands before the first that differs.
    """

    weights: str = ""
    salt: str = ""
    embeds: tuple[tuple[int, bytes], ...] = ()

    def digest(self) -> bytes:
        """The hash that a chain of pages begins with; the same in every process."""
        text = json.dumps([self.weights, self.salt])
        return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()

    def by_page(self, page_size: int) -> dict[int, bytes]:
        """The hashes of the embeddings in each page that has some, by the number of the page."""
        pages: dict[int, bytes] = {}
        for position, digest in self.embeds:
            page = position // page_size
            pages[page] = pages.get(page, b"") + digest
        return pages


NO_KEY = PrefixKey()
