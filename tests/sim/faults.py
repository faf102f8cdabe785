# SPDX-License-Identifier: Apache-2.0
"""What can happen to a run: one function an action, named in `ACTIONS`.

A fault hits whoever comes by a point for the n-th time. Most actions hit that process; some hit
another role of the same attempt, the whole attempt, or the files.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.sim.clock import Process

if TYPE_CHECKING:
    from tests.sim.attempt import Attempt

Action = Callable[["Attempt", Process, float], None]

POINTS = (
    "start.claimed", "start.read", "start.published", "append.begin", "append.written",
    "append.done", "leased", "flushed", "shard.begin", "shard.published", "announced",
    "receive.begin", "receive.middle", "receive.end", "restore", "plan", "read", "trained",
    "publish.begun", "published", "save.data", "save.marker", "saved", "checkpoint", "clock",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What happens, when the point is passed for the `nth` time, or at second `nth` ("clock")."""

    point: str
    nth: int
    action: str
    seconds: float = 0.0  # of a stop


def _kill(attempt: "Attempt", process: Process, _: float) -> None:
    if process is attempt.launcher:  # whoever has lost the launcher ends
        _everything(attempt, process, 0.0)
    else:
        attempt.roles.get(process, process.kill)()


def _role(name: str) -> Action:
    return lambda attempt, _, __: attempt.kill(name)


def _server(attempt: "Attempt", _: Process, __: float) -> None:
    if attempt.engines:
        attempt.world.random.choice(attempt.engines).lose_server("it died")


def _everything(attempt: "Attempt", _: Process, __: float) -> None:
    attempt.end()
    attempt.world.attempt_later()


def _freeze(attempt: "Attempt", process: Process, seconds: float) -> None:
    process.freeze()
    attempt.world.later(seconds, process.thaw)
    attempt.world.later(seconds, attempt.world.progressed)


def _freeze_coordinator(attempt: "Attempt", _: Process, seconds: float) -> None:
    if attempt.coordinator:
        _freeze(attempt, attempt.coordinator.process, seconds)


def _split(attempt: "Attempt", _: Process, seconds: float) -> None:
    """Its nodes are cut off; somebody starts the command elsewhere; then they are back."""
    attempt.freeze()
    attempt.world.later(seconds, attempt.thaw)
    attempt.world.attempt_later()


def _stop(attempt: "Attempt", _: Process, __: float) -> None:
    attempt.stop()


def _full(attempt: "Attempt", _: Process, __: float) -> None:
    """The next append finds no space."""
    if attempt.coordinator and attempt.coordinator.journal:
        attempt.coordinator.journal.fail_next = True


def _damage(attempt: "Attempt", _: Process, __: float) -> None:
    """Bytes of a group that is to be trained flip."""
    made = attempt.coordinator and attempt.coordinator.coordinator
    waiting = [*made.state.ready.values(), *made.state.planned.values()] if made else []
    if waiting:
        group = attempt.world.random.choice(waiting)
        if shard := attempt.world.files.shards.get(group.where.path):
            shard.damaged.add(group.group)


def _rot(attempt: "Attempt", _: Process, __: float) -> None:
    """The newest checkpoint cannot be read any more, but an older one can."""
    checkpoints = attempt.world.files.checkpoints
    whole = sorted(step for step, saved in checkpoints.items() if not saved.damaged)
    if len(whole) > 1:
        checkpoints[whole[-1]].damaged = True


ACTIONS: dict[str, Action] = {
    "kill": _kill,
    **{name: _role(name) for name in ("coordinator", "trainer", "engine", "runner")},
    "server": _server,
    "everything": _everything,
    "freeze": _freeze,
    "freeze coordinator": _freeze_coordinator,
    "split": _split,
    "stop": _stop,
    "full": _full,
    "damage": _damage,
    "rot": _rot,
}
