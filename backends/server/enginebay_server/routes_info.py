"""Routes that say what is served, how it is, and why it was chosen."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from enginebay import __version__
from enginebay.errors import UnsupportedError
from enginebay_server.errors import ApiError
from enginebay_server.routes_generate import as_json
from enginebay_server.served import ServedModel
from enginebay_server.state import AppState


def inform_routes(state: AppState) -> APIRouter:
    """/v1/models, the probes, /version, /metrics and /explain."""
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> Response:
        adapted = [m.with_adapter(one, one) for m in state.models for one in m.adapters]
        records = [model_record(one) for one in (*state.models, *adapted)]
        return as_json({"object": "list", "data": records})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return as_json(model_record(state.models.find(name)))

    @router.get("/liveness")
    async def liveness() -> Response:
        return as_json({"status": "alive"})

    @router.get("/health")
    async def health() -> Response:
        """Whether the engines live."""
        status = {model.name: "alive" if model.is_alive else "dead" for model in state.models}
        return probe(state.is_alive, {"models": status})

    @router.get("/readiness")
    async def readiness() -> Response:
        """Whether requests are answered without compiling first, or at all with warmup "lazy"."""
        status = {model.name: model.status for model in state.models}
        return probe(state.is_ready, {"draining": state.is_draining, "models": status})

    @router.get("/version")
    async def version() -> Response:
        return as_json({"version": __version__})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Figures in Prometheus' text format; 501 without prometheus_client."""
        try:
            text = await state.metrics.text()
        except UnsupportedError as error:
            raise ApiError(501, str(error), code="not_installed") from None
        return Response(text, media_type="text/plain; version=0.0.4")

    @router.get("/explain")
    async def explain() -> Response:
        """The parts that run, and why."""
        return as_json({model.name: explained(model) for model in state.models})

    return router


def probe(is_good: bool, record: dict[str, Any]) -> Response:  # noqa: FBT001
    """200 or 503, with the same record."""
    response = as_json({"status": "ok" if is_good else "unavailable", **record})
    response.status_code = 200 if is_good else 503
    return response


def model_record(model: ServedModel) -> dict[str, Any]:
    """A model as /v1/models lists it; an adapter has the model as its parent."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "enginebay",
        "max_model_len": model.llm.config.max_model_len,
        **({} if model.lora is None else {"root": model.lora, "parent": model.base}),
    }


def compiling(model: ServedModel) -> str:
    """When the programs of a model are compiled, and how many of them are."""
    if model.warmup == "lazy":
        return "a program is compiled when a request needs it"
    if model.is_compiling and model.is_ready:
        done, total = model.progress
        coming = model.llm.engine.compilations.coming
        return (
            f"{done} of {total} programs are compiled, the others are compiled beside the "
            "requests; until then steps run in larger programs or in several parts"
        ) + (f"; next is {coming[0]}" if coming else "")
    return "every program is compiled before requests are answered"


def explained(model: ServedModel) -> dict[str, Any]:
    """What was chosen for a model, and why; and the memory of its engine."""
    plan, formats = model.llm.plan, model.formats
    parsers = {"tool_parser": formats.tool_choice, "reasoning_parser": formats.reasoning_choice}
    return {
        "family": plan.model.info.family,
        "choices": [
            {
                "setting": reason.setting,
                "chosen": reason.chosen,
                "why": reason.why,
                "refused": [{"name": name, "reason": why} for name, why in reason.refused],
            }
            for reason in plan.reasons
        ]
        + [
            {"setting": kind, "chosen": one.name, "why": one.why, "refused": []}
            for kind, one in parsers.items()
        ],
        "compiling": compiling(model),
        "stand_ins": [
            {"step": str(step), "ran": str(ran), "count": count}
            for (step, ran), count in model.llm.engine.compilations.stand_ins.copy().items()
        ],
        "memory": dataclasses.asdict(model.llm.engine.memory),
    }
