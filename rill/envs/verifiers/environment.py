"""The environment `verifiers`: an episode is one run of the package's, whose model calls come back to rill's agents.

    [rollout.env]
    type = "verifiers"
    python = "~/vf/bin/python"          # has verifiers (0.3.1 or 0.4) and the package; rill's own Python need not
    id = "glossary"

A seat of the package's is an agent of the same name; the only seat of a package is `policy`. Each of its traces has its
own tokens and reward, so several attempts of one seat are `solver`, `solver.1`, ….
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from rill.envs.agent import Agent, Agents
from rill.envs.base import Environment
from rill.envs.verifiers.server import EnvServer, EpisodeFailed, SourceConfig
from rill.envs.verifiers.tasks import RUN
from rill.errors import DataError
from rill.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SESSION_HEADER = "x-session-id"
"""verifiers sends the id of the trace that a request belongs to."""


class VerifiersEnvironment(Environment):
    class Config(SourceConfig, Environment.Config):
        type: Literal["verifiers"] = "verifiers"

    config: Config

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, tokenizer)
        self._server = EnvServer(config)

    async def run(self, task: Prompt, agents: Agents) -> None:
        if RUN not in task.metadata:
            raise DataError('the environment "verifiers" needs its own tasks: data.type = "verifiers"')
        seats = _Seats(agents, await self._server.agents())
        agents.route = seats.route
        first = agents[seats.names[0]]
        episode = await self._server.run(task.metadata[RUN], first.base_url, first.name)
        seats.take_rewards(episode)

    def close(self) -> None:
        self._server.close()
        super().close()


class _Seats:
    """Which agent plays which trace."""

    def __init__(self, agents: Agents, seats: tuple[str, ...]) -> None:
        self._agents = agents
        self.names = ("policy",) if len(seats) == 1 else seats
        self._seats = dict(zip(seats, self.names, strict=True))
        self._traces: dict[str, str] = {}
        """Agent by trace."""

    def route(self, model: str, headers: Mapping[str, str]) -> Agent:
        trace, seat = headers.get(SESSION_HEADER, ""), self._seats.get(model, model)
        if trace not in self._traces:
            taken, name, number = set(self._traces.values()), seat, 0
            while name in taken:
                number += 1
                name = f"{seat}.{number}"
            self._traces[trace] = name
        return self._agents[self._traces[trace]]

    def take_rewards(self, episode: Mapping[str, Any]) -> None:
        """Raises where the run failed: what it sampled is kept then, and not trained on."""
        traces = list(episode.get("traces") or ())
        errors = [error for where in (episode, *traces) for error in where.get("errors") or ()]
        is_cut_off = self._agents.setting.counts.is_cut_off
        failed = episode.get("ok") is False or any(trace.get("ok") is False for trace in traces)
        if not traces or (failed and not is_cut_off):
            said = "; ".join(f"{e.get('type')}: {e.get('message')}"[:400] for e in errors) or "no trace"
            raise EpisodeFailed(f"verifiers: the run failed: {said}")
        counted = set()
        for trace in traces:
            seat = str((trace.get("agent") or {}).get("name") or "")
            name = self._traces.get(trace["id"], self._seats.get(seat, seat))
            agent = self._agents.known(name)
            if agent is None:  # a seat that talked to somebody else's model
                continue
            counted.add(name)
            if (trace.get("agent") or {}).get("trainable") is False:
                agent.is_trained = False
            rewards = trace.get("rewards") or {}
            agent.reward(sum(r["score"] * r.get("weight", 1.0) for r in rewards.values()))
            scores = {each: r["score"] for each, r in rewards.items()} if len(rewards) > 1 else {}
            for metric, value in {**scores, **(trace.get("metrics") or {})}.items():
                self._agents.metrics[f"{name}/{metric}" if len(self.names) > 1 else metric] = float(value)
        for name in set(self._traces.values()) - counted:  # given up by a retry
            self._agents[name].is_trained = False
