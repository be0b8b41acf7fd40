"""Enumerations of the DashInfer API, and the status that stands for an error."""

from __future__ import annotations

import enum

from enginebay.contracts.adapters import (
    AdapterCountError,
    AdapterInUseError,
    AdapterLoadedError,
    AdapterNotFoundError,
    AdapterRankError,
)
from enginebay.errors import (
    CheckpointError,
    EnginebayError,
    InputError,
    InternalError,
    PromptLengthError,
    StoppedError,
    UnsupportedError,
)


class AsStatus(enum.Enum):
    """Outcome of a call. `Engine.last_error` explains the last status that is no success."""

    ALLSPARK_SUCCESS = 0
    ALLSPARK_UNKNOWN_ERROR = 1
    ALLSPARK_PARAM_ERROR = 2
    ALLSPARK_IO_ERROR = 3
    ALLSPARK_MEMORY_ERROR = 4
    ALLSPARK_RUNTIME_ERROR = 5
    ALLSPARK_EXCEED_LIMIT_ERROR = 7
    ALLSPARK_INVALID_CALL_ERROR = 8
    ALLSPARK_EMPTY_REQUEST = 9
    ALLSPARK_ILLEGAL_REQUEST_ID = 10
    ALLSPARK_CACHE_MEMORY_OUT = 11
    ALLSPARK_REQUEST_DENIED = 12
    ALLSPARK_CHUNK_PREFILL = 14
    ALLSPARK_DEPRECATED = 20
    ALLSPARK_LORA_NUM_EXCEED_LIMIT_ERROR = 21
    ALLSPARK_LORA_RANK_EXCEED_LIMIT_ERROR = 22
    ALLSPARK_LORA_NOT_FOUND = 23
    ALLSPARK_LORA_ALREADY_LOADED = 24
    ALLSPARK_LORA_IN_USE = 25
    ALLSPARK_STREAMING = 200


class GenerateRequestStatus(enum.Enum):
    """Progress of a request. It only moves forward."""

    Init = 0
    """No token was generated yet."""
    ContextFinished = 1
    """The prompt is computed: the first token was generated."""
    Generating = 2
    GenerateFinished = 3
    """The request ended by itself, or by stop_request."""
    GenerateInterrupted = 4
    """The engine ended the request: its model was stopped, or its memory ran out."""
    InternalError = 5

    @property
    def is_end(self) -> bool:
        """Whether no further token will come."""
        return self.value >= GenerateRequestStatus.GenerateFinished.value


class AsCacheMode(enum.Enum):
    """How keys and values are stored: in the dtype of the model, or quantised."""

    AsCacheDefault = 0
    AsCacheQuantI8 = 1
    AsCacheQuantU4 = 2


class TargetDevice(enum.Enum):
    """Kind of device that a model runs on."""

    CUDA = "CUDA"
    CPU = "CPU"
    CPU_NUMA = "CPU_NUMA"


class ModelState(enum.Enum):
    """State of an installed model. docs/dashinfer.md has the calls that change it."""

    INITIAL = "initial"
    RUNNING = "running"
    STOPPED = "stopped"
    RELEASED = "released"


class RefusedError(InputError):
    """A call that the API answers with a status. `status` is never a success."""

    def __init__(self, status: AsStatus, given: str, allowed: str, todo: str) -> None:
        super().__init__(given, allowed, todo)
        self.status = status


STATUSES: tuple[tuple[type[BaseException], AsStatus], ...] = (
    (AdapterNotFoundError, AsStatus.ALLSPARK_LORA_NOT_FOUND),
    (AdapterLoadedError, AsStatus.ALLSPARK_LORA_ALREADY_LOADED),
    (AdapterInUseError, AsStatus.ALLSPARK_LORA_IN_USE),
    (AdapterRankError, AsStatus.ALLSPARK_LORA_RANK_EXCEED_LIMIT_ERROR),
    (AdapterCountError, AsStatus.ALLSPARK_LORA_NUM_EXCEED_LIMIT_ERROR),
    (PromptLengthError, AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR),
    (CheckpointError, AsStatus.ALLSPARK_IO_ERROR),
    (StoppedError, AsStatus.ALLSPARK_REQUEST_DENIED),
    (InputError, AsStatus.ALLSPARK_PARAM_ERROR),
    (UnsupportedError, AsStatus.ALLSPARK_PARAM_ERROR),
    (InternalError, AsStatus.ALLSPARK_UNKNOWN_ERROR),
    (EnginebayError, AsStatus.ALLSPARK_RUNTIME_ERROR),
    (MemoryError, AsStatus.ALLSPARK_MEMORY_ERROR),
    (OSError, AsStatus.ALLSPARK_IO_ERROR),
)
"""The status for each class of errors; the first class that fits counts."""


def status_of(error: BaseException) -> AsStatus:
    """Return the status for an error."""
    if isinstance(error, RefusedError):
        return error.status
    fitting = (status for kind, status in STATUSES if isinstance(error, kind))
    return next(fitting, AsStatus.ALLSPARK_UNKNOWN_ERROR)
