# SPDX-License-Identifier: Apache-2.0
"""Live progress of a run from its metrics file: one line that follows the newest step.

On a terminal the line is redrawn; elsewhere each step is one printed line.
"""

import time
from pathlib import Path
from threading import Event, Thread
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from molt.store.run import read_metrics

REFRESH_S = 0.5


class Progress:
    """Shows what is appended to a metrics file while the context is open."""

    def __init__(self, metrics: Path, total: int, console: Console) -> None:
        self._metrics, self._total, self._console = metrics, total, console
        self._seen = len(read_metrics(metrics))
        self._began = time.monotonic()
        self._times: list[float] = []
        self._end = Event()
        self._thread = Thread(target=self._follow, name="progress", daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()

    def _follow(self) -> None:
        if not self._console.is_terminal:
            while not self._end.wait(REFRESH_S):
                self._print_new()
            self._print_new()
            return
        with Live(self._waiting(), console=self._console, transient=False) as live:
            while not self._end.wait(REFRESH_S):
                live.update(self._newest() or self._waiting())
            live.update(self._newest() or Text(""))

    def _waiting(self) -> Text:
        return Text(f"starting engines and trainer … {time.monotonic() - self._began:.0f} s")

    def _newest(self) -> Text | None:
        rows = read_metrics(self._metrics)
        return self._line(rows[-1]) if len(rows) > self._seen else None

    def _print_new(self) -> None:
        rows = read_metrics(self._metrics)
        for row in rows[self._seen :]:
            self._console.print(self._line(row), soft_wrap=True)
        self._seen = len(rows)

    def _line(self, row: dict[str, float]) -> Text:
        """step, reward, lag, tokens/s, time left."""
        left = (self._total - row["step"]) * row.get("time/step_s", 0.0)
        return Text(
            f"step {row['step']:>5.0f}/{self._total}  "
            f"reward {row.get('reward/mean', float('nan')):.3f}  "
            f"lag {row.get('lag/mean', 0.0):.2f}  "
            f"rollout {row.get('throughput/rollout_tokens_per_s', 0.0):>7,.0f} tok/s  "
            f"train {row.get('throughput/train_tokens_per_s', 0.0):>7,.0f} tok/s  "
            f"{row.get('time/step_s', 0.0):.2f} s/step  left {left:.0f} s"
        )
