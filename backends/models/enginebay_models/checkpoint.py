"""Finds the folder of a model by name, path or hub id, reads its files, and checks its tensors
against the model.
"""

from __future__ import annotations

import importlib.resources
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from enginebay.contracts.model import Model, TokenInfo
from enginebay.errors import CheckpointError, InputError, shown, shown_text
from enginebay.json_text import parse_json
from enginebay.regular_files import read_regular
from enginebay_models.quantized_tensors import QuantizedTensor, Tensors
from enginebay_models.safetensors_file import StoredTensor, read_file
from enginebay_models.tensors import HEAD

DEMO = "demo"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_JSON_BYTES = 2**30
"""Max bytes of a file of a model that is text: tokenizers have tens of megabytes."""
HUB_PATTERNS = (
    "*.json",
    "*.safetensors",
    "*.jinja",
    "tokenizer.model",
    "*.tiktoken",
    "vocab.txt",
    "merges.txt",
)
# Buffers in old checkpoints, which models compute themselves.
_IGNORED = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|masked_bias|attn\.(attention\.)?bias|attn\.causal_mask)$"
)
# Rows that are compared at once: 16 MiB of an 8B model.
_TIED_ROWS = 1024
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def find_folder(name_or_path: str) -> Path:
    """Return the folder of the demo model, a given folder, or that of a repository on the hub.

    A repository that is not in the hub's cache is downloaded.
    """
    if name_or_path == DEMO:
        return Path(str(importlib.resources.files("enginebay_models"))) / "demo"
    try:
        path = Path(name_or_path).expanduser()
        if path.is_dir():
            return path
        exists = path.exists()
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # the name is too long, has a NUL byte, or names an unknown user
        raise _not_found(name_or_path, shown_text(str(error))) from None
    if exists:
        given = f"{name_or_path!r} is a file"
        raise CheckpointError(
            given, "a folder with config.json and *.safetensors, or a GGUF file", "Name its folder."
        )
    if not _HUB_ID.fullmatch(name_or_path) or name_or_path.startswith("."):
        raise _not_found(name_or_path, "there is no such folder")
    return _download(name_or_path)


def _download(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download

    # The base class of the HTTP errors of this huggingface_hub; its own errors derive from it.
    from huggingface_hub.errors import HFValidationError, HTTPError, LocalEntryNotFoundError  # type: ignore[attr-defined]

    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(HUB_PATTERNS)))
    except HFValidationError as error:
        raise _not_found(repo_id, "there is no such folder, and it is no hub id") from error
    except LocalEntryNotFoundError as error:
        raise _not_found(
            repo_id, "there is no such folder, and the hub could not be reached"
        ) from error
    except (HTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise _not_found(repo_id, f"there is no such folder, and the hub says: {reason}") from error


def _not_found(name: str, why: str) -> CheckpointError:
    allowed = f"{DEMO!r}, a model's folder, or the id of a repository on the hub"
    todo = (
        "Check the spelling; for a hub id also the network, HF_ENDPOINT, "
        "HF_TOKEN and HF_HUB_OFFLINE."
    )
    return CheckpointError(f"model {shown(name)}: {why}", allowed, todo)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; CheckpointError for anything else."""
    try:
        value = parse_json(read_regular(path, MAX_JSON_BYTES).decode())
    except InputError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    except (ValueError, OSError) as error:
        given = f"{path} cannot be read: {shown_text(str(error))}"
        raise CheckpointError(given, "a JSON object", "Fetch the file again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} holds a {type(value).__name__}", "a JSON object", "Fetch the file again."
        )
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json; CheckpointError when the folder has none."""
    if not (folder / "config.json").is_file():
        given = f"{folder} is no model: it has no config.json"
        todo = "Give the folder that has config.json."
        if files := sorted(folder.glob("*.gguf")):
            todo = f"Give the path of a GGUF file, such as {files[0]}."
        raise CheckpointError(given, "a Hugging Face checkpoint folder, or a GGUF file", todo)
    return read_json(folder / "config.json")


def read_architecture(config: Mapping[str, Any]) -> str:
    """Return the first architecture of config.json; without `architectures`, that of model_type,
    as transformers does. CheckpointError when neither says it.
    """
    names = config.get("architectures")
    kind = config.get("model_type")
    if not names and isinstance(kind, str) and (by_type := _architecture_of_type(kind)):
        return by_type
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        given = f"config.json has architectures = {shown(names)}"
        raise CheckpointError(
            given, 'a list such as ["LlamaForCausalLM"]', "Add the field, or choose another model."
        )
    return names[0]


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()


def silence_advice() -> None:
    """Keep transformers from logging advice on torch, when it is imported, that does not apply."""
    logging.getLogger("transformers").addFilter(_is_no_advice)


_OWN_ARCHITECTURES = {"internlm3": "InternLM3ForCausalLM"}
"""model_type -> architecture, where transformers uses the class of another family, but config.json
has fields of its own.
"""


def _architecture_of_type(model_type: str) -> str | None:
    """Return the causal language model of a model_type, as transformers makes it, if any."""
    if model_type in _OWN_ARCHITECTURES:
        return _OWN_ARCHITECTURES[model_type]
    silence_advice()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    found: str | None = NAMES.get(model_type)
    return found


def read_token_info(folder: Path, config: Mapping[str, Any]) -> TokenInfo:
    """Read the special tokens of config.json and generation_config.json.

    The end-of-sequence tokens are those of both files. For other tokens generation_config.json
    wins. CheckpointError for an end-of-sequence token outside the vocabulary. A begin-of-sequence
    or padding token outside of it counts as none; the first Llama checkpoints have -1.
    """
    path = folder / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    ends = dict.fromkeys([*_ids(generation, "eos_token_id"), *_ids(config, "eos_token_id")])
    size = config.get("vocab_size")
    size = size if isinstance(size, int) else 2**31
    if wrong := [one for one in ends if not 0 <= one < size]:
        given = f"eos_token_id = {shown(wrong[0])}"
        todo = "Correct config.json or generation_config.json."
        raise CheckpointError(given, f"0 to {size - 1}, the model's vocabulary", todo)
    others = (_first(generation, config, name) for name in ("bos_token_id", "pad_token_id"))
    return TokenInfo(
        tuple(ends), *(None if one is None or not 0 <= one < size else one for one in others)
    )


def _ids(fields: Mapping[str, Any], name: str) -> list[int]:
    value = fields.get(name)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        given = f"{name} = {shown(value)}"
        raise CheckpointError(
            given, "a token id or a list of them", "Correct config.json or generation_config.json."
        )
    return values


def _first(generation: Mapping[str, Any], config: Mapping[str, Any], name: str) -> int | None:
    return next(iter([*_ids(generation, name), *_ids(config, name)]), None)


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a folder's *.safetensors, by the index file if there is one."""
    if (folder / INDEX_FILE).exists():
        return _indexed(folder, read_json(folder / INDEX_FILE).get("weight_map"))
    single = folder / SINGLE_FILE
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        has = (
            f"only {', '.join(pickles)}, which are pickles; pickles are never read"
            if pickles
            else "no weights"
        )
        given = f"{folder} has {has}"
        raise CheckpointError(
            given,
            "*.safetensors",
            "Convert the weights, or choose a repository that has them as safetensors.",
        )
    return _united(files)


def _indexed(folder: Path, weight_map: object) -> dict[str, StoredTensor]:
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        given = f"{folder / INDEX_FILE} has no valid weight_map"
        raise CheckpointError(
            given, "a weight_map that gives the file name of each tensor", "Fetch the file again."
        )
    paths = []
    for name in sorted(set(weight_map.values())):
        path = folder / name
        if Path(name).name != name or not _is_file(path):
            wanted = sum(file == name for file in weight_map.values())
            given = (
                f"{INDEX_FILE} names {shown(name)} for {wanted} tensors, "
                f"and {folder} has no such file"
            )
            raise CheckpointError(
                given, "a folder with every file that the index names", "Fetch the missing file."
            )
        paths.append(path)
    return _united(paths)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # the name is too long or has a NUL byte
        return False


def _united(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """Return the tensors of all files; CheckpointError for one that is in two files."""
    found: dict[str, StoredTensor] = {}
    for path in paths:
        for name, tensor in read_file(path).items():
            if name in found:
                given = f"tensor {shown(name)} is in {found[name].path.name} and in {path.name}"
                todo = "Remove the file of another model, or fetch the checkpoint again."
                raise CheckpointError(given, "each tensor in one file", todo)
            found[name] = tensor
    return found


def check_tensors(model: Model, stored: Tensors) -> None:
    """Raise CheckpointError for a tensor that is missing, has a wrong shape, or is not used."""
    sources = model.tensor_sources().values()
    wanted = {
        name: shape
        for source in sources
        for name, shape in zip(source.names, source.shapes, strict=True)
    }
    if missing := wanted.keys() - stored.keys():
        given = f"the checkpoint lacks {_listing(missing)}"
        raise CheckpointError(
            given,
            f"all tensors of a {model.info.family} of this config.json",
            "Fetch the checkpoint again, or correct config.json.",
        )
    for name, shape in wanted.items():
        if stored[name].shape != shape:
            given = (
                f"tensor {name!r} in {stored[name].path.name} has shape {list(stored[name].shape)}"
            )
            raise CheckpointError(
                given,
                f"{list(shape)}, as config.json says",
                "Correct config.json, or fetch the checkpoint again.",
            )
    embedding = model.tensor_sources()["embed"].names
    if HEAD in stored and HEAD not in wanted and embedding:
        check_tied(stored[HEAD], stored[embedding[0]])
    # A head that is stored although it is tied. An untied head is used, so it is never left over.
    rest = stored.keys() - wanted.keys() - {HEAD}
    unused = model.info.unused_tensors
    if extra := {n for n in rest if not (_IGNORED.search(n) or n.startswith(unused))}:
        given = (
            f"the checkpoint has {_listing(extra)}, "
            f"which a {model.info.family} of this config.json does not have"
        )
        raise CheckpointError(
            given, "the tensors of the model only", "Correct config.json, or choose another model."
        )


def check_tied(
    head: StoredTensor | QuantizedTensor, embedding: StoredTensor | QuantizedTensor
) -> None:
    """Raise CheckpointError when a tied head is stored and differs from the embedding."""
    if head.shape == embedding.shape and all(
        np.array_equal(ours, theirs, equal_nan=True)
        for ours, theirs in zip(_pieces(head), _pieces(embedding), strict=True)
    ):
        return
    given = (
        "config.json ties the head to the embedding (tie_word_embeddings is true), and "
        f"{head.name!r} in {head.path.name} differs from {embedding.name!r} in "
        f"{embedding.path.name}"
    )
    todo = (
        "Set tie_word_embeddings to false if the model has a head of its own, or remove the tensor."
    )
    raise CheckpointError(given, "a tied head that equals the embedding, or is not stored", todo)


def _pieces(tensor: StoredTensor | QuantizedTensor) -> Iterator[np.ndarray]:
    """Yield the tensor [rows, features] in f32, some rows at a time."""
    whole = tensor.view()
    for row in range(0, whole.shape[0], _TIED_ROWS):
        yield whole[row : row + _TIED_ROWS].astype(np.float32)
        tensor.forget()


def _listing(names: Iterable[str], limit: int = 3) -> str:
    ordered = sorted(names)
    few = ", ".join(shown(name) for name in ordered[:limit])
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return f"{'tensor' if len(ordered) == 1 else 'tensors'} {few}{more}"
