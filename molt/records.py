# SPDX-License-Identifier: Apache-2.0
"""What passes between processes: the records of the journal and the messages of the control routes.

Everything here is a frozen `msgspec.Struct`, so one definition is the JSON on the wire, the JSON in
the journal and the object in memory. Adding a field with a default keeps old journals readable; a
changed meaning needs a new `SCHEMA_VERSION`.

Words: a *group* is the samples of one prompt, a *rollout* one run of the agent, a *segment* one
token-exact sequence of a rollout, a *step* one plan trained and published, a *version* one
publication. Training groups are numbered by the prompt cursor, 0, 1, 2, …: group g is prompt g of
the endless shuffled stream. Evaluation groups count down from −1, so one integer names any group of
a run.
"""

from typing import Any, Literal, dataclass_transform

import msgspec

SCHEMA_VERSION = 1
NULL = msgspec.Raw(b"null")
TRAIN = "train"  # the task name of training groups; evaluations are named by their config key


class MoltError(Exception):
    """Base of Molt's own errors: one line that says what is wrong, the value and the remedy."""


class ConfigError(MoltError):
    """The user's input cannot be run: exit status 2, before anything starts."""


class StoreError(MoltError):
    """A file is not what the journal or the schema says it should be."""


class Fenced(MoltError):
    """A message carries an epoch or a lease that is no longer current."""


class AgentError(MoltError):
    """The user's agent raised or answered something that is not a Result."""


class EngineError(MoltError):
    """A vLLM engine died, did not answer in time, or answered something unusable."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Struct(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Common options of everything below."""


class Sampling(Struct):
    """How one completion is sampled. Only what keeps μ exact is allowed in training rollouts."""

    temperature: float = 1.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()


class Where(Struct, gc=False):
    """The bytes of one group: one record batch inside a published Arrow file."""

    path: str  # relative to the run directory
    offset: int
    length: int  # bytes
    hash: str  # xxh3_128 of exactly those bytes, 32 hex digits


class Segment(Struct, gc=False):
    """One row of a group's record batch: what planning and packing need without the file."""

    rollout: int  # index in the group
    tokens: int
    actions: int  # tokens that were sampled


# ---------------------------------------------------------------- journal records


class Epoch(Struct, tag="epoch"):
    """First record of every journal file: one start of the coordinator, and the seal of the last.

    What the previous file holds beyond `sealed` does not exist. `state` is the fold of everything
    before this record, so a start reads the newest file alone.
    """

    epoch: int
    run: str
    schema: int = SCHEMA_VERSION
    time: float = 0.0  # for people; decides nothing
    previous: int = 0  # epoch of the file that this one continues; 0 = none
    sealed: int = 0  # bytes of that file
    hash: str = ""  # xxh3_128 of those bytes
    state: msgspec.Raw = NULL  # store.state.State as JSON; null in the first file
    attempt: int = 0  # N of logs/attempt-N: whoever worked in an earlier one is gone
    changes: dict[str, tuple[Any, Any]] = {}  # config keys that the attempt before had otherwise


class Lease(Struct, tag="lease"):
    """Permission to produce one group. `lease` increases over the run; only the newest counts."""

    lease: int
    group: int
    prompt: int  # row of the task's prompts
    task: str = TRAIN
    runner: str = ""
    version: int = 0  # weights of the engine when leased: no token of the group can be older


class LeaseEnd(Struct, tag="lease_end"):
    """A lease that produced nothing: its group goes back to the head of the queue.

    Its runner gave it back, died or fell silent, or the attempt that it worked in is over.
    """

    lease: int
    group: int
    reason: str


GroupStatus = Literal["ready", "filtered", "failed"]


class Group(Struct, tag="group"):
    """A group on disk. One that was dropped is there too, with its reason, and is never planned."""

    lease: int
    group: int
    prompt: int
    where: Where
    task: str = TRAIN
    status: GroupStatus = "ready"
    reason: str = ""
    rewards: tuple[float | None, ...] = ()  # one a rollout; None = unscorable, never zero
    truncated: int = 0  # rollouts cut by a token limit
    segments: tuple[Segment, ...] = ()
    version_min: int = 0  # oldest and newest weights that sampled a token of it
    version_max: int = 0
    replay_miss: int = 0  # resumed sessions of it that diverged from their record
    resumed: int = 0  # sampled tokens that earlier holders of the group had written down
    dead: int = 0  # sampled tokens of theirs that no segment uses
    retries: int = 0  # rollouts played again after their agent failed
    seconds: float = 0.0  # of the longest rollout


class Plan(Struct, tag="plan"):
    """The groups of one step, in lease order. Cut once, trained once.

    `steps` says for each version in them from which training step its lag counts, as of the cut: a
    plan that is replayed after a restore is the same plan.
    """

    step: int
    groups: tuple[int, ...]
    steps: tuple[tuple[int, int], ...] = ()


class Void(Struct, tag="void"):
    """The plan of `step` is void, since `groups` of it cannot be read: they are produced again.

    The others are ready again, and a new plan is cut for the step.
    """

    step: int
    groups: tuple[int, ...]
    reason: str


class PublishBegin(Struct, tag="publish_begin"):
    """Weights after `step` are on their way to the engines under a number that is never reused."""

    version: int
    step: int
    lineage: int


class PublishEnd(Struct, tag="publish_end"):
    """Every engine holds `version` (`ok`), or none is trusted to (`reason` names the culprit)."""

    version: int
    ok: bool = True
    reason: str = ""


class Checkpoint(Struct, tag="checkpoint"):
    """A complete checkpoint: restoring it means that plans 1…step are trained."""

    step: int
    path: str
    version: int
    oldest: int = 0  # step of the oldest checkpoint that is still kept


class Restore(Struct, tag="restore"):
    """The trainer starts from `step` (0: initial weights) on a new lineage, forked at `version`.

    The plans behind `step` are trained again and lead to the same weights, so tokens of the old
    lineage keep their lag; only a `Void` makes lineages part.
    """

    step: int
    lineage: int
    version: int


class Retire(Struct, tag="retire"):
    """Shards that no kept checkpoint can need any more: they are deleted after this is durable."""

    paths: tuple[str, ...]  # relative to the run directory


Record = (
    Epoch | Lease | LeaseEnd | Group | Plan | Void | PublishBegin | PublishEnd | Checkpoint
    | Restore | Retire
)  # fmt: skip


# ---------------------------------------------------------------- control messages


class Tensor(Struct):
    """One tensor of a publication: HF name, torch dtype name ("float32"), shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Publication(Struct):
    """What an engine needs to receive one version. The data follows over the communicator.

    The communicator's rank 0 is the trainer; the workers of `members` follow, in that order.
    """

    version: int
    step: int
    address: str  # of the trainer's store
    port: int
    members: tuple[int, ...]  # engines that take part
    workers: int  # of each engine
    communicator: str  # changes when the group has to be built anew
    tensors: tuple[Tensor, ...] = ()
    bucket_bytes: int = 1 << 28

    @property
    def world(self) -> int:
        """Ranks of the communicator."""
        return 1 + len(self.members) * self.workers

    def rank_offset(self, engine: int) -> int:
        """Rank of the first worker of a member."""
        return 1 + self.members.index(engine) * self.workers
