# SPDX-License-Identifier: Apache-2.0
"""The named points at which each role is killed: before and after every step that others see.

To add one, add a line: its name, the call, and what the call is about (see `inject.Fault`).
"""

from dataclasses import dataclass

from tests.faults.inject import Fault

CALL = "molt.control:Client.call"
SHARD, PARTIAL = r"/shards/[^/]+/\.", r"/partials/[^/]+/\."  # their temporary files
JOURNAL, MARKER = r"/journal/\d+\.jsonl$", r"complete\.json"


@dataclass(frozen=True)
class Point:
    """A call of a role. `sides`: where to kill it; "tear" cuts the file before."""

    name: str
    at: str
    about: str = ""
    nth: int = 1
    sides: tuple[str, ...] = ("before", "after")


OF_ROLE = {
    "runner": [
        Point("lease", CALL, "^/lease$", sides=("after",)),
        Point("shard write", "os:open", SHARD, sides=("before",)),
        Point("shard fsync", "os:fsync", SHARD, 2, ("tear", "after")),
        Point("shard link", "os:link", SHARD, 2),
        Point("shard directory", "os:fsync", r"/shards/[^/]+$", 2, ("after",)),
        Point("announce", CALL, "^/announce$", 2),
        Point("partial fsync", "os:fsync", PARTIAL, 2, ("tear", "after")),
        Point("partial link", "os:link", PARTIAL, 2),
        Point("heartbeat", CALL, "^/heartbeat$", 2, ("after",)),
    ],
    "coordinator": [
        Point("epoch claim", "os:link", r"\.claim"),
        Point("epoch begin", "os:link", r"0001\.jsonl"),
        Point("journal write", "os:write", JOURNAL, 3, ("before",)),
        Point("journal fsync", "os:fsync", JOURNAL, 4, ("tear", "after")),
        Point("journal fsync later", "os:fsync", JOURNAL, 12, ("tear", "after")),
        Point("lease ack", "molt.coordinator.leases:Leases.lease", nth=2),
        Point("announce ack", "molt.coordinator.leases:Leases.announce", nth=2),
        Point("plan ack", "molt.coordinator.training:Training.plan", nth=3),
        Point("publish ack", "molt.coordinator.training:Training.publish", nth=2),
        Point("published ack", "molt.coordinator.training:Training.published", nth=3),
        Point("engine ack", "molt.coordinator.training:Training.engine", nth=3),
        Point("checkpoint ack", "molt.coordinator.training:Training.checkpoint"),
        Point("step ack", "molt.coordinator.training:Training.step", nth=2),
        Point("metrics", "molt.coordinator.disk:append_metrics", nth=2),
        Point("trainer ack", "molt.coordinator.training:Training.trainer"),
    ],
    "trainer": [
        Point("start", CALL, "^/trainer$"),
        Point("plan delivery", CALL, "^/plan$", 3, ("after",)),
        Point("optimizer step", "molt.trainer.loop:train_step", nth=3),
        Point("publish begin", CALL, "^/publish$", 3),
        Point("mid-broadcast", "molt.transfer:Communicator.broadcast", nth=4),
        Point("publish end", CALL, "^/published$", 3, ("after",)),
        Point("told step", CALL, "^/step$", 3),
        Point("checkpoint data", "tests.toy_policy:_write", nth=2),
        Point("checkpoint marker", "os:link", MARKER, 2),
        Point("checkpoint removal", "shutil:rmtree"),
        Point("told checkpoint", CALL, "^/checkpoint ", 2),
    ],
    "engine": [
        Point("report", CALL, "^/engine$", 4),
        Point("server start", "molt.rollout.engine:Server.start", sides=("after",)),
        Point("update", "molt.rollout.engine:Server.update", nth=2),
    ],
    "server": [
        Point("join", "molt.transfer:Communicator.__init__"),
        Point("mid-broadcast", "molt.transfer:Communicator.broadcast", nth=4),
        Point("sampling", "tests.scripted_engine:token_after", nth=150, sides=("before",)),
    ],
    "launcher": [
        Point("token", "os:link", r"/token"),
        Point("config", "os:link", r"run/config\.json"),
        Point("attempt", "os:link", r"attempt-1/config\.json"),
        Point("address", "os:link", r"/address", sides=("after",)),
    ],
}  # fmt: skip


def faults(do: str) -> dict[str, Fault]:
    """A fault for each side of each point: name → fault."""
    found: dict[str, Fault] = {}
    for role, points in OF_ROLE.items():
        for point in points:
            for side in point.sides:
                tears = side == "tear"
                found[f"{role}: {side} {point.name}"] = Fault(
                    role,
                    point.at,
                    "tear" if tears else do,
                    "before" if tears else side,
                    point.about,
                    point.nth,
                )
    return found
