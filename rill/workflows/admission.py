"""How many groups may be generated now: staleness is bounded by admission, never by throwing samples away.

    capacity = min( max_concurrent − running,  limit − (accepted + running) )
    limit = min( (max_lag + version + 1) · batch + extra,  steps of the run · batch )

`running` groups are admitted and unfinished, `accepted` groups finished and kept since the run began, `version`
counts training steps. max_lag 0 is synchronous training: one batch is generated, trained on, and only then the
next begins. A group that a filter drops stops running without being accepted, so its place is refilled by itself.
`extra` groups are begun beyond a batch so that the slowest need not be waited for; they are put back and go on with
the next batch (see GroupBuffer). The last batch has none: nothing is begun that no step is left for.
"""

from __future__ import annotations

from dataclasses import dataclass

NO_END = 1 << 62


@dataclass(slots=True, kw_only=True)
class Admission:
    batch_groups: int
    max_lag: int
    max_concurrent: int
    num_steps: int = NO_END
    """Groups beyond the last step's are not begun."""
    extra_groups: int = 0
    version: int = 0
    running: int = 0
    accepted: int = 0
    dropped: int = 0

    @property
    def capacity(self) -> int:
        ahead = (self.max_lag + self.version + 1) * self.batch_groups + self.extra_groups
        limit = min(ahead, self.num_steps * self.batch_groups)
        return max(0, min(self.max_concurrent - self.running, limit - (self.accepted + self.running)))

    def admit(self, count: int) -> None:
        assert count <= self.capacity, f"admitting {count} groups with room for {self.capacity}"
        self.running += count

    def finish(self, *, kept: bool) -> None:
        self.put_back()
        if kept:
            self.accepted += 1
        else:
            self.dropped += 1

    def put_back(self) -> None:
        """A group stopped running without an end."""
        assert self.running > 0, "a group finished that was never admitted"
        self.running -= 1

    def trained(self) -> None:
        self.version += 1

    def state(self) -> dict[str, int]:
        """What a resumed run needs. Groups that ran are admitted again (see GroupBuffer)."""
        return {"version": self.version, "accepted": self.accepted, "dropped": self.dropped}

    def load_state(self, state: dict[str, int]) -> None:
        self.version, self.accepted, self.dropped = state["version"], state["accepted"], state["dropped"]
        self.running = 0
