# SPDX-License-Identifier: Apache-2.0
"""What must hold, whatever happened: the invariants, checked while a schedule runs and at its end.

The truth about staleness is kept apart from the coordinator's own account of it: every version is
known by the `Weights` it stands for, and the lag of a token is the number of training steps since
the histories of its weights and of the trained ones parted.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any

import msgspec

from molt.config import Config
from molt.coordinator.server import Coordinator
from molt.data import row_of
from molt.records import (
    TRAIN,
    Fenced,
    Group,
    Lease,
    Plan,
    PublishBegin,
    PublishEnd,
    Record,
    Restore,
    Void,
)
from molt.store.state import State
from tests.sim.files import Files, Token, Weights, resume

_decoder = msgspec.json.Decoder(Record)


class Violation(AssertionError):
    """An invariant does not hold."""


def require(holds: object, what: str, *values: object) -> None:
    """Raise unless it holds."""
    if not holds:
        raise Violation(f"{what}: {', '.join(map(repr, values))}")


class Checks:
    """The invariants of one schedule.

    Args:
        gentle: nobody is cut off or late: what is on disk is there for all.
        progress: called when training has come further.
        trace: called with what is worth a line.
    """

    def __init__(
        self,
        files: Files,
        initial: Weights,
        config: Config,
        gentle: bool,
        progress: Callable[[], None],
        trace: Callable[[str], None],
    ) -> None:
        self._files, self._config, self._gentle = files, config, gentle
        self._progress, self._trace = progress, trace
        self._weights: dict[int, Weights] = {0: initial}  # version → what it stands for
        self._made: dict[tuple[Weights, Any], Weights] = {}
        self._read: dict[int, list[Token]] = {}  # lease → tokens of its group
        self._rollbacks: list[tuple[int, int]] = []  # (first lease after it, steps lost)
        self._voids = 0  # steps up to the newest void may break the bound
        self._furthest = 0

    # ------------------------------------------------------------ what the coordinator does

    def watch(self, coordinator: Coordinator) -> None:
        """Compare the coordinator's state with a fold from scratch now, and at every record."""
        state, shadow = coordinator.state, fold(self._files.chain(coordinator.state.epoch))
        require(state == shadow, "the new epoch's state is not the fold of the journal")
        commits = coordinator.commits
        apply = commits.fold

        def folded(*records: Record) -> None:
            for record in records:
                cursor, step = state.cursor, state.step
                apply(record)
                self._trace(f"epoch {state.epoch}: {_brief(record)}")
                shadow.apply(_decoder.decode(msgspec.json.encode(record)))
                require(state == shadow, "replaying differs from the live state after", record)
                self._folded(record, state, cursor)
                if isinstance(record, Restore) and step > record.step:
                    self._rollbacks.append((state.next_lease, step - record.step))

        commits.fold = folded

    def _folded(self, record: Record, state: State, cursor: int) -> None:
        leased = {g for g in state.leases if g >= 0}
        places = (leased, state.ready.keys(), state.planned.keys(), state.returned.keys())
        require(sum(map(len, places)) == len(set().union(*places)), "a group in two places", places)
        in_plans = sum(len(plan.groups) for plan in state.plans.values())
        require(in_plans == len(state.planned), "a group in two live plans", state.plans)
        require(
            sum(state.leased.values()) == len(leased), "leases are counted wrongly", state.leased
        )
        if isinstance(record, Lease) and record.task == TRAIN and record.group >= cursor:
            require(not state.returned, "a new prompt before one that came back", record)
        if isinstance(record, Void):
            self._voids += 1
        if isinstance(record, PublishEnd) and record.ok and state.step > self._furthest:
            self._furthest = state.step
            self._progress()

    def deletes(self, state: State, paths: Sequence[str]) -> None:
        """A coordinator removes files. One that has been replaced may cost tokens, nothing more."""
        if max(self._files.claims) > state.epoch:
            return
        done = {
            record.group
            for record in map(_decoder.decode, (line for _, line in self._files.chain()))
            if isinstance(record, Group)
        }
        for path in paths:
            if partial := self._files.partials.get(path):
                lost = partial.parts.keys() - done
                require(not lost, "partials deleted before their groups are durable", path, lost)

    def told(self, row: Mapping[str, Any]) -> None:
        """A line of metrics: an evaluation scores every prompt once, by its row."""
        score = row.get("eval/all/reward")
        rows: int = self._config.data.args["rows"]
        require(score in (None, (rows - 1) / 2), "an evaluation is not whole", row)

    # ------------------------------------------------------------ what the others do

    def relied(self, kind: type[Record], number: int) -> None:
        """Somebody acts on a number that the coordinator gave out."""
        require((kind, number) in self._files.durable, "answered before durable", kind, number)

    def resumed(self, lease: Lease, num: int) -> None:
        """A runner takes over tokens under a lease: all that were written down."""
        self.relied(Lease, lease.lease)
        if self._gentle and not self._voids:
            whole = resume([*self._files.partials.values()], lease.group, lease.version)
            require(num == len(whole), "tokens on disk were not resumed", lease, num, whole)

    def offered(self, version: int, weights: Weights) -> None:
        """The trainer publishes weights under a version."""
        self.relied(PublishBegin, version)
        known = self._weights.setdefault(version, weights)
        require(known is weights, "a version was used again", version)

    def readable(self, group: Group, current: bool) -> bool:
        """Whether a group of a plan can be read; the `current` attempt never finds it deleted."""
        shard = self._files.shards.get(group.where.path)
        if shard is None:
            require(not current, "a shard that a plan needs was deleted", group)
            return False
        self._read[group.lease] = shard.tokens[group.group]
        return group.group not in shard.damaged

    def trained(self, before: Weights, plan: Plan, groups: Sequence[Group]) -> Weights:
        """A step is trained; returns the weights after it."""
        self.relied(Plan, plan.step)
        require(plan.step == before.step + 1, "plans out of order", plan, before.step)
        require(plan.groups == tuple(g.group for g in groups), "groups of another plan", plan)
        seen = {group for weights in before.history() for group, _ in weights.plan}
        require(not seen & set(plan.groups), "trained twice", plan, seen & set(plan.groups))
        require(all(g.status == "ready" for g in groups), "a dropped group is trained", groups)
        for group in groups:
            tokens = self._read[group.lease]
            for version in {token.version for token in tokens}:
                self._lag(before, plan, tokens[0].lease, version)
        key = (before, tuple((g.group, g.lease) for g in groups))
        if key not in self._made:
            self._made[key] = Weights(plan.step, before, key[1])
        return self._made[key]

    def _lag(self, before: Weights, plan: Plan, lease: int, version: int) -> None:
        both = zip(before.history(), self._weights[version].history(), strict=False)
        true = before.step - sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], both))
        claimed = max(0, before.step - dict(plan.steps).get(version, 0))
        if self._voids:
            return  # the void plan's step may have been trained, published and sampled from
        require(claimed >= true, "a token is staler than its plan says", plan, version, true)
        if self._config.pool.stale == "wait":
            # Groups in flight when the trainer went back go on with the older weights.
            limit = self._config.pool.max_lag
            limit += sum(steps for first, steps in self._rollbacks if lease < first)
            require(true <= limit, "beyond the bound", plan, lease, version, true, limit)

    # ------------------------------------------------------------ the end

    def ended(self, weights: Weights) -> None:
        """The run is over, with these weights: look at the whole journal."""
        chain = self._files.chain()
        lost = Counter(self._files.acknowledged) - Counter(chain)
        require(not lost, "answered, but not in the journal", lost)
        state = fold(chain)
        records = [_decoder.decode(line) for _, line in chain]
        _increasing(records)
        trained = {group: lease for w in weights.history() for group, lease in w.plan}
        require(
            len(trained) == sum(len(w.plan) for w in weights.history()), "trained twice", trained
        )
        dropped, newest = _groups(records)
        for group, lease in trained.items():
            require(newest[group].lease == lease, "not the group that counts", newest[group])
        plans: dict[int, tuple[int, ...]] = {}
        for record in records:
            if isinstance(record, Plan):
                plans[record.step] = record.groups
        for made in weights.history():
            mine = tuple(group for group, _ in made.plan)
            require(plans[made.step] == mine, "trained another plan", made.step, mine, plans)
        left = [g for g in (*state.ready, *state.leases, *state.returned) if g >= 0]
        everything = sorted([*trained, *dropped, *left])
        require(
            everything == list(range(state.cursor)),
            "a prompt was skipped, or is in two places",
            set(range(state.cursor)) - set(everything),
            [g for g, n in Counter(everything).items() if n > 1],
        )
        self._epochs(newest, {*trained, *dropped})

    def _epochs(self, newest: dict[int, Group], settled: set[int]) -> None:
        """In a completed epoch of the data every prompt was trained or dropped once."""
        rows: int = self._config.data.args["rows"]
        for group in settled:
            row = row_of(self._config.run.seed, group, rows)
            require(newest[group].prompt == row, "not the prompt of its group", newest[group])
        for epoch in range(max(settled, default=0) // rows + 1):
            groups = range(epoch * rows, (epoch + 1) * rows)
            if settled.issuperset(groups):
                prompts = sorted(newest[g].prompt for g in groups)
                require(prompts == list(range(rows)), "an epoch is not whole", epoch, prompts)


def _brief(record: Record) -> str:
    """A record in one short line."""
    hidden = ("where", "rewards", "segments", "state", "path")
    fields = ((f, getattr(record, f)) for f in record.__struct_fields__ if f not in hidden)
    return f"{type(record).__name__} " + " ".join(f"{f}={x!r}" for f, x in fields if x)


def fold(chain: list[tuple[int, bytes]]) -> State:
    """The state after a journal, from its first record on."""
    state = State()
    for _, line in chain:
        try:
            state.apply(_decoder.decode(line))
        except Fenced as error:
            raise Violation(f"the journal holds a record that was refused: {error}") from error
    return state


def _increasing(records: list[Any]) -> None:
    """Numbers that are never used again."""
    for kind, key in ((Lease, "lease"), (PublishBegin, "version"), (Restore, "lineage")):
        numbers = [getattr(r, key) for r in records if isinstance(r, kind)]
        require(all(a < b for a, b in pairwise(numbers)), f"a {key} was used again", numbers)


def _groups(records: list[Any]) -> tuple[set[int], dict[int, Group]]:
    """Training groups that were dropped, and the newest record of each group."""
    dropped: set[int] = set()
    newest: dict[int, Group] = {}
    open_again: set[int] = set()  # by a void
    for record in records:
        if isinstance(record, Void):
            open_again |= set(record.groups)
        if isinstance(record, Group) and record.task == TRAIN:
            again = record.group in newest and record.group not in open_again
            require(not again, "a group was produced twice", record)
            open_again.discard(record.group)
            newest[record.group] = record
            if record.status != "ready":
                require(record.reason, "dropped without a reason", record)
                dropped.add(record.group)
    return dropped, newest
