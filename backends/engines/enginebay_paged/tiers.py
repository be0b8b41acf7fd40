"""PrefixTiers: the places besides the device where an engine keeps the pages of prefixes."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping

from enginebay.contracts.executor import EngineParts, Executor
from enginebay.errors import ConfigError, UnsupportedError
from enginebay.memory import TierPlan
from enginebay_paged.host_tier import HostTier, MoveLog
from enginebay_paged.identity import engine_identity
from enginebay_paged.options import PagedOptions
from enginebay_paged.page_files import PageFiles, file_bytes
from enginebay_runtime.geometry import Shapes
from enginebay_runtime.host_pages import HostPages, kind_bytes, page_kinds


@dataclasses.dataclass(frozen=True, eq=False)
class PrefixTiers:
    """The slots of the host, the files behind them, and the plan that `enginebay explain` shows."""

    log: MoveLog
    num_slots: int
    page_bytes: Mapping[str, int]
    """Bytes of a page by group; empty without a host tier."""
    pages: HostPages
    files: PageFiles | None
    parts: EngineParts
    shapes: Shapes

    def host_tier(self, group: str, ttl_s: float | None) -> HostTier | None:
        """Make the records of a group's slots."""
        if group not in self.page_bytes:
            return None
        read = None if self.files is None else functools.partial(self._read, self.files, group)
        return HostTier(group, self.num_slots, self.log, ttl_s, read)

    def _read(self, files: PageFiles, group: str, digest: bytes) -> Callable[[int], object] | None:
        content = files.read(group, digest, self.page_bytes[group])
        return None if content is None else functools.partial(self.pages.fill, group, content)

    def identify(self, executor: Executor) -> str:
        """Return the identity of the engine; "" without files, because only files need it."""
        return "" if self.files is None else engine_identity(self.parts, self.shapes, executor)

    def plans(self) -> tuple[TierPlan, ...]:
        """Return the sizes of the tiers."""
        each, size = sum(self.page_bytes.values()), next(iter(self.shapes.values())).page_size
        if not each:
            return ()
        plans = [TierPlan("host", self.num_slots * each, self.num_slots * size)]
        if self.files is not None:
            most, folder = self.files.max_bytes, str(self.files.folder)
            plans.append(TierPlan("disk", most, most // each * size, folder))
        return tuple(plans)


def make_tiers(parts: EngineParts, options: PagedOptions, shapes: Shapes) -> PrefixTiers:
    """Make the tiers that the options ask for. ConfigError for sizes that hold no page or that the
    host does not have; UnsupportedError for a model with recurrent states.
    """
    log, most = MoveLog(), options.prefix_host_bytes
    if most is None:
        return PrefixTiers(
            log=log,
            num_slots=0,
            page_bytes={},
            pages=HostPages(parts, shapes, {}),
            files=None,
            parts=parts,
            shapes=shapes,
        )
    if parts.model.info.states:
        raise UnsupportedError(
            "prefix_host_bytes with a model that has a recurrent state",
            "models whose layers all have keys and values: a state stays on the device",
            "Unset prefix_host_bytes, and raise num_state_snapshots to keep more prefixes.",
        )
    kinds = page_kinds(parts, shapes, [group.name for group in parts.model.info.groups])
    page_bytes = {group: kind_bytes(one) for group, one in kinds.items()}
    each = sum(page_bytes.values())
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not each <= most <= host_bytes:
        raise ConfigError(
            f"prefix_host_bytes = {most}",
            f"{each}, which is a page of {options.page_size} tokens, to {host_bytes}, the memory "
            "of the host",
            "Set a size in this range.",
        )
    files = None
    if options.prefix_disk_dir is not None:
        least_bytes = file_bytes(page_bytes.values())
        if options.prefix_disk_bytes < least_bytes:
            raise ConfigError(
                f"prefix_disk_bytes = {options.prefix_disk_bytes}",
                f"at least {least_bytes}, which is a page of {options.page_size} tokens",
                "Set at least this size.",
            )
        files = PageFiles(options.prefix_disk_dir, options.prefix_disk_bytes, options.prefix_ttl_s)
    num_slots = most // each
    pages = HostPages(parts, shapes, dict.fromkeys(page_bytes, num_slots), files)
    return PrefixTiers(
        log=log,
        num_slots=num_slots,
        page_bytes=page_bytes,
        pages=pages,
        files=files,
        parts=parts,
        shapes=shapes,
    )
