"""GET /v1/models."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from jaxserve.server.generation import GenerationService
from jaxserve.server.openai.responses import ModelCard, ModelList, ModelPermission, json_response


def model_routes(service: GenerationService) -> APIRouter:
    router = APIRouter()

    def card(name: str) -> ModelCard:
        model = service.model
        permission = ModelPermission(f"modelperm-{name}", model.created)
        return ModelCard(name, model.created, model.root, service.max_model_len, [permission])

    async def list_models() -> Response:
        """The names under which the model is served."""
        return json_response(ModelList([card(name) for name in service.model.names]))

    async def get_model(name: str) -> Response:
        """One of them."""
        return json_response(card(service.resolve_model(name)))

    router.add_api_route("/v1/models", list_models)
    router.add_api_route("/v1/models/{name:path}", get_model)
    return router
