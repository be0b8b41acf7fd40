"""Saved inferences: a folder with the configuration and the compiled functions as StableHLO, for
use in another process.

    ======================  ==============================================================
    file                    contents
    ======================  ==============================================================
    inference.json          configuration, precompiled shapes, the model's fingerprint,
                            and the SHA-256 of every other file and of itself
    functions/*.stablehlo   the prefill and decode functions, exported by jax.export
    ======================  ==============================================================

Loading never executes a file of the folder directly: it compiles the functions first. XLA's
executables are in the user's own compilation cache (mode 0700). Saving fills this cache, so that
loading by the same user, with the same versions on the same machine, compiles nothing. Weights are
not saved.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import flax
import jax
from jax import export
from jax.sharding import PartitionSpec

import enginebay
from enginebay.errors import shown_text
from enginebay.json_text import parse_json
from enginebay.machine import processor_features
from enginebay.ops.head_rotation import rotated_widths
from enginebay_contiguous.slot_sizes import ONE_PAGE_LAYOUTS
from enginebay_vinference.errors import SavedInferenceError
from enginebay_vinference.inference_config import vInferenceConfig
from enginebay_vinference.partition import spec_from_plain, spec_to_plain
from enginebay_vinference.precompile import vInferencePreCompileConfig
from enginebay_vinference.state_steps import KINDS, InferenceShape, Pair, ProgramKind, Programs

log = logging.getLogger("enginebay.vinference")


class SavableInference(Protocol):
    """The fields of a vInference that are saved, in addition to its functions."""

    generation_config: vInferenceConfig
    seed: int | None
    input_partition_spec: PartitionSpec | None

    @property
    def inference_name(self) -> str: ...

    @property
    def precompiled(self) -> Mapping[int, vInferencePreCompileConfig]: ...


FORMAT = "enginebay.vinference.2"
MANIFEST = "inference.json"
FUNCTION_FILE = re.compile(r"functions/[0-9]+-(prefill|decode)\.stablehlo")


@dataclasses.dataclass(frozen=True)
class Saved:
    """The checked contents of a folder, before anything is compiled."""

    folder: Path
    generation_config: vInferenceConfig
    seed: int | None
    input_partition_spec: PartitionSpec | None
    inference_name: str
    fingerprint: str
    kernels: Mapping[str, str]
    environment: Mapping[str, str]
    precompiled: tuple[vInferencePreCompileConfig, ...]
    functions: Mapping[InferenceShape, Mapping[ProgramKind, bytes]]

    def install(
        self, programs: Programs, make_ready: Callable[[vInferencePreCompileConfig], None]
    ) -> None:
        """Compile the saved functions into `programs`. SavedInferenceError when they belong to
        another model.
        """
        found = fingerprint(programs)
        if found != self.fingerprint:
            raise SavedInferenceError(
                f"{self.folder}, saved for model {self.fingerprint}",
                f"a folder saved for this model with this dtype, layout and page size, {found}",
                "Load it with the model it was saved with, or precompile and save again.",
            )
        self._refuse_other_kernels(programs.engine.parts.kernels)
        here = compile_environment()
        changed = [
            f"{name} {self.environment.get(name)} -> {here[name]}"
            for name in here
            if here[name] != self.environment.get(name)
        ]
        most = programs.engine.parts.config.max_num_batched_tokens
        usable = {
            shape: made
            for shape, made in self.functions.items()
            if shape.max_batched_tokens == most
        }
        if len(usable) < len(self.functions):  # make_ready compiles the others
            changed.append(f"another max_num_batched_tokens -> {most}")
        if changed:
            log.warning(
                "saved in another environment (%s): compiling its functions", "; ".join(changed)
            )
        start = time.perf_counter()
        for shape, functions in usable.items():
            programs.get(
                shape, ahead=True, make=functools.partial(_compile, programs, shape, functions)
            )
        for config in self.precompiled:
            make_ready(config)
        log.info(
            "loaded %d functions in %.2f s", len(usable) * len(KINDS), time.perf_counter() - start
        )

    def _refuse_other_kernels(self, here: Mapping[str, str]) -> None:
        """Raise SavedInferenceError when the folder was saved with other kernels: shapes that are
        compiled later would use the present ones.
        """
        names = sorted({*self.kernels, *here})
        others = [name for name in names if self.kernels.get(name) != here.get(name)]
        if others:
            raise SavedInferenceError(
                f"{self.folder}, saved with "
                + ", ".join(
                    f"{self.kernels.get(name)} for {name} (here {here.get(name)})"
                    for name in others
                ),
                "a folder saved with the kernels chosen here",
                "Select the saved kernels with kernels=... (`enginebay explain` shows the choice), "
                "or save again.",
            )


def save(inference: SavableInference, programs: Programs, folder: Path) -> None:
    """Write an inference's configuration and its compiled functions. Each function is exported, and
    compiled once from its export.
    """
    (folder / "functions").mkdir(parents=True, exist_ok=True)
    files: dict[str, bytes] = {}
    shapes = []
    for number, shape in enumerate(programs.shapes):
        functions = {kind: _export(programs, shape, kind) for kind in KINDS}
        _compile(programs, shape, functions)  # fills the compilation cache for load()
        names = {kind: f"functions/{number}-{kind}.stablehlo" for kind in KINDS}
        files |= {names[kind]: functions[kind] for kind in KINDS}
        shapes.append({"shape": dataclasses.asdict(shape), "files": names})
    spec = inference.input_partition_spec
    manifest = {
        "format": FORMAT,
        "inference_name": inference.inference_name,
        "seed": inference.seed,
        "input_partition_spec": None if spec is None else spec_to_plain(spec),
        "generation_config": inference.generation_config.to_dict(),
        "precompiled": [config.to_dict() for config in inference.precompiled.values()],
        "fingerprint": fingerprint(programs),
        "kernels": dict(programs.engine.parts.kernels),
        "environment": compile_environment(),
        "functions": shapes,
        "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }
    for stale in (folder / "functions").glob("*.stablehlo"):  # of an earlier save
        stale.unlink()
    for name, content in files.items():
        _write(folder / name, content)
    _write(
        folder / MANIFEST, json.dumps({**manifest, "self": _digest(manifest)}, indent=1).encode()
    )


def load(folder: Path) -> Saved:
    """Read and check a folder that save() wrote. SavedInferenceError when a file is missing or
    damaged.
    """
    text = _read(folder / MANIFEST)
    try:
        manifest = parse_json(text)
        own = manifest.pop("self")
        if manifest["format"] != FORMAT or own != _digest(manifest):
            raise ValueError("its format or its checksum does not match")
        if strange := [name for name in manifest["sha256"] if not FUNCTION_FILE.fullmatch(name)]:
            raise ValueError(f"it names {strange[0]!r}")
        contents = {name: _read(folder / name) for name in manifest["sha256"]}
        for name, digest in manifest["sha256"].items():
            if hashlib.sha256(contents[name]).hexdigest() != digest:
                raise _damaged(folder / name, "its checksum does not match")
        spec = manifest["input_partition_spec"]
        return Saved(
            folder=folder,
            generation_config=vInferenceConfig.from_dict(manifest["generation_config"]),
            seed=manifest["seed"],
            input_partition_spec=None if spec is None else spec_from_plain(spec),
            inference_name=manifest["inference_name"],
            fingerprint=manifest["fingerprint"],
            kernels=dict(manifest["kernels"]),
            environment=manifest["environment"],
            precompiled=tuple(
                vInferencePreCompileConfig.from_dict(fields) for fields in manifest["precompiled"]
            ),
            functions={
                InferenceShape(**one["shape"]): {
                    kind: contents[one["files"][kind]] for kind in KINDS
                }
                for one in manifest["functions"]
            },
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, SavedInferenceError):
            raise
        raise _damaged(folder / MANIFEST, shown_text(str(error))) from error


def fingerprint(programs: Programs) -> str:
    """Return a hash of everything that functions depend on besides shape and kernels: the model's
    configuration and weight formats, dtypes, rotation of heads, layout, sampler and mesh.
    """
    parts = programs.engine.parts
    model = parts.model
    facts = {
        "info": repr(model.info),
        "weights": {
            path: repr(parts.weight_format.stored(path, spec))
            for path, spec in model.weight_specs().items()
        },
        "dtypes": [parts.dtype, *(s.cache_dtype for s in parts.model.info.attention.values())],
        "rotated": [rotated_widths(s) for s in parts.model.info.attention.values()],
        "layout": parts.layout,
        "page_size": None if parts.layout in ONE_PAGE_LAYOUTS else programs.engine.sizes.page_size,
        "sampler": parts.config.sampler.model_dump(mode="json"),
        "mesh": parts.config.mesh,
        "rules": [[p, str(s)] for p, s in programs.placement.rules],
        "platform": parts.config.platform,
    }
    return _digest(facts)[:16]


def compile_environment() -> dict[str, str]:
    """Return the versions and the hardware that compiled programs depend on."""
    return {
        "enginebay": enginebay.__version__,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "flax": flax.__version__,
        "device": jax.devices()[0].device_kind,
        "machine": _digest(processor_features())[:12],
    }


def _export(programs: Programs, shape: InferenceShape, kind: ProgramKind) -> bytes:
    known = [
        export.DisabledSafetyCheck.custom_call(name) for name in programs.engine.parts.custom_calls
    ]
    exported = export.export(programs.jitted(shape, kind), disabled_checks=known)(
        *programs.describe(shape, kind)
    )
    return bytes(exported.serialize())


def _compile(
    programs: Programs, shape: InferenceShape, functions: Mapping[ProgramKind, bytes]
) -> Pair:
    """Compile saved functions. Their calls outside XLA are registered first: a process that has not
    traced the functions has not registered them.
    """
    parts = programs.engine.parts
    for name in parts.custom_calls:
        if any(name.encode() in content for content in functions.values()):
            parts.register_call(name)
    lowered = []
    for kind in KINDS:
        call = export.deserialize(bytearray(functions[kind])).call
        lowered.append(programs.jitted(shape, kind, call).lower(*programs.describe(shape, kind)))
    return programs.compile_lowered(lowered)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.replace(path)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _damaged(path, str(error.strerror)) from error


def _damaged(path: Path, why: str) -> SavedInferenceError:
    return SavedInferenceError(
        f"{path}: {why}",
        "a complete, unchanged folder that save_inference() wrote",
        "Save the inference again.",
    )
