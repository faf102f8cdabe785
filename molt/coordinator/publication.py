# SPDX-License-Identifier: Apache-2.0
"""Publications: which weights each engine holds, and the one version that is on its way to them.

    begin ─▶ offered to its members ─▶ acknowledged by all, or failed by one of them, the trainer
    or the clock ─▶ end

Every engine whose server is up is a member. One that comes later, or again, lacks the weights, and
the trainer is asked to publish them once more. Nothing here is durable: the journal has the begin
and the end of each publication, and engines say again what they hold whenever they ask.
"""

import logging
from collections import deque
from dataclasses import dataclass

from molt.control import EngineRequest, PublishRequest
from molt.records import Publication

log = logging.getLogger("molt.coordinator")
GRACE_S = 5.0  # after a start: engines that were there before come back within it


@dataclass
class Engine:
    """What one engine said last."""

    incarnation: str  # of its server; "" = none is up
    version: int
    seen: float  # on the loop's clock
    pause_s: float = 0.0
    restarts: int = 0
    runner_restarts: int = 0


class Publications:
    """The state of publishing.

    Args:
        num_engines: as many are expected.
        update_s: within which every engine has to acknowledge a version.
        patience: on the loop's clock: from then on the engines that are there are enough.
    """

    def __init__(self, num_engines: int, update_s: float, patience: float) -> None:
        self.engines: dict[int, Engine] = {}
        self.newest: Publication | None = None  # that was begun here
        self.asked: deque[str] = deque(maxlen=1000)  # requests that have begun one
        self.failed = 0  # newest version that will not come to its end
        self.failures = 0
        self._num_engines, self._update_s, self._patience = num_engines, update_s, patience
        self._members: dict[int, str] = {}  # of the current one: engine → incarnation
        self._built: tuple[str, dict[int, str]] = (
            "",
            {},
        )  # newest communicator that worked, and who is in it
        self._ended, self._deadline, self._error = True, 0.0, ""  # of the newest

    @property
    def current(self) -> Publication | None:
        """What is on its way."""
        return None if self._ended else self.newest

    def held(self, engine: int) -> int:
        """The version that an engine holds; 0 for one that is not there."""
        return self.engines[engine].version if engine in self.engines else 0

    @property
    def up(self) -> dict[int, str]:
        """Engines whose server answers, and its incarnation."""
        return {e: x.incarnation for e, x in sorted(self.engines.items()) if x.incarnation}

    def ready(self, now: float) -> bool:
        """Whether a publication can begin: all engines are up, or some and patience is over."""
        up = len(self.up)
        return up >= self._num_engines or (up > 0 and now >= self._patience)

    def lacking(self, version: int) -> bool:
        """Whether an engine that is up does not hold `version`, and nothing is on its way.

        Before the first version that every engine held, the trainer's own are what is lacking.
        """
        return self.current is None and any(self.held(e) < max(version, 1) for e in self.up)

    @property
    def pause_s(self) -> float:
        """Longest generation pause among the engines, in their newest update."""
        return max((x.pause_s for x in self.engines.values()), default=0.0)

    def report(self, q: EngineRequest, now: float) -> None:
        """An engine says what it holds, how long it stood still for it, and what went wrong."""
        self.engines[q.engine] = Engine(
            q.incarnation, q.version, now, q.seconds, q.restarts, q.runner_restarts
        )
        if q.error:
            self._fail_of(q.engine, q.error)
        elif self._members.get(q.engine, q.incarnation) != q.incarnation:
            self._fail_of(q.engine, "its server ended")

    def lose(self, engine: int, reason: str) -> None:
        """An engine is gone."""
        log.warning("engine %d is lost: %s", engine, reason)
        self._fail_of(engine, reason)
        del self.engines[engine]

    def begin(self, version: int, q: PublishRequest, now: float) -> None:
        """Offer the weights of `q` to the engines that are up, as `version`."""
        self.asked.append(q.fresh)
        self._error, self._ended = "", False
        self._deadline = now + self._update_s
        self._members = self.up
        same = (q.communicator, self._members) == self._built
        self.newest = Publication(
            version=version,
            step=q.step,
            address=q.address,
            port=q.port,
            members=tuple(self._members),
            workers=q.workers,
            communicator=q.communicator if same else q.fresh,
            tensors=q.tensors,
            bucket_bytes=q.bucket_bytes,
        )

    def offer(self, q: EngineRequest) -> Publication | None:
        """The publication that an engine is to join."""
        current = self.current
        if current is None or self._error or self._members.get(q.engine) != q.incarnation:
            return None
        return current if max(q.version, q.receiving) < current.version else None

    def fail(self, version: int, reason: str) -> None:
        """The publication of `version` cannot succeed any more."""
        if self.current and self.current.version == version and not self._error:
            log.warning("publication of version %d failed: %s", version, reason)
            self._error, self.failed = reason, version
            self.failures += 1
            for engine in self._members:  # its server is started again, unless it says otherwise
                if self.held(engine) < version and engine in self.engines:
                    self.engines[engine].incarnation = ""

    def outcome(self, version: int, now: float) -> str | None:
        """None while `version` is on its way, "" once every member holds it, else why it failed."""
        if self.newest is None or self.newest.version != version:
            return f"version {version} is not being published: the coordinator started after it"
        missing = [e for e in self.newest.members if self.held(e) < version]
        if missing and now > self._deadline:
            self.fail(
                version,
                f"engines {missing} did not acknowledge version {version} within "
                f"{self._update_s:.0f} s: raise engine.update_s or see their logs",
            )
        return None if missing and not self._error else self._error

    def end(self) -> None:
        """No engine is to join any more."""
        if self.current and not self._error:
            self._built = (self.current.communicator, self._members)
        self._ended, self._members = True, {}

    def _fail_of(self, engine: int, reason: str) -> None:
        if self.current and engine in self._members:
            self.fail(self.current.version, f"engine {engine}: {reason}")
