"""HuggingFaceModel and DashInferModel: a model before it is installed, and its conversion."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Self

from enginebay.compose.composition import find_family, open_checkpoint
from enginebay.compose.weight_format import choose_weight_format
from enginebay.config import make_config
from enginebay.contracts.model import Checkpoint
from enginebay.contracts.text import Tokenizer
from enginebay.errors import ConfigError, shown
from enginebay.plugins.registry import load_registry
from enginebay_dashinfer.generation_config import ASGenerationConfigBuilder
from enginebay_dashinfer.runtime_config import (
    GRAPH_SUFFIX,
    PARAM_SUFFIX,
    AsModelConfig,
    AsModelRuntimeConfigBuilder,
    checked_config,
)
from enginebay_dashinfer.statuses import TargetDevice
from enginebay_dashinfer.stored_model import DTYPES, StoredModel, write_model
from enginebay_models.tokenizer import as_transformers

FIRST = "Call load_model() first."


class ModelLoader(ABC):
    """A model before it is installed: its files, tokenizer and length, and builders with fitting
    values. Methods that return the loader can be chained.
    """

    def __init__(self, name: str) -> None:
        """`name`: of the serialised files. A "/" in it becomes "_"."""
        if not isinstance(name, str) or not name:
            raise ConfigError(f"model name {shown(name)}", "text that is not empty", "Pass a name.")
        self.name = name.replace("/", "_")
        self._checkpoint: Checkpoint | None = None
        self._tokenizer: Tokenizer | None = None

    @abstractmethod
    def load_model(self) -> Self:
        """Open the model's files. CheckpointError for files that cannot be used."""

    @abstractmethod
    def files(self) -> tuple[Path, Path]:
        """Return the two files of the serialised model. ConfigError when there are none yet."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The opened model. ConfigError before load_model()."""
        if self._checkpoint is None:
            raise ConfigError("a model that is not loaded", "a loaded model", FIRST)
        return self._checkpoint

    def read_model_config(self) -> Self:
        """Read the model's configuration; load_model() has done it already."""
        if self._checkpoint is None:
            self.load_model()
        return self

    def get_model_config(self) -> dict[str, Any]:
        """Return the values of the model's config.json."""
        return dict(self.read_model_config().checkpoint.config)

    def get_model_context_length(self) -> int:
        """Return the max tokens of prompt and output that the model was made for."""
        checkpoint = self.read_model_config().checkpoint
        family = find_family(load_registry(), checkpoint.architecture)
        return family.build(checkpoint.config, dtype="float32").info.max_model_len

    def init_tokenizer(self, padding_side: str = "left") -> Self:
        """Load the tokenizer. Prompts are not padded, so that `padding_side` must be left or right,
        and changes nothing.
        """
        if padding_side not in ("left", "right"):
            given = f"padding_side = {shown(padding_side)}"
            raise ConfigError(given, "left or right", "Leave padding_side out.")
        if self._tokenizer is None:
            self._tokenizer = self.read_model_config().checkpoint.load_tokenizer()
        return self

    def get_tokenizer(self) -> Any:
        """Return the tokenizer as transformers' class, or None before init_tokenizer()."""
        return None if self._tokenizer is None else as_transformers(self._tokenizer)

    def encode(self, text: str, max_prompt_tokens: int | None = None) -> list[int]:
        """Return the token ids of a text, with the errors of `Tokenizer.encode`."""
        tokenizer = self.init_tokenizer()._tokenizer
        assert tokenizer is not None, "init_tokenizer loads it"
        return tokenizer.encode(text, max_prompt_tokens=max_prompt_tokens)

    def create_reference_runtime_config_builder(
        self,
        engine_model_name: str,
        device_type: TargetDevice | str,
        device_ids: list[int],
        max_batch: int,
        max_context_length: int = -1,
    ) -> AsModelRuntimeConfigBuilder:
        """Return a builder with the serialised files, and the model's length unless
        `max_context_length` is another one than -1.
        """
        longest = self.get_model_context_length() if max_context_length == -1 else None
        builder = AsModelRuntimeConfigBuilder().model_name(engine_model_name)
        return (
            builder.model_file_path(*self.files())
            .compute_unit(device_type, device_ids)
            .max_length(max_context_length if longest is None else longest)
            .max_batch(max_batch)
        )

    def create_reference_generation_config_builder(
        self, runtimeConfig: AsModelConfig | None = None
    ) -> ASGenerationConfigBuilder:
        """Return a builder with the sampling that the model recommends, its end-of-sequence token,
        and the smaller one of the model's and the engine's max length.
        """
        checkpoint = self.read_model_config().checkpoint
        defaults = dict(checkpoint.sampling_defaults)
        eos = list(checkpoint.token_info.eos_token_ids)
        builder = ASGenerationConfigBuilder(defaults | ({"eos_token_id": eos} if eos else {}))
        if runtimeConfig is not None:
            engine_longest = checked_config(runtimeConfig).engine_max_length
            longest = min(self.get_model_context_length(), engine_longest)
            builder.max_length(longest)
        return builder


LLM = ModelLoader
"""The documented name of a model that requests are started with."""


class HuggingFaceModel(ModelLoader):
    """A model in the format of Hugging Face, and its conversion to the engine's own format."""

    def __init__(
        self,
        pretrain_model_name_or_path: str | Path,
        pretrain_model_name: str,
        in_memory_serialize: bool = False,
        user_set_data_type: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """`user_set_data_type`: dtype of the weights and the computation; None: that of the
        checkpoint. `in_memory_serialize` is what serialize() does. Code of a checkpoint is never
        run: trust_remote_code=True raises ConfigError (a ValueError).
        """
        super().__init__(pretrain_model_name)
        if user_set_data_type is not None and user_set_data_type not in DTYPES:
            given = f"user_set_data_type = {shown(user_set_data_type)}"
            raise ConfigError(given, ", ".join(DTYPES), "Pass one of these.")
        if trust_remote_code:
            todo = "Leave trust_remote_code out. A plugin adds a model family."
            raise ConfigError("trust_remote_code = True", "False", todo)
        self.path = str(pretrain_model_name_or_path)
        self.in_memory_serialize = in_memory_serialize
        self._given_dtype = user_set_data_type
        self._files: tuple[Path, Path] | None = None
        self._temporary: weakref.finalize | None = None

    @property
    def data_type(self) -> str:
        """The dtype of the weights and the computation."""
        config = self.read_model_config().checkpoint.config
        own = config.get("dtype", config.get("torch_dtype"))
        return self._given_dtype or (own if own in DTYPES else "bfloat16")

    def load_model(self, override_data_type: str | None = None) -> Self:
        """Open the checkpoint. Its weights are read when it is serialised. `override_data_type`
        replaces the dtype that the constructor got.
        """
        if override_data_type is not None and override_data_type not in DTYPES:
            given = f"override_data_type = {shown(override_data_type)}"
            raise ConfigError(given, ", ".join(DTYPES), "Pass one of these.")
        self._given_dtype = override_data_type or self._given_dtype
        registry = load_registry()
        self._checkpoint = open_checkpoint(registry, make_config({"model": self.path}), self.path)
        find_family(registry, self._checkpoint.architecture)
        return self

    def serialize(
        self,
        engine: object,
        model_output_dir: str | Path = "",
        enable_quant: bool = False,
        weight_only_quant: bool = False,
    ) -> Self:
        """Call serialize_to_memory() for in_memory_serialize=True, else serialize_to_path()."""
        if self.in_memory_serialize:
            return self.serialize_to_memory(engine, enable_quant, weight_only_quant)
        return self.serialize_to_path(engine, model_output_dir, enable_quant, weight_only_quant)

    def serialize_to_memory(
        self, engine: object, enable_quant: bool = False, weight_only_quant: bool = False
    ) -> Self:
        """Convert the model into a temporary folder. It is deleted by free_memory_serialize_file(),
        when the loader is garbage-collected, and when the process ends.
        """
        self.free_memory_serialize_file()
        folder = tempfile.mkdtemp(prefix="enginebay-model-")
        self._temporary = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return self._serialize(Path(folder), enable_quant, weight_only_quant)

    def serialize_to_path(
        self,
        engine: object,
        model_output_dir: str | Path = "",
        enable_quant: bool = False,
        weight_only_quant: bool = False,
        skip_if_exists: bool = False,
    ) -> Self:
        """Convert the model into a folder. With `skip_if_exists`, a serialised model that is there
        already is used.

        enable_quant: store the weights in 8 bits. Activations are rounded to 8 bits too, unless
        weight_only_quant.
        """
        if not str(model_output_dir):
            given, todo = "serialize_to_path without model_output_dir", "Pass a folder."
            raise ConfigError(given, "a folder", todo)
        prefix = Path(model_output_dir) / self.name
        files = Path(f"{prefix}{GRAPH_SUFFIX}"), Path(f"{prefix}{PARAM_SUFFIX}")
        if skip_if_exists and all(file.is_file() for file in files):
            StoredModel(*files)
            self._files = files
            return self
        return self._serialize(Path(model_output_dir), enable_quant, weight_only_quant)

    def _serialize(self, folder: Path, enable_quant: bool, weight_only_quant: bool) -> Self:
        checkpoint, registry = self.checkpoint, load_registry()
        family = find_family(registry, checkpoint.architecture)
        model = family.build(checkpoint.config, dtype=self.data_type)
        chosen = {"quantization": "int8"} if enable_quant else {}
        if enable_quant and not weight_only_quant:
            chosen["activation_quantization"] = "int8"
        config = make_config({"model": self.path, "dtype": self.data_type}, chosen)
        form, _ = choose_weight_format(registry, config, checkpoint, model, self.data_type)
        weights = checkpoint.load_weights(model, form=form, place=lambda *_: None)
        self._files = write_model(checkpoint, weights, form, folder / self.name)
        return self

    def files(self) -> tuple[Path, Path]:
        """Return the two files of the serialised model. ConfigError before it is serialised."""
        if self._files is None:
            todo = "Call serialize_to_memory(engine) or serialize_to_path(engine, folder) first."
            raise ConfigError("a model that is not serialised", "a serialised model", todo)
        return self._files

    def free_model(self) -> Self:
        """Close the checkpoint. A serialised model stays: it can be installed afterwards."""
        self._checkpoint = None
        return self

    def free_memory_serialize_file(self) -> Self:
        """Delete what serialize_to_memory() wrote. A model that was started from it goes on."""
        if self._temporary is not None:
            self._temporary()
            self._temporary = self._files = None
        return self


class DashInferModel(ModelLoader):
    """A serialised model in a folder."""

    def __init__(
        self, pretrain_model_name_or_path: str | Path, pretrain_model_name: str = "model"
    ) -> None:
        """`pretrain_model_name`: the name that its files begin with."""
        super().__init__(pretrain_model_name)
        self.path = Path(pretrain_model_name_or_path)

    def files(self) -> tuple[Path, Path]:
        """Return the two files of the model."""
        prefix = self.path / self.name
        return Path(f"{prefix}{GRAPH_SUFFIX}"), Path(f"{prefix}{PARAM_SUFFIX}")

    def load_model(self) -> Self:
        """Open the files. CheckpointError for files that cannot be used."""
        self._checkpoint = StoredModel(*self.files())
        return self

    def serialize_to_memory(self, engine: object) -> Self:
        """Do nothing: the model is serialised already."""
        return self

    def serialize_to_path(self, engine: object, model_output_dir: str | Path = "") -> Self:
        """Do nothing: the model is serialised already."""
        return self

    def free_model(self) -> Self:
        """Close the files."""
        self._checkpoint = None
        return self

    def free_memory_serialize_file(self) -> Self:
        """Do nothing: there are no temporary files."""
        return self
