# SPDX-License-Identifier: Apache-2.0
"""Evaluations under way: outside the lag bound, never planned, scored under the version they used.

An evaluation is due after the publication of step 0, of every `every`-th step and of the last one.
Its prompts are leased before any training prompt. Nothing here is durable: a coordinator that
starts again evaluates again when the restored weights are published.
"""

from dataclasses import dataclass, field

from molt.config import Config
from molt.data import eval_data, load_prompts
from molt.records import Group, Lease


@dataclass
class Run:
    """One evaluation of one version."""

    task: str
    step: int
    version: int
    todo: list[int]  # prompt rows not leased yet
    missing: int  # groups not finished yet
    leased: set[int] = field(default_factory=set)  # groups in production
    rewards: list[float] = field(default_factory=list)


class Evaluations:
    """Which evaluations run, what is still to lease, and the metrics of those that ended."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._sizes = {}
        for task, section in config.eval.items():
            rows = len(load_prompts(eval_data(config, task)))
            self._sizes[task] = min(section.num_prompts or rows, rows)
        self._runs: dict[str, Run] = {}
        self._metrics: dict[str, float] = {}

    @property
    def running(self) -> bool:
        """Whether any evaluation has groups to finish."""
        return bool(self._runs)

    @property
    def holding(self) -> bool:
        """Whether one of them wants the weights to stay."""
        return any(self._config.eval[task].hold for task in self._runs)

    def start_due(self, step: int, version: int) -> None:
        """Begin what is due for the weights after `step`. One still running is not begun again."""
        for task, size in self._sizes.items():
            every = self._config.eval[task].every
            due = step in (0, self._config.trainer.steps) or (every and step % every == 0)
            if due and task not in self._runs:
                self._runs[task] = Run(task, step, version, list(range(size)), size)

    def leases(
        self, num: int, first_lease: int, first_group: int, held: int, runner: str
    ) -> list[Lease]:
        """Up to `num` leases; evaluation groups are numbered downwards from `first_group`."""
        taken: list[tuple[str, int]] = []
        for run in self._runs.values():
            take, run.todo = run.todo[: num - len(taken)], run.todo[num - len(taken) :]
            first = first_group - len(taken)
            run.leased.update(range(first, first - len(take), -1))
            taken += [(run.task, prompt) for prompt in take]
        return [
            Lease(
                lease=first_lease + i,
                group=first_group - i,
                prompt=prompt,
                task=task,
                runner=runner,
                version=held,
            )
            for i, (task, prompt) in enumerate(taken)
        ]

    def returned(self, lease: Lease) -> None:
        """A lease that produced nothing: its prompt is to be leased again."""
        run = self._runs.get(lease.task)
        if run is not None and lease.group in run.leased:
            run.leased.discard(lease.group)
            run.todo.append(lease.prompt)

    def finished(self, group: Group) -> None:
        """Count a finished group; the last one turns the evaluation into metrics.

        One that was leased for an evaluation before, by another coordinator, does not count.
        """
        run = self._runs.get(group.task)
        if run is None or group.group not in run.leased:
            return
        run.leased.discard(group.group)
        run.rewards += [r for r in group.rewards if r is not None]
        run.missing -= 1
        if run.missing == 0:
            del self._runs[group.task]
            mean = sum(run.rewards) / len(run.rewards) if run.rewards else float("nan")
            self._metrics |= {
                f"eval/{run.task}/reward": mean,
                f"eval/{run.task}/rollouts": float(len(run.rewards)),
                f"eval/{run.task}/step": float(run.step),
                f"eval/{run.task}/version": float(run.version),
            }

    def take_metrics(self) -> dict[str, float]:
        """The metrics of the evaluations that ended since the last call."""
        taken, self._metrics = self._metrics, {}
        return taken
