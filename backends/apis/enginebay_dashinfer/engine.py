"""Engine: installs, starts, stops and releases models, and runs their requests."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from enginebay.errors import RequestError, error_line, shown
from enginebay.serving.prompts import Prompt
from enginebay_dashinfer.generation_config import ASGenerationConfigBuilder
from enginebay_dashinfer.inputs import (
    encode_text,
    fields_of,
    ids_of_input,
    one_dimension,
    refuse_empty,
    several_texts,
)
from enginebay_dashinfer.installed import InstalledModel
from enginebay_dashinfer.memory import ModelMemory
from enginebay_dashinfer.model_loader import ModelLoader
from enginebay_dashinfer.result_queue import ResultQueue
from enginebay_dashinfer.runtime_config import AsModelConfig, checked_config
from enginebay_dashinfer.sampling import to_sampling
from enginebay_dashinfer.statistics import AsEngineStat, engine_stat
from enginebay_dashinfer.statuses import AsStatus, RefusedError, status_of
from enginebay_dashinfer.stored_model import AsFileInfo, StoredModel

log = logging.getLogger("enginebay.dashinfer")

SUCCESS = AsStatus.ALLSPARK_SUCCESS


@dataclasses.dataclass(frozen=True, slots=True)
class DashRequest:
    """Handle of a request: the name of its model and its id."""

    model_name: str
    request_id: str


Handle = DashRequest | Sequence[DashRequest] | None
"""What start_request_* returns: None unless the status is a success."""

StartedRequest = tuple[AsStatus, Any, Any]
"""A status, a handle and a ResultQueue; lists of the last two for a list of texts."""


class Engine:
    """Models by name, each with a life cycle of its own, and their requests. All methods are
    thread-safe.

    A method that returns an AsStatus raises nothing for wrong input: it logs the reason, and
    `last_error` has it. close() releases all models, as the end of the process does.
    """

    def __init__(self) -> None:
        self._models: dict[str, InstalledModel] = {}
        self._requests: dict[DashRequest, tuple[InstalledModel, ResultQueue]] = {}
        self._memory = ModelMemory()
        self._lock = threading.Lock()
        self._reasons = threading.local()
        log.info("%s", self)

    def __repr__(self) -> str:
        return f"AsEngine: version={self.get_version_full()}"

    @property
    def last_error(self) -> str:
        """Why the last call of this thread returned another status than success; "" if none did."""
        return str(getattr(self._reasons, "text", ""))

    @property
    def model_names(self) -> list[str]:
        """Names of the installed models."""
        return list(self._models)

    def close(self) -> None:
        """Stop and release all models. Their names are free afterwards."""
        for name, model in list(self._models.items()):
            model.close()
            self._models.pop(name, None)

    def get_version_full(self) -> str:
        """Return the version of enginebay and of JAX."""
        return f"{importlib.metadata.version('enginebay')}/(jax:{jax.__version__})"

    def install_model(self, as_model_config_struct: AsModelConfig) -> AsStatus:
        """Check the settings and the files of a model; nothing is loaded.

        ALLSPARK_PARAM_ERROR for settings that cannot be used here, ALLSPARK_IO_ERROR for files that
        cannot be read, ALLSPARK_INVALID_CALL_ERROR for a name that is installed.
        """

        def install() -> None:
            settings = checked_config(as_model_config_struct)
            name = settings.model_name
            self._refuse_taken(name)
            model = InstalledModel(settings, self._memory)
            with self._lock:
                self._refuse_taken(name)
                self._models[name] = model

        return self._status("install_model", install)

    def build_model_from_config_struct(self, as_model_config_struct: AsModelConfig) -> AsStatus:
        """Call install_model(), the name that replaced this one."""
        return self.install_model(as_model_config_struct)

    def start_model(self, model_name: str) -> AsStatus:
        """Load a model that is initial or stopped, warm it up, and accept requests.

        ALLSPARK_CACHE_MEMORY_OUT when the cache has no room for one request of the max length,
        ALLSPARK_PARAM_ERROR when the model does not fit, ALLSPARK_INVALID_CALL_ERROR for a model
        that runs. The state then stays as it was, and nothing stays allocated.
        """
        return self._status("start_model", lambda: self._model(model_name).start())

    def stop_model(self, model_name: str) -> AsStatus:
        """Refuse further requests, interrupt those under way, and end the model's threads. The
        model stays in memory. ALLSPARK_INVALID_CALL_ERROR for a model that does not run.
        """
        return self._status("stop_model", lambda: self._model(model_name).stop())

    def release_model(self, model_name: str) -> AsStatus:
        """Free a model that does not run, and its name. ALLSPARK_INVALID_CALL_ERROR for a model
        that runs.
        """

        def release() -> None:
            model = self._model(model_name)
            model.release()
            with self._lock:
                self._models.pop(model_name, None)
                for handle in [one for one in self._requests if one.model_name == model_name]:
                    if self._requests[handle][0] is model:
                        del self._requests[handle]

        return self._status("release_model", release)

    def unload_device_mem(self, model_name: str) -> AsStatus:
        """Free the weights and the cache of a model that does not run. It stays installed."""
        return self._status("unload_device_mem", lambda: self._model(model_name).unload())

    def load_device_mem(self, model_name: str) -> AsStatus:
        """Load a model that does not run back into memory; start_model() does so by itself."""

        def load() -> None:
            model = self._model(model_name)
            model.require_idle("load_device_mem")
            model.load()

        return self._status("load_device_mem", load)

    def load_lora(self, model_name: str, lora_name: str, lora_path: str) -> AsStatus:
        """Read an adapter in the format of PEFT from a folder, for requests with this lora_name."""
        return self._status(
            "load_lora", lambda: self._model(model_name).load_adapter(lora_name, lora_path)
        )

    def unload_lora(self, model_name: str, lora_name: str) -> AsStatus:
        """Forget an adapter. ALLSPARK_LORA_IN_USE while a request uses it."""
        return self._status(
            "unload_lora", lambda: self._model(model_name).unload_adapter(lora_name)
        )

    def start_request_ids(
        self,
        model_name: str,
        model: ModelLoader | None,
        input_ids: Any,
        generate_config_builder: ASGenerationConfigBuilder,
    ) -> StartedRequest:
        """Start a request with token ids: a list, or a one-dimensional array of NumPy, JAX or
        torch. Returns at once: the status, the handle and the queue (None and None unless the
        status is a success). `model` is not used.

        ValueError for ids in more than one dimension, and for another type.
        """
        ids = one_dimension(input_ids)
        return self._start("start_request_ids", model_name, lambda _: ids, generate_config_builder)

    def start_request_text(
        self,
        model_name: str,
        model: ModelLoader | None,
        input_str_or_array: str | Sequence[str],
        generate_config_builder: ASGenerationConfigBuilder,
    ) -> StartedRequest:
        """Start a request with a text, or one request for each of several texts; then handle and
        queue are lists, and all requests are started or none. `model` tokenises the texts; None:
        the installed model does.
        """
        texts = input_str_or_array
        if isinstance(texts, str):
            return self._start(
                "start_request_text",
                model_name,
                lambda installed: encode_text(installed, model, texts),
                generate_config_builder,
                takes_media=False,
            )
        call = "start_request_text"
        return self._start_each(call, model_name, model, texts, generate_config_builder)

    def start_request(
        self,
        model_name: str,
        inputs: Mapping[str, Any],
        generate_config: Mapping[str, Any] | None = None,
    ) -> StartedRequest:
        """Start a request with {"input_ids": ...}: a DLPack capsule of [tokens] or [1, tokens], or
        what start_request_ids() accepts, and with the fields of a generation.
        """
        token_ids = ids_of_input(inputs)
        fields = {} if generate_config is None else generate_config
        builder = ASGenerationConfigBuilder().update(fields)
        return self._start("start_request", model_name, lambda _: token_ids, builder)

    def stop_request(self, model_name: str, request_handle: Handle) -> AsStatus:
        """End a request, waiting or running. Its tokens so far stay in its queue."""

        def stop() -> None:
            for handle, model, _ in self._found(model_name, request_handle):
                model.abort(handle.request_id)

        return self._status("stop_request", stop)

    def sync_request(self, model_name: str, request_handle: Handle) -> AsStatus:
        """Wait for the end of a request."""

        def wait() -> None:
            for _, _, results in self._found(model_name, request_handle):
                results.wait()

        return self._status("sync_request", wait)

    def release_request(self, model_name: str, request_handle: Handle) -> AsStatus:
        """End a request if it has not ended, and forget it: its handle is invalid afterwards."""

        def release() -> None:
            found = self._found(model_name, request_handle)
            for handle, model, _ in found:
                model.abort(handle.request_id)
            with self._lock:
                for handle, _, _ in found:
                    self._requests.pop(handle, None)

        return self._status("release_request", release)

    def get_as_engine_stat(self, model_name: str) -> AsEngineStat:
        """Return the figures of a model, without those of its cache while it is not in memory.
        InputError (a ValueError) for an unknown model.
        """
        model = self._model(model_name)
        loaded = model.loaded
        if loaded is None:
            return AsEngineStat(model_name=model_name)
        service = loaded.service
        counts = service.num_requests
        return service.call(
            lambda: engine_stat(
                model_name, model.plan, service.parts.engine, counts, model.counters
            )
        )

    def get_op_profiling_info(self, model_name: str) -> str:
        """Return a table of the time that the steps of a model took, by kind. A step is one
        compiled program, whose ops have no times of their own. InputError for an unknown model.
        """
        return self._model(model_name).counters.table()

    def get_file_information(self, as_model_path: str, as_param_path: str) -> AsFileInfo:
        """Return the versions that wrote a serialised model. CheckpointError for other files."""
        return StoredModel(as_model_path, as_param_path).versions()

    def _start(
        self,
        call: str,
        model_name: str,
        ids_of: Callable[[InstalledModel], list[int]],
        builder: ASGenerationConfigBuilder,
        *,
        takes_media: bool = True,
    ) -> StartedRequest:
        started: list[tuple[DashRequest, ResultQueue]] = []

        def start() -> None:
            model = self._model(model_name)
            started.extend(self._submit(model, [ids_of(model)], builder, takes_media=takes_media))

        status = self._status(call, start)
        return (status, *started[0]) if started else (status, None, None)

    def _start_each(
        self,
        call: str,
        model_name: str,
        loader: ModelLoader | None,
        texts: Sequence[str],
        builder: ASGenerationConfigBuilder,
    ) -> StartedRequest:
        started: list[tuple[DashRequest, ResultQueue]] = []

        def start() -> None:
            model = self._model(model_name)
            prompts = [encode_text(model, loader, text) for text in several_texts(texts)]
            started.extend(self._submit(model, prompts, builder, takes_media=False))

        status = self._status(call, start)
        if status is not SUCCESS:
            return status, None, None
        return status, [handle for handle, _ in started], [results for _, results in started]

    def _submit(
        self,
        model: InstalledModel,
        prompts: list[list[int]],
        builder: ASGenerationConfigBuilder,
        *,
        takes_media: bool,
    ) -> Iterator[tuple[DashRequest, ResultQueue]]:
        fields, longest = fields_of(builder), model.settings.engine_max_length
        model.require_running("a request")
        given: list[Prompt] = []
        generations = []
        for ids in prompts:
            if not ids:
                refuse_empty("a prompt without tokens")
            one = to_sampling(fields, len(ids), longest)
            if one.media is not None and not takes_media:
                todo = "Call start_request_ids() with placeholder tokens."
                raise RequestError("mm_info with a text", "mm_info with token ids", todo)
            given.append(ids if one.media is None else one.media.segments(ids))
            generations.append(one)
        name = model.settings.model_name
        with model.lock:  # until the handles are known, the model cannot be released
            for request_id, results in model.submit(given, generations):
                handle = DashRequest(name, request_id)
                with self._lock:
                    self._requests[handle] = (model, results)
                yield handle, results

    def _found(
        self, model_name: str, given: Handle
    ) -> list[tuple[DashRequest, InstalledModel, ResultQueue]]:
        """Return the requests of a handle or of several."""
        listed = list(given) if isinstance(given, list | tuple) else [given]
        with self._lock:
            found = [
                (one, *self._requests[one])
                for one in listed
                if isinstance(one, DashRequest)
                and one.model_name == model_name
                and one in self._requests
            ]
        if not listed or len(found) < len(listed):
            raise RefusedError(
                AsStatus.ALLSPARK_ILLEGAL_REQUEST_ID,
                f"request {shown(given)} of model {shown(model_name)}",
                "the handle of a request of this model that was not released",
                "Keep the handle that start_request_* returned.",
            )
        return found

    def _model(self, name: str) -> InstalledModel:
        model = self._models.get(name) if isinstance(name, str) else None
        if model is None:
            installed = ", ".join(self._models) or "none is installed"
            todo = "Call install_model() first."
            raise RequestError(f"model {shown(name)}", installed, todo)
        return model

    def _refuse_taken(self, name: str) -> None:
        if name in self._models:
            raise RefusedError(
                AsStatus.ALLSPARK_INVALID_CALL_ERROR,
                f"model name {shown(name)}, which is installed",
                "another name",
                "Release the model first, or choose another name.",
            )

    def _status(self, call: str, run: Callable[[], object]) -> AsStatus:
        """Run a call, and return its status. The reason of a failure is logged."""
        try:
            run()
        except Exception as error:  # every error is a status of the API
            self._reasons.text = error_line(error)
            status = status_of(error)
            trace = status is AsStatus.ALLSPARK_UNKNOWN_ERROR
            log.log(logging.ERROR, "%s: %s (%s)", call, self.last_error, status, exc_info=trace)
            return status
        self._reasons.text = ""
        return SUCCESS
