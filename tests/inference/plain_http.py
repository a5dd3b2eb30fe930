"""One HTTP client for all tests that ask a server in passing: `httpx.get` makes a client for each call, and that reads
the machine's certificates, which takes 45 ms. No connection is kept: servers that have gone leave nothing."""

from __future__ import annotations

import httpx

http = httpx.Client(
    verify=False,  # plain http on this machine
    trust_env=False,
    timeout=60,
    limits=httpx.Limits(max_keepalive_connections=0),
)
