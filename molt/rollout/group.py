# SPDX-License-Identifier: Apache-2.0
"""One group: its rollouts are played, judged together and become a record batch and a record.

    lease ─▶ num_samples × (session, agent, retries) ─▶ judge ─▶ rows ─▶ record batch, Group

A group is whole or it is nothing: a rollout that keeps failing fails the group, which is kept with
its reason; one that is stopped leaves no group, only what its sessions have logged, and whoever
leases the group next plays it against that.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from molt.config import Config
from molt.data import Row, eval_data, load_prompts, resolve
from molt.records import (
    TRAIN,
    AgentError,
    EngineError,
    Group,
    GroupStatus,
    Lease,
    Sampling,
    Segment,
    Where,
)
from molt.rollout.client import EngineLost
from molt.rollout.episode import Episode, Limits, play
from molt.rollout.render import Renderer
from molt.rollout.session import Engine, Session, Stopped
from molt.rollout.session import Path as SessionPath
from molt.store.partials import Origin, Part, PartialReader, Recorded
from molt.store.schema import SegmentRow
from molt.store.shards import to_batch

NOWHERE = Where(path="", offset=0, length=0, hash="")  # until its shard is published


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


@dataclass(frozen=True)
class Rollout:
    """A rollout that was played to its end."""

    episode: Episode
    retries: int  # times that its agent was run again after a failure
    recorded: int  # sampled tokens that earlier holders of the group had written down


class Player:
    """What the groups of one runner share.

    Args:
        run: the run directory.
        config: of the run.
        name: of the engine, for people.
        engine: where completions come from.
        log: told every part of the sessions of training groups.
    """

    def __init__(
        self,
        run: Path,
        config: Config,
        name: str,
        engine: Engine,
        log: Callable[[Origin, Part], None],
    ) -> None:
        self._config, self._name = config, name
        self._reader = PartialReader(run)
        self._engine, self._log = engine, log
        self._tasks = tasks_of(config)
        self._renderer = Renderer(config.model.path)
        agent = resolve(config.agent.name)
        self._resumable = getattr(agent, "resumable", True)
        self._make = partial(agent, **config.agent.args)
        self._limits = Limits(config.agent.max_turns, config.agent.timeout_s)

    async def play(self, lease: Lease, partials: tuple[str, ...]) -> tuple[pa.RecordBatch, Group]:
        """Produce a group, going on from what `partials` have of it.

        Raises:
            Stopped: the engine was stopped; what it had sampled is logged.
            EngineLost: the engine did not come back in its time.
        """
        recorded: dict[int, list[Recorded]] = {}
        if partials:
            loop = asyncio.get_running_loop()
            recorded = await loop.run_in_executor(
                None, self._reader.sessions, partials, lease.group
            )
        num = self._tasks[lease.task].num_samples
        rollouts = await _gather(self._rollout(lease, i, recorded.get(i, [])) for i in range(num))
        played = [r for r in rollouts if r is not None]
        if len(played) < num:
            raise Stopped(f"group {lease.group} was stopped with {len(played)} of {num} rollouts")
        status, reason = self._judge(lease, [r.episode for r in played])
        rows = [
            row
            for i, r in enumerate(played)
            for row in self._rows(lease, i, r.episode, status, reason)
        ]
        return to_batch(rows), _record(lease, played, rows, status, reason)

    async def _rollout(self, lease: Lease, index: int, recorded: list[Recorded]) -> Rollout | None:
        """One rollout, played again while it fails; the last failure is an episode too.

        None if it was stopped: that must not cancel the others before they have logged.
        """
        task, retries = self._tasks[lease.task], 0
        attempt = recorded[0].attempt if recorded else 0
        tokens = sum(len(part.token_ids) for node in recorded for part in node.parts)
        # No token of the group may be older than the lease says.
        stale = any(node.version_min < lease.version for node in recorded)
        if recorded and (stale or not self._resumable):
            recorded, attempt = [], attempt + 1
        while True:
            session = self._session(Origin(lease.group, lease.lease, index, attempt), recorded)
            try:
                episode = await play(
                    self._make, task.rows[lease.prompt], session, self._renderer, task.sampling,
                    self._limits,
                )  # fmt: skip
                return Rollout(episode, retries, tokens)
            except Stopped:
                return None
            except EngineLost:
                raise
            except (AgentError, EngineError) as e:
                if retries == self._config.agent.retries:
                    episode = Episode(session, status="error", reason=str(e))
                    return Rollout(episode, retries, tokens)
            recorded, attempt, retries = [], attempt + 1, retries + 1

    def _session(self, origin: Origin, recorded: list[Recorded]) -> Session:
        key = f"{origin.lease}-{origin.rollout}-{origin.attempt}"
        log = partial(self._log, origin) if origin.group >= 0 else _no_log
        chunk = self._config.session.chunk_tokens
        return Session(key, self._engine, self._config.model.max_len, chunk, log, recorded)

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
        paths = episode.session.paths() or [EMPTY]
        kept = status == "ready" or episode.status == "error"
        return [
            SegmentRow(
                run=self._config.run.name,
                prompt=lease.prompt,
                group=lease.group,
                lease=lease.lease,
                rollout=rollout,
                segment=i,
                num_segments=len(paths),
                task=lease.task,
                agent=self._config.agent.name,
                token_ids=path.token_ids,
                action_spans=path.action_spans,
                behavior_logprobs=path.logprobs,
                version_spans=path.version_spans,
                sampling=path.samplings,
                reward=episode.reward,
                turn_rewards=tuple(episode.turn_rewards),
                status=episode.status if kept else "filtered",
                reason=episode.reason if kept else reason,
                metrics=json.dumps(episode.metrics),
                messages=json.dumps(episode.messages, ensure_ascii=False),
                resumed_tokens=path.resumed,
                engine=self._name,
                seconds=episode.seconds,
            )
            for i, path in enumerate(paths)
        ]


EMPTY = SessionPath(
    token_ids=np.empty(0, np.int32),
    action_spans=np.empty((0, 2), np.int32),
    logprobs=np.empty(0, np.float32),
    version_spans=np.empty((0, 2), np.int64),
    samplings=(),
    resumed=0,
)


def _no_log(part: Part) -> None:
    """Of an evaluation, which starts over."""


async def _gather(plays: Iterable[Coroutine[Any, Any, Rollout | None]]) -> list[Rollout | None]:
    """All rollouts; the first failure that is not the agent's cancels the others and is raised."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(p) for p in plays]
    return [t.result() for t in tasks]


def _record(
    lease: Lease, rollouts: list[Rollout], rows: list[SegmentRow], status: GroupStatus, reason: str
) -> Group:
    """The journal's view of a group; `where` is filled in when its shard is published."""
    versions = np.concatenate([r.versions[r.action_mask] for r in rows])
    episodes = [r.episode for r in rollouts]
    resumed = sum(e.session.resumed_tokens for e in episodes)
    return Group(
        lease=lease.lease,
        group=lease.group,
        prompt=lease.prompt,
        task=lease.task,
        where=NOWHERE,
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
        replay_miss=sum(e.session.replay_misses for e in episodes),
        resumed=resumed,
        dead=sum(r.recorded for r in rollouts) - resumed,
        retries=sum(r.retries for r in rollouts),
        seconds=max(e.seconds for e in episodes),
    )
