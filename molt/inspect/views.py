# SPDX-License-Identifier: Apache-2.0
"""The views of `molt inspect`: the run's groups, one group, one rollout by token.

The overview is built from the journal alone, so it is quick and works while the run is live; the
other two read one group from its shard. What is not there yet, or not any more, is said in its
place. Nothing here needs torch.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from molt.inspect.history import Entry, History, read_history
from molt.records import TRAIN, ConfigError, Group, StoreError
from molt.store.run import RunDir, read_metrics
from molt.store.schema import SegmentRow
from molt.store.shards import read_group, to_rows

PIPED_WIDTH = 160  # columns when there is no terminal to ask
NONE = "–"
COLORS = {"failed": "red", "error": "red", "filtered": "yellow", "truncated": "yellow"}
NEWEST = ("reward/mean", "lag/mean", "lag/max", "mismatch/kl", "rollout/truncated_fraction")


# ---------------------------------------------------------------- the run


def overview(run: Path, console: Console | None = None, limit: int = 20) -> None:
    """Show what became of the groups, the newest `limit` of them one by one.

    Raises:
        ConfigError: not a run directory.
        StoreError: its journal is damaged.
    """
    directory, console = RunDir.open(run), console or _console()
    history = read_history(directory.path)
    if not history.epochs:
        return _say(
            console, f"{run}: no coordinator has started yet, its journal is empty; see {run}/logs"
        )
    _summary(console, history)
    _newest_metrics(console, directory)
    shown = list(history.groups.items())[-limit:] if limit > 0 else []
    table = _table(
        "group,task,prompt,status,step,reward,min,max,rollouts,tokens,sampled,cut,versions,lag,s,why"
    )
    for number, entry in shown:
        status = history.status(entry)
        table.add_row(*_group_cells(history, number, entry, status), style=COLORS.get(status, ""))
    console.print(table)
    if len(shown) < len(history.groups):
        _say(console, f"the newest {len(shown)} of {len(history.groups)} groups; more with --limit")
    return None


def _summary(console: Console, history: History) -> None:
    """The run in a few lines: where it is, how many groups, what was dropped, what was scored."""
    states = Counter(history.status(entry) for entry in history.groups.values())
    _say(
        console,
        f"{history.name or 'run'}: step {history.step}, version {history.version}, "
        f"lineage {history.lineage}, started {history.epochs} ×",
    )
    _say(console, "groups: " + (", ".join(f"{n} {s}" for s, n in states.most_common()) or "none"))
    dropped = Counter(group.reason for group in history.finished if group.status != "ready")
    for reason, count in dropped.most_common():
        _say(console, f"dropped {count} ×: {_one_line(reason)}")
    scored: dict[tuple[str, int], list[float]] = {}
    for group in history.finished:
        if group.task != TRAIN:
            rewards = [r for r in group.rewards if r is not None]
            scored.setdefault((group.task, group.version_min), []).extend(rewards)
    for task in dict.fromkeys(task for task, _ in scored):
        means = [f"v{v} {_mean(r)}" for (name, v), r in sorted(scored.items()) if name == task]
        _say(console, f"eval {task}: " + " → ".join(means))


def _newest_metrics(console: Console, directory: RunDir) -> None:
    rows = read_metrics(directory.metrics)
    if not rows:
        return _say(console, "no step has been trained yet")
    known = [(name, rows[-1][name]) for name in NEWEST if rows[-1].get(name) is not None]
    shown = (f"{name} {value:.4g}" for name, value in known)
    return _say(console, f"step {rows[-1].get('step', NONE)}: " + ", ".join(shown))


def _group_cells(history: History, number: int, entry: Entry, status: str) -> list[Text]:
    lease, record = entry.lease, entry.record
    lag = history.lag_of(entry, history.step) if entry.state == "ready" else entry.lag
    versions = _span(record.version_min, record.version_max) if record else f"≥ {lease.version}"
    why = entry.reason or (f"by {lease.runner}" if status == "leased" and lease.runner else "")
    return _cells(
        number,
        lease.task,
        lease.prompt,
        status,
        entry.step,
        *(_record_cells(record) if record else [None] * 7),
        versions,
        lag if lease.task == TRAIN else None,
        record and f"{record.seconds:.1f}",
        _one_line(why),
    )


def _record_cells(record: Group) -> list[Any]:
    """Reward mean, min and max, rollouts, tokens, sampled tokens, truncated rollouts."""
    rewards = [reward for reward in record.rewards if reward is not None]
    return [
        _mean(rewards),
        f"{min(rewards):.3g}" if rewards else None,
        f"{max(rewards):.3g}" if rewards else None,
        len(record.rewards),
        sum(segment.tokens for segment in record.segments),
        sum(segment.actions for segment in record.segments),
        record.truncated or None,
    ]


# ---------------------------------------------------------------- one group


def group(run: Path, g: int, console: Console | None = None) -> None:
    """Show one group: where it is, what it was for, and its rollouts.

    Raises:
        ConfigError: not a run directory, or the run has no such group.
        StoreError: its journal is damaged.
    """
    path, console = RunDir.open(run).path, console or _console()
    history = read_history(path)
    entry = _entry(history, run, g)
    _say(console, _headline(history, entry, g))
    if entry.record is None:
        return _say(console, "nothing of it is on disk yet")
    where = entry.record.where
    _say(console, f"{where.path} bytes {where.offset}+{where.length}, xxh3 {where.hash}")
    try:
        rows = to_rows(read_group(path, where, deadline_s=0))
    except StoreError as error:
        _say(console, f"{error}\nfrom the journal:")
        return console.print(_recorded(entry.record))
    for message in _opening(rows):
        _say(console, f"[{message.get('role')}] {message.get('content')}")
    table = _table(
        "rollout,segment,status,reward,score,turns,tokens,sampled,versions,s,metrics,why"
    )
    for row in rows:
        table.add_row(*_row_cells(row), style=COLORS.get(row.status, ""))
    return console.print(table)


def _headline(history: History, entry: Entry, g: int) -> str:
    lease, parts = entry.lease, [history.status(entry)]
    if entry.step is not None:
        parts.append(f"in the plan of step {entry.step}")
    if entry.lag is not None:
        parts.append(f"lag {entry.lag}")
    if entry.reason:
        parts.append(_one_line(entry.reason))
    runner = f" by {lease.runner}" if lease.runner else ""
    return (
        f"group {g} ({lease.task}, prompt {lease.prompt}, lease {lease.lease}{runner}): "
        + ", ".join(parts)
    )


def _row_cells(row: SegmentRow) -> list[Text]:
    return _cells(
        row.rollout,
        f"{row.segment + 1}/{row.num_segments}",
        row.status,
        row.reward,
        row.score,
        len(row.action_spans),
        len(row.token_ids),
        int(row.action_mask.sum()),
        _versions(row),
        f"{row.seconds:.1f}",
        "" if row.metrics == "{}" else row.metrics,
        _one_line(row.reason),
    )


def _recorded(record: Group) -> Table:
    """The rollouts as far as the journal knows them."""
    table = _table("rollout,reward,tokens,sampled")
    for segment in record.segments:
        reward = record.rewards[segment.rollout]
        table.add_row(*_cells(segment.rollout, reward, segment.tokens, segment.actions))
    return table


def _opening(rows: list[SegmentRow]) -> list[dict[str, Any]]:
    """The messages before the policy's first: the prompt that the rollouts share."""
    messages = json.loads(rows[0].messages)
    roles = [message.get("role") for message in messages]
    return messages[: roles.index("assistant")] if "assistant" in roles else messages


# ---------------------------------------------------------------- one rollout


def rollout(run: Path, g: int, r: int, console: Console | None = None) -> None:
    """Show one rollout: its conversation, then every token of every segment.

    Raises:
        ConfigError: not a run directory, no such group, or no such rollout.
        StoreError: its journal is damaged, or the group cannot be read.
    """
    directory, console = RunDir.open(run), console or _console()
    history = read_history(directory.path)
    entry = _entry(history, run, g)
    if entry.record is None:
        return _say(console, _headline(history, entry, g) + "; nothing of it is on disk yet")
    rows = to_rows(read_group(directory.path, entry.record.where, deadline_s=0))
    mine = [row for row in rows if row.rollout == r]
    if not mine:
        last = max(row.rollout for row in rows)
        raise ConfigError(f"group {g} has no rollout {r}: they are numbered 0 to {last}")
    _say(console, _headline(history, entry, g))
    piece = _pieces(directory, console)
    for message in json.loads(mine[0].messages):
        _say(console, f"[{message.get('role')}] {message.get('content')}")
    for row in mine:
        _say(
            console,
            f"\nrollout {r} segment {row.segment + 1}/{row.num_segments}: {row.status}, "
            f"reward {NONE if row.reward is None else row.reward}, {row.seconds:.1f} s on engine "
            f"{row.engine or NONE}" + (f"\n{row.reason}" if row.reason else ""),
        )
        console.print(_tokens(row, piece))
    return None


def _tokens(row: SegmentRow, piece: Callable[[int], str]) -> Table:
    table = _table("token,id,text,action,log-probability,version")
    columns = (row.token_ids, row.action_mask, row.behavior_logprobs, row.versions)
    for i, (token, action, logprob, version) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        known = f"{logprob:.4f}" if logprob == logprob else None
        cells = _cells(i, token, piece(token), "●" if action else "", known, version)
        table.add_row(*cells, style="" if action else "dim")
    return table


def _pieces(directory: RunDir, console: Console) -> Callable[[int], str]:
    """How to show the text of a token: by the model's tokenizer when its directory is here."""
    model = json.loads(directory.config.read_bytes()).get("model", {}).get("path", "")
    file = Path(model) / "tokenizer.json"
    if not model or not file.is_file():
        _say(console, f"no tokenizer at {file}: token ids are shown without their text")
        return lambda token: ""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))

    def piece(token: int) -> str:
        text = tokenizer.decode([token], skip_special_tokens=False)
        if not text or "\ufffd" in text:  # a part of a character
            text = tokenizer.id_to_token(token) or ""
        return repr(text)

    return piece


# ---------------------------------------------------------------- cells


def _entry(history: History, run: Path, g: int) -> Entry:
    if g in history.groups:
        return history.groups[g]
    known = f"{min(history.groups)} to {max(history.groups)}" if history.groups else "none so far"
    raise ConfigError(f"{run} has no group {g}: its groups are {known}")


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    left = ("task", "status", "versions", "metrics", "why", "text")
    for name in columns.split(","):
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    return table


def _cells(*values: object) -> list[Text]:
    return [Text(NONE if value is None else str(value)) for value in values]


def _versions(row: SegmentRow) -> str | None:
    sampled = row.versions[row.action_mask]
    return _span(int(sampled.min()), int(sampled.max())) if len(sampled) else None


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}–{high}"


def _mean(values: Iterable[float]) -> str:
    numbers = list(values)
    return f"{sum(numbers) / len(numbers):.3f}" if numbers else NONE


def _one_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
