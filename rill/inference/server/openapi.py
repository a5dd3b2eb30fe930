"""The API's own description, from the handlers' bodies: /openapi.json, and a page that shows it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from rill import __version__
from rill.inference.server.errors import ERRORS

PAGE = """<!doctype html><title>rill</title><meta charset="utf-8">
<link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui.css"><div id="ui"></div>
<script src="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "/openapi.json", dom_id: "#ui"})</script>
"""

Described = tuple[str, str, str | None, type[BaseModel] | None, bool]
"""Method, path, what it is for, its body, whether that is needed."""


def describe(endpoints: Iterable[Described]) -> dict[str, Any]:
    listed = list(endpoints)
    bodies = dict.fromkeys(body for *_, body, _ in listed if body is not None)
    refs, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for method, path, about, body, needs_body in listed:
        told: dict[str, Any] = {
            "summary": (about or path).strip().partition("\n")[0],
            "responses": {"200": {"description": "OK"}} | ERRORS,
        }
        if "{" in path:
            name = path.partition("{")[2].removesuffix("}")
            told["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            ]
        if body is not None:
            schema = refs[body, "validation"]
            schema = schema if needs_body else {"anyOf": [schema, {"type": "null"}]}
            told["requestBody"] = {
                "required": needs_body,
                "content": {"application/json": {"schema": schema}},
            }
        paths.setdefault(path, {})[method.lower()] = told
    return {
        "openapi": "3.1.0",
        "info": {"title": "rill", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas.get("$defs", {})},
    }
