# SPDX-License-Identifier: Apache-2.0
"""The input of one simulation: how a run is configured, and where it is hit."""

from dataclasses import dataclass
from random import Random

from molt.config import Config
from tests.sim.faults import ACTIONS, POINTS, Fault
from tests.sim.rollout import UPDATE_S


@dataclass(frozen=True)
class Schedule:
    """The input of one simulation."""

    seed: int
    faults: tuple[Fault, ...] = ()
    engines: int = 1
    runners: int = 1
    groups: int = 2
    steps: int = 4
    max_lag: int = 1
    stale: str = "wait"
    every: int = 1
    keep: int = 1
    shards: str = "none"
    rows: int = 5
    lease_s: float = 10.0
    loss: float = 0.0  # how many messages do not simply arrive
    delay_s: float = 0.0  # listings lag by up to
    drop: float = 0.0  # groups that fail or are filtered
    train_s: float = 2.0
    save_s: float = 2.0
    eager_save: bool = False  # a checkpoint does not wait for its step's publication
    evaluate: bool = False

    @property
    def gentle(self) -> bool:
        """Whether processes only die: what they left is seen at once, and none speaks too late."""
        rough = ("freeze", "freeze coordinator", "split", "full")
        return not (self.loss or self.delay_s or any(f.action in rough for f in self.faults))

    @classmethod
    def draw(cls, seed: int) -> "Schedule":
        """A schedule that is a function of its seed."""
        random = Random(f"schedule {seed}")
        pick = random.choice
        return cls(
            seed=seed,
            faults=tuple(_draw_fault(random) for _ in range(pick((0, 1, 1, 2, 2, 3, 4, 6)))),
            engines=pick((1, 1, 2)),
            runners=pick((1, 1, 2)),
            groups=pick((1, 2, 3)),
            steps=pick((2, 3, 4, 5)),
            max_lag=pick((0, 1, 1, 2, 3)),
            stale=pick(("wait", "wait", "mask", "train")),
            every=pick((0, 1, 1, 2, 3)),
            keep=pick((1, 1, 2, 3)),
            shards=pick(("none", "all")),
            rows=pick((3, 5, 7)),
            lease_s=pick((6.0, 10.0, 30.0)),
            loss=pick((0.0, 0.0, 0.02, 0.1)),
            delay_s=pick((0.0, 0.0, 3.0, 60.0)),
            drop=pick((0.0, 0.0, 0.1)),
            train_s=pick((0.2, 2.0, 10.0)),
            save_s=pick((0.2, 4.0)),
            eager_save=pick((False, True)),
            evaluate=pick((False, False, False, True)),
        )


def _draw_fault(random: Random) -> Fault:
    point = random.choice(POINTS)
    nth = random.randint(1, 60) if point == "clock" else 1 + int(8 * random.random() ** 2)
    return Fault(point, nth, random.choice(list(ACTIONS)), random.choice((0.5, 8.0, 40.0, 90.0)))


def prompts(rows: int) -> list[dict[str, str]]:
    """A data source."""
    return [{"prompt": f"prompt {i}"} for i in range(rows)]


def config_of(s: Schedule) -> Config:
    source = {"source": "tests.sim.schedule:prompts", "args": {"rows": s.rows}}
    return Config.model_validate(
        {
            "run": {"name": "sim"},
            "data": source,
            "agent": {"max_failures": 1000},
            "sampling": {"num_samples": 2},
            "pool": {"max_lag": s.max_lag, "stale": s.stale, "lease_s": s.lease_s},
            "session": {"flush_s": 1.0, "shard_age_s": 0.5},
            "engine": {
                "count": s.engines,
                "runners": s.runners,
                "rollouts": 8,
                "update_s": UPDATE_S,
                "start_s": 30.0,
            },
            "trainer": {"groups": s.groups, "steps": s.steps},
            "checkpoint": {"every": s.every, "keep": s.keep, "shards": s.shards},
            "eval": {"all": {"every": 1, "hold": True}} if s.evaluate else {},
        }
    )
