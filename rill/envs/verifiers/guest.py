"""Runs in the user's own Python, where verifiers (0.3.1 or 0.4) is installed. Nothing of rill is imported here.

    python guest.py tasks    one line of JSON to a task: what the environment server is to be told, and what it asks
    python guest.py serve    one line {"address", "agents"}, then verifiers' environment server until the input ends

The first line of standard input says which environment: {"id", "arguments", "limit"}. verifiers plays a seat by a
program that it starts for every episode; seats for which nobody chose one are played here by a loop in this process.
"""

import asyncio
import contextlib
import functools
import importlib
import itertools
import json
import logging
import os
import signal
import sys
import threading
import traceback
import types
from typing import Any

HARNESS = "rill_chat"
"""The name under which verifiers finds the loop below."""
REPLACED = ("bash", "null")
"""Harnesses that verifiers takes by itself. Both start a program; the first hands out a shell on this machine."""
LAST_WORD_S = 10.0


def main() -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the package prints goes to standard error
    request = json.loads(sys.stdin.readline())
    share_certificates()
    try:
        served: Any = Classic(request) if is_classic(request["id"]) else Native(request)
    except Exception as error:  # noqa: BLE001  boundary: a package may raise anything; its last line is what is shown
        traceback.print_exc()
        raise SystemExit(f"\n{type(error).__name__}: {error}") from None
    if sys.argv[1] == "tasks":
        for task in itertools.islice(served.tasks(), request["limit"] or None):
            out.write(json.dumps(task, default=str) + "\n")
        return
    server = served.server("tcp://127.0.0.1:0")
    out.write(json.dumps({"address": server.address, "agents": served.agents}) + "\n")
    threading.Thread(target=end_with_input, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(server.run())


def share_certificates() -> None:
    """verifiers makes a client for every episode, which would read all certificates: longer than many an answer."""
    with contextlib.suppress(ImportError, AttributeError):
        transport: Any = importlib.import_module("httpx._transports.default")
        transport.create_ssl_context = functools.cache(transport.create_ssl_context)


def end_with_input() -> None:
    """Whoever started this process is gone, or has closed it: tool servers are given the time to end."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(LAST_WORD_S)
    os._exit(0)


def is_classic(name: str) -> bool:
    """Whether a package has the API from before version 0.4: a function load_environment."""
    module = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    try:
        return hasattr(importlib.import_module(module), "load_environment")
    except ModuleNotFoundError as error:
        if error.name != module:  # the package is there, and something that it needs is not
            raise
        return False


class Classic:
    """load_environment(): the API of verifiers 0.3.1 and before. Its own server speaks another protocol than that of
    tasksets, so its runs are served here by theirs."""

    agents = ("agent",)

    def __init__(self, request: dict[str, Any]) -> None:
        verifiers = importlib.import_module("verifiers")
        if not hasattr(verifiers, "load_environment"):
            raise SystemExit(
                f"{request['id']} is written for verifiers before 0.4: install verifiers==0.3.1 in {sys.executable}"
            )
        self._environment = verifiers.load_environment(request["id"], **request["arguments"])
        if getattr(self._environment, "requires_group_rollouts", False):
            raise SystemExit(f"{request['id']} scores whole groups at once, which is not supported")
        try:
            self._rows = self._environment.get_dataset()
        except ValueError:  # an environment for evaluation alone
            self._rows = self._environment.get_eval_dataset()

    def tasks(self) -> Any:
        for number, row in enumerate(self._rows):
            yield {"run": {"task_idx": number}, "prompt": row.get("prompt"), "answer": row.get("answer")}

    def server(self, address: str) -> "ClassicServer":
        return ClassicServer(self.run, address)

    async def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        clients = importlib.import_module("verifiers.clients")
        kinds = importlib.import_module("verifiers.types")
        client = clients.resolve_client(
            kinds.ClientConfig(
                api_base_url=asked["client"]["base_url"], api_key_var=asked["client"]["api_key_var"]
            )
        )
        try:
            row = self._rows[asked["task_idx"]]
            played = await self._environment.run_rollout(row, client, asked["model"], dict(asked["sampling"]))
        finally:
            with contextlib.suppress(Exception):
                await client.close()
        error = played.get("error")
        errors = (
            [error if isinstance(error, dict) else {"type": "Error", "message": str(error)}] if error else []
        )
        trace = {
            "id": "",
            "agent": {"name": "agent"},
            "rewards": {"reward": {"score": played.get("reward") or 0.0}},
            "metrics": played.get("metrics") or {},
            "errors": errors,
            "ok": not errors,
        }
        return {"ok": not errors, "errors": [], "traces": [trace]}


class ClassicServer:
    """The environment server's protocol: [client, id, method, payload] in, [client, id, result] out."""

    def __init__(self, run: Any, address: str) -> None:
        self._run = run
        self._msgpack = importlib.import_module("msgpack")
        self._zmq = importlib.import_module("zmq.asyncio")
        self._socket = self._zmq.Context.instance().socket(importlib.import_module("zmq").ROUTER)
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(importlib.import_module("zmq").LAST_ENDPOINT)
        self._runs: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        while True:
            client, name, method, payload = await self._socket.recv_multipart()
            asked = self._msgpack.unpackb(payload, raw=False)
            if method == b"run":
                self._runs[name.decode()] = asyncio.ensure_future(self._answer(client, name, asked))
            elif method == b"cancel" and (running := self._runs.get(asked["request_id"])) is not None:
                running.cancel()

    async def _answer(self, client: bytes, name: bytes, asked: dict[str, Any]) -> None:
        try:
            result = {"success": True, "episode": await self._run(asked)}
        except Exception as error:  # noqa: BLE001  boundary: a package may raise anything; it is told
            result = {"success": False, "error": f"{type(error).__name__}: {error}"}
        finally:
            self._runs.pop(name.decode(), None)
        await self._socket.send_multipart([client, name, self._msgpack.packb(result, default=str)])


class Native:
    """Tasksets and environments of verifiers.v1."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._loaders = importlib.import_module("verifiers.v1.utils.loaders")
        sys.modules[HARNESS] = harness_module()
        self._config = self._configuration(request["id"], dict(request["arguments"]))
        seat_type = importlib.import_module("verifiers.v1.configs.agent").AgentConfig
        self.agents = tuple(name for name, value in self._config if isinstance(value, seat_type))

    def tasks(self) -> Any:
        for task in self._loaders.load_taskset(self._config.taskset):
            data = task.data.model_dump(mode="json")
            system, prompt = data.get("system_prompt"), data.get("prompt")
            asked = (
                prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}] * bool(prompt)
            )
            before = [{"role": "system", "content": system}] * bool(system)
            yield {"run": {"task_data": data}, "prompt": before + asked, "answer": data.get("answer")}

    def server(self, address: str) -> Any:
        serve = importlib.import_module("verifiers.v1.serve")
        return serve.EnvServer(config=self._config, address=address)

    def _configuration(self, name: str, data: dict[str, Any]) -> Any:
        taskset = data["taskset"] = {"id": name, **data.get("taskset", {})}
        kind = self._loaders.env_config_type(taskset["id"], data.get("id", ""))
        bundled = self._loaders.default_harness_id(taskset["id"])
        agent_type = importlib.import_module("verifiers.v1.configs.agent").AgentConfig
        for seat, field in kind.model_fields.items():
            if isinstance(field.default, agent_type):
                data[seat] = seated(seat, field.default, dict(data.get(seat, {})), bundled)
        return self._loaders.resolve_env_config(data)


def seated(seat: str, default: Any, chosen: dict[str, Any], bundled: str) -> dict[str, Any]:
    """How a seat is played, where neither the user nor the package says. The model's name tells the seats apart."""
    authored = bundled if default.harness is None else default.harness.id
    if "harness" not in chosen and authored in REPLACED:
        chosen = {"runtime": {"type": "subprocess"}, **chosen, "harness": {"id": HARNESS}}
    return {"model": default.model or seat, **chosen}


def harness_module() -> types.ModuleType:
    """A harness of verifiers': the conversation of a seat, its MCP tools called, without a program of its own."""
    harness = importlib.import_module("verifiers.v1.harness")
    configs = importlib.import_module("verifiers.v1.configs.harness")
    result = importlib.import_module("verifiers.v1.runtimes").ProgramResult
    to_wire = importlib.import_module("verifiers.v1.dialects.chat").message_to_wire

    class ChatConfig(configs.HarnessConfig):  # type: ignore[misc,name-defined]
        pass

    class Chat(harness.Harness[ChatConfig]):  # type: ignore[misc,name-defined]
        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [to_wire(message) for message in prompt or ()]
            servers = {
                name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()
            }
            error = await converse(endpoint, secret, ctx.model, messages, servers)
            return result(exit_code=int(bool(error)), stdout="", stderr=error)

    module = types.ModuleType(HARNESS)
    module.__all__ = ["Chat"]  # type: ignore[attr-defined]
    module.Chat = Chat  # type: ignore[attr-defined]
    return module


async def converse(
    endpoint: str, secret: str, model: str, messages: list[dict[str, Any]], servers: dict[str, Any]
) -> str:
    """Until the model answers without a call; what went wrong, or "". verifiers knows which refusal ends a run."""
    httpx = importlib.import_module("httpx")
    mcp = importlib.import_module("verifiers.v1.harnesses.utils.mcp") if servers else None
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=None, trust_env=False))
        tools: list[dict[str, Any]] = []
        dispatch: dict[str, Any] = {}
        connected: dict[str, Any] = {}
        if mcp is not None:
            tools, dispatch, connected = await mcp.connect_mcp({"mcpServers": servers}, stack)
        while True:
            body = {"model": model, "messages": messages, **({"tools": tools} if tools else {})}
            answer = await client.post(
                f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
            )
            if answer.status_code >= 400:
                return "" if "context_length_exceeded" in answer.text else answer.text[:2000]
            message = answer.json()["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return ""
            for call in message["tool_calls"]:
                content = await called(mcp, connected, dispatch, call["function"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


async def called(
    mcp: Any, connected: dict[str, Any], dispatch: dict[str, Any], function: dict[str, Any]
) -> Any:
    """What the model is told of its call."""
    if function["name"] not in dispatch:
        return f"error: there is no tool {function['name']!r}"
    try:
        arguments = json.loads(function["arguments"] or "{}")
        if not isinstance(arguments, dict):
            raise ValueError("not a JSON object")
    except ValueError as error:
        return f"error: the arguments are not valid JSON: {error}"
    try:
        return await mcp.call_mcp(connected, dispatch, function["name"], arguments)
    except Exception as error:  # noqa: BLE001  boundary: a tool server may raise anything; the model is told
        return f"error: {type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
