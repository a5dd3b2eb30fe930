"""The OpenAI-compatible server: one address, any Engine behind it.

    client ── auth ── limits ── routes ── Generation ── Engine (or Router: several replicas as one Engine)

`rill serve` builds it (rill/cli/serving.py); tests and workflows use `create_app` and `BackgroundServer`.
"""

from rill.inference.server.config import ServerConfig
from rill.inference.server.run import BackgroundServer, bind, create_app, serve

__all__ = ["BackgroundServer", "ServerConfig", "bind", "create_app", "serve"]
