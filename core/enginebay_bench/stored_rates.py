"""Keeps the measured rates of this machine in the user's cache folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path

import jax
from pydantic import TypeAdapter, ValidationError

from enginebay.contracts.platform import Platform
from enginebay.folders import cache_folder, make_private, write_whole
from enginebay.machine import processor_features
from enginebay_bench.machine_rates import (
    MachineRates,
    Sweep,
    measure_machine,
    measures_one,
    num_processors,
)

log = logging.getLogger("enginebay")

FOLDER = "roofline"
FORMAT = 1
"""Changes with what is measured, and with how."""


@dataclasses.dataclass(frozen=True)
class StoredRates:
    """The contents of a file: the machine that was measured, and its rates."""

    machine: Mapping[str, str]
    rates: MachineRates


_FILE = TypeAdapter(StoredRates)


def machine_of(platform: Platform, sweep: Sweep) -> dict[str, str]:
    """Return what the rates depend on: the processor, how many of them this process may use, the
    version of JAX, the platform, its device and XLA's options, and what is measured.
    """
    device = platform.devices()[0]
    return {
        "format": str(FORMAT),
        "processor": processor_features(),
        "processors": str(num_processors(device)),
        "jax": jax.__version__,
        "platform": platform.name,
        "device": device.device_kind,
        "options": json.dumps(dict(platform.compile_options()), sort_keys=True),
        "sweep": json.dumps(dataclasses.asdict(sweep), sort_keys=True),
    }


def rates_path(machine: Mapping[str, str]) -> Path:
    """Return the file of a machine's rates, in $XDG_CACHE_HOME/enginebay/roofline."""
    text = json.dumps(dict(machine), sort_keys=True)
    return cache_folder() / FOLDER / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def read_rates(machine: Mapping[str, str]) -> MachineRates | None:
    """Return the stored rates of a machine; None without a file, and for a file that is damaged or
    of another machine.
    """
    path = rates_path(machine)
    try:
        found = _FILE.validate_json(path.read_bytes())
    except OSError:
        return None
    except ValidationError as error:
        log.info("%s is measured again: %s", path, error)
        return None
    return found.rates if found.machine == machine else None


def write_rates(machine: Mapping[str, str], rates: MachineRates) -> None:
    """Store the rates of a machine. A folder that cannot be written, or that other users can
    access, is left alone with a warning.
    """
    path = rates_path(machine)
    why = make_private(path.parent)
    try:
        if why is None:
            write_whole(path, _FILE.dump_json(StoredRates(machine, rates), indent=1))
    except OSError as error:
        why = str(error.strerror)
    if why is not None:
        log.warning("the rates of this machine are not stored in %s: %s", path.parent, why)


def known_rates(platform: Platform, sweep: Sweep, *, remeasure: bool = False) -> MachineRates:
    """Return the rates of a platform's first device: the stored ones, or measured and stored now.
    With `remeasure` they are measured even if they are stored.
    """
    machine = machine_of(platform, sweep)
    found = None if remeasure else read_rates(machine)
    if found is None:
        device, env = platform.devices()[0], platform.env()
        name = env.device_kind or env.platform
        found = measure_machine(device, name, platform.compile_options(), sweep)
        if found.one is not None or not measures_one(device):
            write_rates(machine, found)
    return found
