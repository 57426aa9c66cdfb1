"""The sampling fields of protocols that do not take all of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import BaseModel, create_model

from jaxserve.server.openai.requests import SAMPLING_FIELDS, Bounded, SamplingFields


def sampling_fields_without(name: str, excluded: Collection[str]) -> type[BaseModel]:
    """A model called ``name`` with the fields of SamplingParams but ``excluded``; a new field needs no line here."""
    fields: dict[str, Any] = {
        field: (SamplingFields.model_fields[field].annotation, None)
        for field in SAMPLING_FIELDS
        if field not in excluded
    }
    return create_model(name, __base__=Bounded, **fields)
