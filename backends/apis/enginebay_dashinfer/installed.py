"""InstalledModel: a model in an engine, from its installation to its release."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from enginebay.contracts.adapters import required
from enginebay.contracts.text import Tokenizer
from enginebay.errors import CheckpointError, RequestError, shown
from enginebay.serving.prompts import Prompt
from enginebay_dashinfer.feeder import QueueFeeder
from enginebay_dashinfer.loaded import Loaded, warm_up
from enginebay_dashinfer.memory import ModelMemory
from enginebay_dashinfer.planning import plan_model
from enginebay_dashinfer.result_queue import ResultQueue
from enginebay_dashinfer.runtime_config import AsModelConfig
from enginebay_dashinfer.sampling import GenerationChoices
from enginebay_dashinfer.statistics import StepCounters
from enginebay_dashinfer.statuses import AsStatus, ModelState, RefusedError


class InstalledModel:
    """A model of an engine. `state` changes under `lock`; requests may come from any thread."""

    def __init__(self, settings: AsModelConfig, memory: ModelMemory) -> None:
        """Choose the parts of the model. `memory`: the account of the engine's models. Errors as in
        `planning.plan_model`.
        """
        self.settings = settings
        self._memory = memory
        self.plan = plan_model(settings)
        self.tokenizer: Tokenizer = self.plan.checkpoint.load_tokenizer()
        self.counters = StepCounters()
        self.lock = threading.RLock()
        self.state = ModelState.INITIAL
        self._loaded: Loaded | None = None
        self._feeder: QueueFeeder | None = None

    @property
    def loaded(self) -> Loaded | None:
        """What the model has in memory; None before the first start and after unload()."""
        return self._loaded

    def start(self) -> None:
        """Initial or stopped -> running. Loads and warms up the model if it is not in memory."""
        with self.lock:
            self._require("start_model", ModelState.INITIAL, ModelState.STOPPED)
            was_loaded = self._loaded is not None
            self.load()
            assert self._loaded is not None, "load() sets it"
            try:
                self._loaded.service.start()
                self._feeder = QueueFeeder()
                if self.state is ModelState.INITIAL:
                    warm_up(self._loaded, self._feeder)
                    self.counters.reset()
            except BaseException:
                self._halt()
                if not was_loaded:
                    self.unload()
                raise
            self.state = ModelState.RUNNING

    def stop(self) -> None:
        """Running -> stopped. Requests under way are interrupted; their queues stay readable."""
        with self.lock:
            self._require("stop_model", ModelState.RUNNING)
            self._halt()
            self.state = ModelState.STOPPED

    def release(self) -> None:
        """Initial or stopped -> released. Frees everything."""
        with self.lock:
            self.require_idle("release_model")
            self.unload()
            self.state = ModelState.RELEASED

    def close(self) -> None:
        """Any state -> released: stop and release the model."""
        with self.lock:
            if self.state is ModelState.RUNNING:
                self.stop()
            if self.state is not ModelState.RELEASED:
                self.release()

    def load(self) -> None:
        """Load the model into memory, if it is not there. Nothing stays allocated on an error."""
        with self.lock:
            if self._loaded is None:
                self._loaded = Loaded(self.plan, self.tokenizer, self.counters, self._memory)

    def unload(self) -> None:
        """Free the weights and the cache of a model that does not run."""
        with self.lock:
            self.require_idle("unload_device_mem")
            loaded, self._loaded = self._loaded, None
            if loaded is not None:
                loaded.close()

    def submit(
        self, prompts: Sequence[Prompt], generations: Sequence[GenerationChoices]
    ) -> list[tuple[str, ResultQueue]]:
        """Queue all prompts or none; returns the id and the queue of each."""
        with self.lock:
            self.require_running("a request")
            assert self._loaded is not None, "a running model is loaded"
            assert self._feeder is not None, "a running model has a feeder"
            return self._loaded.submit(self._feeder, prompts, generations)

    def require_running(self, call: str) -> None:
        """Raise RefusedError unless the model runs."""
        if self.state is ModelState.STOPPED:
            self._refuse(AsStatus.ALLSPARK_REQUEST_DENIED, call, "a running model")
        self._require(call, ModelState.RUNNING)

    def require_idle(self, call: str) -> None:
        """Raise RefusedError unless the model is initial or stopped."""
        self._require(call, ModelState.INITIAL, ModelState.STOPPED)

    def load_adapter(self, name: str, folder: str) -> None:
        """Read an adapter, for requests with lora_name = `name`."""
        todo = "Pass the folder of an adapter."
        if not isinstance(folder, str | Path):
            raise RequestError(f"lora_path = {shown(folder)}", "text", todo)
        if not Path(folder).exists():
            raise CheckpointError(f"{shown(str(folder))}, which does not exist", "a folder", todo)
        required(self.plan.adapters, f"load_lora({name!r})").load(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter that no request uses."""
        if not isinstance(name, str):
            raise RequestError(f"lora_name = {shown(name)}", "text", "Pass the adapter's name.")
        adapters = required(self.plan.adapters, f"unload_lora({name!r})")
        with self.lock:
            loaded = self._loaded
            if loaded is None:
                adapters.unload(name, ())
                return
            service = loaded.service
            service.call(lambda: adapters.unload(name, service.adapters_in_use))

    def abort(self, request_id: str) -> None:
        """End a request; an ended one is ignored."""
        loaded = self._loaded
        if loaded is not None:
            loaded.requests.abort(request_id)

    def _halt(self) -> None:
        """End the threads of a model that runs or begins to run."""
        assert self._loaded is not None, "it was started"
        feeder, self._feeder = self._feeder, None
        self._loaded.service.stop()
        if feeder is not None:
            feeder.close()

    def _require(self, call: str, *states: ModelState) -> None:
        if self.state not in states:
            allowed = " or ".join(f"a model that is {one.value}" for one in states)
            self._refuse(AsStatus.ALLSPARK_INVALID_CALL_ERROR, call, allowed)

    def _refuse(self, status: AsStatus, call: str, allowed: str) -> None:
        name = self.settings.model_name
        raise RefusedError(
            status,
            f"{call} for model {name!r}, which is {self.state.value}",
            allowed,
            "docs/dashinfer.md shows the states of a model.",
        )
