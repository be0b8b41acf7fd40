"""Placement: how logical axes map to the device mesh, and the sharding of weights and cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from enginebay.contracts.cache import CacheLayout
from enginebay.errors import ConfigError
from enginebay.weights import WeightSpec


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh (None: one device), and the rules that map logical axes to mesh axes."""

    mesh: Mesh | None
    rules: Mapping[str, str | None]
    device: jax.Device

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """The partition of an array whose dimensions have these logical axes."""
        return PartitionSpec(*(self.rules.get(a) if a else None for a in axes))

    def sharding(self, axes: Sequence[str | None]) -> Sharding:
        """The sharding of an array with these logical axes."""
        if self.mesh is None:
            return jax.sharding.SingleDeviceSharding(self.device)
        return NamedSharding(self.mesh, self.spec(axes))

    def weight(self, path: str, spec: WeightSpec) -> Sharding:
        """The sharding of a weight, or of an array of a quantised weight. ConfigError for a
        dimension that its mesh axis does not divide.
        """
        for size, axis in zip(spec.shape, spec.axes, strict=True):
            shards = self.num_shards(axis)
            if size % shards:
                raise ConfigError(
                    f"weight {path!r} has {size} along {axis!r}, split over {shards} devices",
                    f"a mesh axis that divides {size}",
                    "Pass a smaller --mesh, or change axis_rules.",
                )
        return self.sharding(spec.axes)

    def num_shards(self, axis: str | None) -> int:
        """The number of devices that a logical axis is split over."""
        mesh_axis = self.rules.get(axis) if axis else None
        return 1 if self.mesh is None or mesh_axis is None else self.mesh.shape[mesh_axis]

    def cache(self, layout: CacheLayout) -> dict[str, Sharding]:
        """The sharding of each array of one cache layer."""
        return {name: self.sharding(axes) for name, axes in layout.logical_axes().items()}

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """All devices of the mesh, or the single device."""
        return (self.device,) if self.mesh is None else tuple(self.mesh.devices.flat)

    @property
    def replicated(self) -> Sharding:
        """The sharding of an array that every device has whole."""
        return self.sharding(())


def make_placement(
    devices: Sequence[jax.Device], mesh: Mapping[str, int], rules: Mapping[str, str | None]
) -> Placement:
    """The placement on the first of `devices` for the mesh sizes of the configuration. {} and sizes
    of 1 mean one device. ConfigError when there are too few devices.
    """
    sizes = {axis: size for axis, size in mesh.items() if size > 1}
    total = int(np.prod(list(sizes.values()))) if sizes else 1
    if total > len(devices):
        given, allowed = f"mesh {dict(mesh)} needs {total} devices", f"at most {len(devices)}"
        raise ConfigError(
            given, f"{allowed}, the devices of this machine", "Pass a smaller --mesh."
        )
    if total == 1:
        return Placement(None, dict.fromkeys(rules), devices[0])
    grid = np.array(devices[:total]).reshape(tuple(sizes.values()))
    known = {axis: target if target in sizes else None for axis, target in rules.items()}
    return Placement(
        Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)), known, devices[0]
    )
