"""Routes that load and unload adapters while the server runs, by vLLM's names."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from enginebay_server.bodies import Body, check_unknown
from enginebay_server.errors import ApiError
from enginebay_server.field_limits import AtMost, Name
from enginebay_server.routes_generate import as_json
from enginebay_server.state import AppState


class LoadAdapterBody(Body):
    """The body of /v1/load_lora_adapter: a name for requests, and a folder in PEFT's format."""

    lora_name: Name = Field(min_length=1)
    lora_path: Annotated[str, AtMost(4096, is_list=False)] = Field(min_length=1)
    model: Name | None = None
    """The model that gets the adapter; the first one if it is left out."""


class UnloadAdapterBody(Body):
    """The body of /v1/unload_lora_adapter."""

    lora_name: Name = Field(min_length=1)
    model: Name | None = None


def adapter_routes(state: AppState) -> APIRouter:
    """/v1/load_lora_adapter and /v1/unload_lora_adapter; no routes unless the settings allow
    them.
    """
    router = APIRouter()
    if not state.settings.lora_routes:
        return router

    @router.post("/v1/load_lora_adapter")
    async def load(body: LoadAdapterBody) -> Response:
        headers = check_unknown(body, state.settings)
        model = state.models.find(body.model)
        if body.lora_name in state.models.by_name:
            raise ApiError(
                409,
                f"lora_name = {body.lora_name!r}, which is the name of a model. Allowed: another "
                "name. Choose one.",
                param="lora_name",
                code="adapter_already_loaded",
            )
        await state.lanes.adapters.run(model.llm.load_adapter, body.lora_name, body.lora_path)
        return as_json({"status": "loaded", "lora_name": body.lora_name}, headers)

    @router.post("/v1/unload_lora_adapter")
    async def unload(body: UnloadAdapterBody) -> Response:
        headers = check_unknown(body, state.settings)
        model = state.models.find(body.model)
        await state.lanes.adapters.run(model.llm.unload_adapter, body.lora_name)
        return as_json({"status": "unloaded", "lora_name": body.lora_name}, headers)

    return router
