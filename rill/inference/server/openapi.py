"""The API's own description, from the handlers' bodies: /openapi.json, and a page that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic.json_schema import models_json_schema

from rill import __version__
from rill.inference.server.errors import ERRORS

if TYPE_CHECKING:
    from rill.inference.server.http import Endpoint

PAGE = """<!doctype html><title>rill</title><meta charset="utf-8">
<link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui.css"><div id="ui"></div>
<script src="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "/openapi.json", dom_id: "#ui"})</script>
"""


def describe(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    bodies = dict.fromkeys(each.body for each in endpoints if each.body is not None)
    refs, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        told: dict[str, Any] = {
            "summary": (each.handler.__doc__ or each.path).strip().partition("\n")[0],
            "responses": {"200": {"description": "OK"}} | ERRORS,
        }
        if "{" in each.path:
            name = each.path.partition("{")[2].removesuffix("}")
            told["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            ]
        if each.body is not None:
            schema = refs[each.body, "validation"]
            schema = schema if each.needs_body else {"anyOf": [schema, {"type": "null"}]}
            content = {"application/json": {"schema": schema}}
            told["requestBody"] = {"required": each.needs_body, "content": content}
        paths.setdefault(each.path, {})[each.method.lower()] = told
    return {
        "openapi": "3.1.0",
        "info": {"title": "rill", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas.get("$defs", {})},
    }
