"""GroupPrefixes: finds the pages of all cache groups that hold the beginning of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from enginebay.contracts.cache import Lease
from enginebay.contracts.prefix_key import PrefixKey
from enginebay_paged.lease_records import GroupPages
from enginebay_paged.pool import DUMMY_PAGE
from enginebay_paged.prefix import embeds_by_page, key_digest, page_digests
from enginebay_paged.state_places import StatePlaces


class GroupPrefixes:
    """One chain of hashes for all cache groups, and an index of pages in each group.

    A row can continue after some number of full pages if: every group that keeps all pages has all
    of them, every group with a window has those of the last `window` positions, and every group
    with a recurrent state has a snapshot there.
    """

    def __init__(
        self, groups: Mapping[str, GroupPages], states: Sequence[StatePlaces] = ()
    ) -> None:
        self.groups = groups
        self._states = states
        self._stores = [g.store for g in groups.values()] + [one.store for one in states]
        self._hosts = [one.host for one in self._stores if one.host is not None]
        self._page_size = next(iter(groups.values())).table.page_size
        self.keeps_pages = all(group.store.index is not None for group in groups.values())

    def find(self, token_ids: np.ndarray, key: PrefixKey, *, recall: bool = False) -> list[bytes]:
        """Return the hashes of the longest run of full pages, from the first page on, after which a
        row with token_ids int32 [tokens] and this key can continue.

        Costs about 1 us per page and group, up to the first missing page. `recall`: pages may come
        from files, and the host keeps its pages until `settle`.
        """
        found: list[bytes] = []
        if not self.keeps_pages:
            return found
        for store in self._stores:
            store.expire()
        if recall:
            self.settle()
        if self._states:  # a state cannot be rewound to compute the last token again
            token_ids = token_ids[:-1]
        size = self._page_size
        whole = [group.store for group in self.groups.values() if group.window is None]
        for digest in page_digests(key_digest(key), token_ids, size, embeds_by_page(key, size)):
            if not all(store.holds(digest, recall=recall) for store in whole):
                break
            found.append(digest)
        for group in self.groups.values() if recall else ():
            if group.window is not None:
                for digest in found[group.first_page(len(found) * size - 1) :]:
                    group.store.holds(digest, recall=True)
        return self.resumable(found)

    def need(self, digests: Sequence[bytes]) -> None:
        """Let the host keep the pages with these hashes until `settle`."""
        for host in self._hosts:
            for digest in digests:
                host.need(digest)

    def settle(self) -> None:
        """End the effect of `need`: the host may forget any page."""
        for host in self._hosts:
            host.settle()

    def resumable(self, digests: Sequence[bytes]) -> list[bytes]:
        """Return the longest run of these hashes after which groups with a window or a state can
        continue as well.
        """
        windows = [group for group in self.groups.values() if group.window is not None]
        runs = [0] * len(windows)  # lengths of the runs of known pages that end here
        is_whole = not windows and not self._states
        longest = len(digests) if is_whole else 0
        for count, digest in () if is_whole else enumerate(digests, 1):
            runs = [
                run + 1 if group.store.holds(digest) else 0
                for group, run in zip(windows, runs, strict=True)
            ]
            # If the prompt ends here, its last token is computed again.
            num_tokens = count * self._page_size - 1
            if all(
                run >= count - group.first_page(num_tokens)
                for group, run in zip(windows, runs, strict=True)
            ) and self.has_snapshots(digest):
                longest = count
        return list(digests[:longest])

    def has_snapshots(self, digest: bytes) -> bool:
        """Return whether all groups with a state have a snapshot under this hash."""
        return all(one.store.find(digest) is not None for one in self._states)

    def pages(self, digests: Sequence[bytes]) -> dict[str, Sequence[int]]:
        """Return the pages of the device with these hashes by group; the dummy page for a page that
        is not on the device.
        """
        return {
            name: [group.store.find(digest) or DUMMY_PAGE for digest in digests]
            for name, group in self.groups.items()
        }

    def name(
        self, digests: list[bytes], lease: Lease, token_ids: np.ndarray, key: PrefixKey
    ) -> None:
        """Add a lease's full pages of token_ids to the indexes, and append their hashes to
        `digests`, which holds the hashes of the first pages already.
        """
        if not self.keeps_pages:
            return
        parent, size = digests[-1] if digests else key_digest(key), self._page_size
        num = len(digests)
        is_past = not key.embeds or key.embeds[-1][0] < num * size  # always while decoding
        embeds = {} if is_past else embeds_by_page(key, size)
        for digest in page_digests(parent, token_ids[num * size :], size, embeds, num):
            for name, group in self.groups.items():
                page = lease.pages[name][len(digests)]
                if page != DUMMY_PAGE:
                    group.store.name(digest, page)
            digests.append(digest)

    def forget(self) -> None:
        """Clear the indexes."""
        for store in self._stores:
            store.forget()
