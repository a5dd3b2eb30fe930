"""The program of the paper's figure 5, in rill's words: a rollout and an actor over two channels.

The workers say nothing about where they run; the test places them on the same devices and on different ones.
"""

from __future__ import annotations

from rill import Channel, Cluster, Worker


class Rollout(Worker):
    def __init__(self) -> None:
        self.is_loaded = False
        self.num_loads = 0

    def onload(self) -> None:
        self.is_loaded = True
        self.num_loads += 1

    def offload(self) -> None:
        self.is_loaded = False

    def generate(self, prompts: Channel, rollouts: Channel) -> int:
        count = 0
        with self.device_lock(prompts, rollouts):
            for prompt in prompts:
                assert self.is_loaded
                rollouts.put({"prompt": prompt, "answer": prompt * 2}, weight=prompt + 1)
                count += 1
        return count

    def loads(self) -> int:
        return self.num_loads


class Actor(Rollout):
    def train(self, rollouts: Channel) -> int:
        total = 0
        with self.device_lock(rollouts):
            for rollout in rollouts:
                assert self.is_loaded
                total += rollout["answer"]
        return total


def run(cluster: Cluster, rollout_on: str, actor_on: str, num_steps: int, batch_size: int) -> list[int]:
    rollout = Rollout.launch_async(cluster, name="rollout", placement=rollout_on, threads=1)
    actor = Actor.launch_async(cluster, name="actor", placement=actor_on, threads=1)
    rollout.ready(60)
    actor.ready(60)
    data, rollouts = Channel.create(cluster, "data"), Channel.create(cluster, "rollouts")
    totals = []
    for _ in range(num_steps):
        generating = rollout.generate(data, rollouts)
        training = actor.train(rollouts)
        for prompt in range(batch_size):
            data.put(prompt)
        data.end()
        assert sum(generating.wait(timeout_s=60)) == batch_size
        rollouts.end()
        totals.append(sum(training.wait(timeout_s=60)))
    return totals
