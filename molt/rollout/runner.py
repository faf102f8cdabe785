# SPDX-License-Identifier: Apache-2.0
"""The runner: leases groups, plays their rollouts against its engine, writes and announces shards.

    /lease ─▶ group task: num_samples × play ─▶ rows ─▶ ShardWriter ─▶ publish (fsync) ─▶ /announce

Many groups run at once on one event loop. A shard is published when it is old or big enough, or
when no group is running; the groups in it are announced after that, in one message.
"""

import asyncio
import json
import os
import secrets
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from molt import control
from molt.config import Config
from molt.data import Row, eval_data, load_prompts, resolve
from molt.records import TRAIN, AgentError, Group, GroupStatus, Lease, Sampling, Segment, Where
from molt.rollout.client import Client
from molt.rollout.episode import Episode, Limits, play
from molt.rollout.render import Renderer
from molt.rollout.session import Session
from molt.store.schema import SegmentRow
from molt.store.shards import ShardWriter, to_batch


@dataclass(frozen=True)
class Task:
    """One set of prompts and how they are sampled."""

    rows: list[Row]
    num_samples: int
    sampling: Sampling


def tasks_of(config: Config) -> dict[str, Task]:
    """The training task and the evaluations, by name."""
    section = config.sampling
    tasks = {
        TRAIN: Task(
            load_prompts(config.data),
            section.num_samples,
            Sampling(temperature=section.temperature, max_tokens=section.max_tokens),
        )
    }
    for name, e in config.eval.items():
        tasks[name] = Task(
            load_prompts(eval_data(config, name)),
            e.num_samples,
            Sampling(temperature=e.temperature, max_tokens=section.max_tokens),
        )
    return tasks


class Runner:
    """One runner process's work."""

    def __init__(self, run: Path, config: Config, engine: int, index: int, socket: Path) -> None:
        self.name = f"runner-{engine}-{index}-{secrets.token_hex(4)}"
        self._config, self._run, self._engine = config, run, engine
        self._tasks = tasks_of(config)
        self._renderer = Renderer(config.model.path)
        self._make = partial(resolve(config.agent.name), **config.agent.args)
        self._limits = Limits(config.agent.max_turns, config.agent.timeout_s)
        self._client = Client(socket, config.engine)
        self._control = control.Client(run)
        self._writer = ShardWriter(run, self.name, config.session.compression)
        self._leases: dict[int, Lease] = {}  # group → lease it works on or has not announced yet
        self._groups: set[asyncio.Task[None]] = set()
        self._waiting: list[Group] = []  # in the open shard, without their place in it
        self._finished = asyncio.Event()
        self._stopped = False

    async def run(self) -> None:
        """Work until the coordinator says stop, then give back what is unfinished."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._publish())
                await self._lease(group)
                self._stopped = True
                for task in self._groups:
                    task.cancel()
                self._finished.set()
            unfinished = tuple(self._leases.values())
            await self._control.call(
                control.LEASE_END,
                control.LeaseEndRequest(runner=self.name, leases=unfinished, reason="stopped"),
            )
        finally:
            await self._client.close()
            await self._control.close()

    # ------------------------------------------------------------ leases

    async def _lease(self, group: asyncio.TaskGroup) -> None:
        """Ask for work whenever there is room for a group, until told to stop."""
        num_samples = self._config.sampling.num_samples
        while True:
            free = self._config.engine.rollouts - num_samples * len(self._groups)
            if free < num_samples:
                await asyncio.wait(self._groups, return_when=asyncio.FIRST_COMPLETED)
                continue
            reply = await self._control.call(control.LEASE, self._request(free))
            for lease in reply.leases:
                self._leases[lease.group] = lease
                task = group.create_task(self._work(lease))
                self._groups.add(task)
                task.add_done_callback(self._done)
            if reply.stop:
                return

    def _request(self, free: int) -> control.LeaseRequest:
        holding = tuple(lease.lease for lease in self._leases.values())
        return control.LeaseRequest(
            runner=self.name, engine=self._engine, free=free, holding=holding
        )

    def _done(self, task: asyncio.Task[None]) -> None:
        self._groups.discard(task)
        self._finished.set()

    async def _work(self, lease: Lease) -> None:
        """Play all rollouts of a group; one that keeps failing fails the group, which is kept."""
        task = self._tasks[lease.task]
        plays = [self._rollout(lease, task, i) for i in range(task.num_samples)]
        episodes = await _gather(plays)
        status, reason = self._judge(lease, episodes)
        rows = [r for i, e in enumerate(episodes) for r in self._rows(lease, i, e, status, reason)]
        self._writer.add(to_batch(rows))
        self._waiting.append(_group_record(lease, episodes, rows, status, reason))

    async def _rollout(self, lease: Lease, task: Task, index: int) -> Episode:
        """One rollout, played again while its agent fails; the last failure is an episode too."""
        row, attempt = task.rows[lease.prompt], 0
        while True:
            key = f"{lease.lease}-{index}-{attempt}"
            session = Session(key, self._client, self._config.model.max_len)
            try:
                return await play(
                    self._make, row, session, self._renderer, task.sampling, self._limits
                )
            except AgentError as e:
                if attempt == self._config.agent.retries:
                    return Episode(session, status="error", reason=str(e))
            attempt += 1

    def _judge(self, lease: Lease, episodes: list[Episode]) -> tuple[GroupStatus, str]:
        """The group's status: a whole group is trained, or it is dropped whole with its reason."""
        for episode in episodes:
            if episode.status == "error":
                return "failed", episode.reason
        if lease.task != TRAIN:
            return "ready", ""
        rewards = {e.reward for e in episodes if e.reward is not None}
        if not rewards:
            return "filtered", "no rollout could be scored"
        if self._config.pool.filter_constant and len(rewards) == 1:
            return "filtered", f"all rewards equal {rewards.pop()}"
        return "ready", ""

    def _rows(
        self, lease: Lease, rollout: int, episode: Episode, status: str, reason: str
    ) -> list[SegmentRow]:
        """The segments of one rollout as shard rows; a rollout without any is one empty row."""
        paths = episode.session.paths() or [None]
        kept = status == "ready" or episode.status == "error"
        return [
            SegmentRow(
                run=self._config.run.name,
                prompt=lease.prompt,
                group=lease.group,
                rollout=rollout,
                segment=i,
                num_segments=len(paths),
                task=lease.task,
                agent=self._config.agent.name,
                token_ids=path.token_ids if path else np.empty(0, np.int32),
                action_spans=path.action_spans if path else np.empty((0, 2), np.int32),
                behavior_logprobs=path.logprobs if path else np.empty(0, np.float32),
                version_spans=path.version_spans if path else np.empty((0, 2), np.int64),
                sampling=path.samplings if path else (),
                reward=episode.reward,
                turn_rewards=tuple(episode.turn_rewards),
                status=episode.status if kept else "filtered",
                reason=episode.reason if kept else reason,
                metrics=json.dumps(episode.metrics),
                messages=json.dumps(episode.messages, ensure_ascii=False),
                engine=str(self._engine),
                seconds=episode.seconds,
            )
            for i, path in enumerate(paths)
        ]

    # ------------------------------------------------------------ shards

    async def _publish(self) -> None:
        """Close the shard when it is old or big enough, or when nothing else is running."""
        while not self._stopped or self._groups:
            await self._finished.wait()
            self._finished.clear()
            section = self._config.session
            while self._waiting:
                due = section.shard_age_s - self._writer.age_s
                if due <= 0 or self._writer.bytes >= section.shard_bytes or not self._groups:
                    await self._flush()
                    continue
                try:
                    await asyncio.wait_for(self._finished.wait(), due)
                except TimeoutError:
                    continue
                self._finished.clear()

    async def _flush(self) -> None:
        """Publish the open shard and announce its groups."""
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        places = await loop.run_in_executor(None, self._writer.publish)
        groups, self._waiting = self._waiting[: len(places)], self._waiting[len(places) :]
        placed = tuple(_placed(g, w) for g, w in zip(groups, places, strict=True))
        await self._control.call(
            control.ANNOUNCE, control.Announce(runner=self.name, groups=placed)
        )
        for group in groups:
            del self._leases[group.group]


def _placed(group: Group, where: Where) -> Group:
    return Group(
        **{f: getattr(group, f) for f in group.__struct_fields__ if f != "where"}, where=where
    )


async def _gather(plays: Iterable[Coroutine[Any, Any, Episode]]) -> list[Episode]:
    """All episodes; the first failure that is not the agent's cancels the others and is raised."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(p) for p in plays]
    return [t.result() for t in tasks]


def _group_record(
    lease: Lease,
    episodes: list[Episode],
    rows: list[SegmentRow],
    status: GroupStatus,
    reason: str,
) -> Group:
    """The journal's view of a group; `where` is filled in when its shard is published."""
    versions = np.concatenate([r.versions[r.action_mask] for r in rows])
    return Group(
        lease=lease.lease,
        group=lease.group,
        prompt=lease.prompt,
        task=lease.task,
        where=Where(path="", offset=0, length=0, hash=""),
        status=status,
        reason=reason.splitlines()[0] if reason else "",
        rewards=tuple(e.reward for e in episodes),
        truncated=sum(e.status == "truncated" for e in episodes),
        segments=tuple(
            Segment(
                rollout=r.rollout,
                tokens=len(r.token_ids),
                actions=int((r.action_spans[:, 1] - r.action_spans[:, 0]).sum()),
            )
            for r in rows
        ),
        version_min=int(versions.min()) if len(versions) else lease.version,
        version_max=int(versions.max()) if len(versions) else lease.version,
        seconds=max(e.seconds for e in episodes),
    )


async def main(run: Path, config: Config) -> None:
    """Entry point of a runner process, whose place is in its environment."""
    engine, index = int(os.environ["MOLT_ENGINE"]), int(os.environ["MOLT_RUNNER"])
    await Runner(run, config, engine, index, Path(os.environ["MOLT_SOCKET"])).run()
