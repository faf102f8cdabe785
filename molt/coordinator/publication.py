# SPDX-License-Identifier: Apache-2.0
"""Publications: which weights each engine holds, and the one version that is on its way to them.

    begin ─▶ offered to every engine ─▶ acknowledged by all, or failed by one of them, the trainer
    or the clock ─▶ end

Nothing here is durable: the journal has the begin and the end of each publication, and engines say
again what they hold whenever they ask for the next one.
"""

import time

from molt.control import EngineRequest, PublishRequest
from molt.records import Publication


class Publications:
    """The state of publishing.

    Args:
        num_engines: as many must have spoken before anything is published.
        update_s: within which every engine has to acknowledge a version.
    """

    def __init__(self, num_engines: int, update_s: float) -> None:
        self.held: dict[int, int] = {}  # engine → version it has acknowledged
        self.current: Publication | None = None
        self._num_engines, self._update_s = num_engines, update_s
        self._pauses: dict[int, float] = {}  # engine → seconds of its last pause
        self._newest, self._deadline, self._error = 0, 0.0, ""  # of the newest version begun here

    @property
    def complete(self) -> bool:
        """Whether every engine has said what it holds."""
        return len(self.held) >= self._num_engines

    @property
    def pause_s(self) -> float:
        """Longest generation pause among the engines, in their newest update."""
        return max(self._pauses.values(), default=0.0)

    def begin(self, version: int, q: PublishRequest) -> None:
        """Offer the weights of `q` to the engines as `version`."""
        self._newest, self._error = version, ""
        self._deadline = time.monotonic() + self._update_s
        self.current = Publication(
            version=version,
            step=q.step,
            address=q.address,
            port=q.port,
            world=q.world,
            communicator=q.communicator,
            tensors=q.tensors,
            bucket_bytes=q.bucket_bytes,
        )

    def offer(self, held: int) -> Publication | None:
        """The publication that an engine which holds version `held` is to join."""
        return self.current if self.current and self.current.version > held else None

    def acknowledge(self, q: EngineRequest) -> None:
        """An engine says what it holds, how long it stood still for it, and what went wrong."""
        self.held[q.engine], self._pauses[q.engine] = q.version, q.seconds
        if q.error:
            self.fail(f"engine {q.engine}: {q.error}")

    def fail(self, reason: str) -> None:
        """The newest publication cannot succeed any more."""
        self._error = reason

    def outcome(self, version: int) -> str | None:
        """None while `version` is on its way, "" once every engine holds it, else why it failed."""
        if version != self._newest:
            return f"version {version} is not being published: the coordinator started after it"
        missing = [engine for engine, held in self.held.items() if held < version]
        if missing and not self._error and time.monotonic() > self._deadline:
            self._error = (
                f"engines {missing} did not acknowledge version {version} within "
                f"{self._update_s:.0f} s: raise engine.update_s or see their logs"
            )
        return None if missing and not self._error else self._error

    def end(self) -> None:
        """No engine is to join any more."""
        self.current = None
