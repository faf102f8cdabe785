# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from molt.inspect import views
from molt.records import (
    ConfigError,
    Group,
    Lease,
    LeaseEnd,
    Plan,
    PublishBegin,
    PublishEnd,
    Restore,
    Sampling,
    Segment,
    StoreError,
    Void,
    Where,
)
from molt.store.journal import Journal
from molt.store.run import RunDir, append_metrics
from molt.store.schema import SegmentRow
from molt.store.shards import ShardWriter, to_batch

GONE = Where(path="shards/gone/00000000.arrow", offset=8, length=8, hash="00")
MESSAGES = [{"role": "user", "content": "2+[bold]3"}, {"role": "assistant", "content": "5"}]


def create(path: Path, model: str = "") -> RunDir:
    return RunDir.create(path / "run", json.dumps({"model": {"path": model}}).encode())


def start(run: RunDir) -> Journal:
    return Journal.start(run.path, "add")[0]


def group(number: int, where: Where = GONE, **more: Any) -> Group:
    fields: dict[str, Any] = {
        "lease": number + 1,
        "group": number,
        "prompt": number,
        "where": where,
        "rewards": (1.0, 0.0),
        "segments": tuple(Segment(rollout=r, tokens=5, actions=2) for r in range(2)),
        "version_min": 1,
        "version_max": 1,
    }
    return Group(**(fields | more))


def rows(number: int) -> list[SegmentRow]:
    return [
        SegmentRow(
            run="r",
            prompt=number,
            group=number,
            rollout=r,
            token_ids=np.array([10, 11, 12, 20 + r, 13], np.int32),
            action_spans=np.array([[3, 5]], np.int32),
            behavior_logprobs=np.array([np.nan] * 3 + [-0.25, -1.5], np.float32),
            version_spans=np.array([[4, 1], [5, 2]]),
            sampling=(Sampling(),),
            reward=1.0 - r,
            messages=json.dumps(MESSAGES),
        )
        for r in range(2)
    ]


def text_of(show: Callable[[Console], None]) -> str:
    console = Console(width=160, highlight=False)
    with console.capture() as capture:
        show(console)
    return capture.get()


def overview(run: RunDir, limit: int = 20) -> str:
    return text_of(lambda console: views.overview(run.path, console, limit))


def line_of(text: str, number: int) -> list[str]:
    """The cells of a group's line."""
    return next(x.split() for x in text.splitlines() if x.split()[:1] == [str(number)])


def test_a_run_that_has_not_started_says_so(tmp_path: Path) -> None:
    assert "no coordinator has started yet" in overview(create(tmp_path))


def test_a_directory_that_is_no_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        views.overview(tmp_path)


def test_the_overview_tells_every_group_s_fate_without_a_shard(tmp_path: Path) -> None:
    run = create(tmp_path)
    journal = start(run)
    journal.append([PublishBegin(version=1, step=0, lineage=1), PublishEnd(version=1)])
    journal.append(Lease(lease=n + 1, group=n, prompt=n, version=1) for n in range(6))
    journal.append(
        [
            group(0),
            group(1, status="filtered", reason="all rewards equal 1.0", rewards=(1.0, 1.0)),
            group(2, status="failed", reason="step raised KeyError", rewards=(None, None)),
            group(3),
            LeaseEnd(lease=5, group=4, reason="stopped"),
            Plan(step=1, groups=(0,)),
            PublishBegin(version=2, step=1, lineage=1),
            PublishEnd(version=2),
            Plan(step=2, groups=(3,)),
        ]
    )
    text = overview(run)
    assert "step 1, version 2, lineage 1, started 1 ×" in text
    assert "no step has been trained yet" in text  # no metrics line so far
    # after number, task, prompt, status, step: reward mean, min, max, then rollouts, tokens,
    # sampled, cut, versions, and after these the lag
    head = ["0.500", "0", "1", "2", "10", "4", "–", "1"]
    assert line_of(text, 0)[:14] == ["0", "train", "0", "trained", "1", *head, "0"]
    # trained by step 2 on weights after step 1, sampled by version 1 of step 0: lag 1
    assert line_of(text, 3)[:14] == ["3", "train", "3", "planned", "2", *head, "1"]
    assert line_of(text, 1)[3] == "filtered"
    assert line_of(text, 2)[3:6] == ["failed", "–", "–"]  # unscorable is not zero
    assert line_of(text, 4)[3] == "returned"
    assert line_of(text, 5)[3] == "leased"
    assert "dropped 1 ×: all rewards equal 1.0" in text
    assert "dropped 1 ×: step raised KeyError" in text


def test_a_lease_outlives_its_coordinator_but_not_its_end(tmp_path: Path) -> None:
    run = create(tmp_path)
    start(run).append([Lease(lease=1, group=0, prompt=0)])
    journal = start(run)
    text = overview(run)
    assert "started 2 ×" in text
    assert line_of(text, 0)[3] == "leased"
    journal.append([LeaseEnd(lease=1, group=0, reason="its attempt ended")])
    assert line_of(overview(run), 0)[3] == "returned"


def test_a_void_plan_gives_its_groups_back(tmp_path: Path) -> None:
    run = create(tmp_path)
    leases = [Lease(lease=n + 1, group=n, prompt=n, version=1) for n in range(2)]
    start(run).append(
        [
            PublishBegin(version=1, step=0, lineage=1),
            PublishEnd(version=1),
            *leases,
            group(0),
            group(1),
            Plan(step=1, groups=(0, 1)),
            Void(step=1, groups=(1,), reason="changed or cut"),
        ]
    )
    text = overview(run)
    assert line_of(text, 0)[3:5] == ["ready", "–"]
    assert line_of(text, 1)[3:5] == ["returned", "–"]
    assert line_of(text, 1)[-3:] == ["changed", "or", "cut"]


def test_lag_counts_from_the_step_of_a_void_plan_and_not_from_a_restore(tmp_path: Path) -> None:
    run = create(tmp_path)
    journal = start(run)
    for version, step in ((1, 0), (2, 5)):
        journal.append(
            [PublishBegin(version=version, step=step, lineage=1), PublishEnd(version=version)]
        )
    # Back to step 2, whose plans are replayed: step 5 is again what version 2 was published from.
    newer = group(0, version_min=2)
    journal.append([Restore(step=2, lineage=2, version=2), newer, Plan(step=7, groups=(0,))])
    assert line_of(overview(run), 0)[13] == "1"  # (7 − 1) − 5
    # Void: what is trained as step 7 now differs, and so does everything after step 6.
    journal.append([PublishBegin(version=3, step=8, lineage=2), PublishEnd(version=3)])
    journal.append([Void(step=7, groups=(), reason=""), group(1, version_min=3)])
    journal.append([Plan(step=9, groups=(0, 1))])
    assert line_of(overview(run), 0)[13] == "3"  # (9 − 1) − 5
    assert line_of(overview(run), 1)[13] == "2"  # (9 − 1) − min(8, 6)


def test_evaluations_show_their_progress(tmp_path: Path) -> None:
    run = create(tmp_path)
    start(run).append(
        [
            group(-1, task="greedy", rewards=(0.0,)),
            group(-2, task="greedy", rewards=(None,)),
            group(-3, task="greedy", rewards=(1.0,), version_min=9),
        ]
    )
    text = overview(run)
    assert "eval greedy: v1 0.000 → v9 1.000" in text
    assert line_of(text, -1)[1:4] == ["greedy", "-1", "scored"]


def test_the_limit_keeps_the_newest(tmp_path: Path) -> None:
    run = create(tmp_path)
    start(run).append(group(n) for n in range(9))
    append_metrics(run.metrics, {"step": 3, "reward/mean": 0.75, "lag/max": None})
    text = overview(run, limit=2)
    assert [x.split()[0] for x in text.splitlines() if " train " in x] == ["7", "8"]
    assert "the newest 2 of 9 groups" in text
    assert "step 3: reward/mean 0.75\n" in text


@pytest.fixture
def whole(tmp_path: Path) -> RunDir:
    """A run with one group on disk."""
    run = create(tmp_path, str(tmp_path / "model"))
    writer = ShardWriter(run.path, "w")
    writer.add(to_batch(rows(0)))
    (where,) = writer.publish()
    start(run).append(
        [Lease(lease=1, group=0, prompt=0, runner="runner-0"), group(0, where), group(1)]
    )
    return run


def test_a_group_shows_its_prompt_and_rollouts(whole: RunDir) -> None:
    text = text_of(lambda console: views.group(whole.path, 0, console))
    assert "group 0 (train, prompt 0, lease 1 by runner-0): ready" in text
    assert "[user] 2+[bold]3" in text
    assert "[assistant]" not in text
    assert line_of(text, 0)[:9] == ["0", "1/1", "finished", "1.0", "–", "1", "5", "2", "1–2"]
    assert line_of(text, 1)[3] == "0.0"


def test_a_group_without_its_shard_is_shown_from_the_journal(whole: RunDir) -> None:
    text = text_of(lambda console: views.group(whole.path, 1, console))
    assert "cannot open" in text
    assert line_of(text, 0) == ["0", "1.0", "5", "2"]


def test_a_leased_group_has_nothing_on_disk(tmp_path: Path) -> None:
    run = create(tmp_path)
    start(run).append([Lease(lease=1, group=0, prompt=0)])
    for show in (lambda c: views.group(run.path, 0, c), lambda c: views.rollout(run.path, 0, 0, c)):
        assert "nothing of it is on disk yet" in text_of(show)


def test_a_rollout_shows_every_token(whole: RunDir) -> None:
    text = text_of(lambda console: views.rollout(whole.path, 0, 1, console))
    assert "no tokenizer at" in text
    assert "[assistant] 5" in text
    # index, id, (no text), action, log-probability, version of this or the next sampled token
    assert line_of(text, 2) == ["2", "12", "–", "1"]
    assert line_of(text, 3) == ["3", "21", "●", "-0.2500", "1"]
    assert line_of(text, 4) == ["4", "13", "●", "-1.5000", "2"]


def test_tokens_get_their_text_from_the_model_s_tokenizer(whole: RunDir, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    vocabulary = {"?": 0} | {f"w{i}": i for i in range(1, 30)}
    (tmp_path / "model").mkdir()
    Tokenizer(WordLevel(vocabulary, unk_token="?")).save(str(tmp_path / "model/tokenizer.json"))
    text = text_of(lambda console: views.rollout(whole.path, 0, 1, console))
    assert line_of(text, 3) == ["3", "21", "'w21'", "●", "-0.2500", "1"]


def test_a_group_or_rollout_that_is_not_there_is_one_line(whole: RunDir) -> None:
    with pytest.raises(ConfigError, match="no group 7: its groups are 0 to 1"):
        views.group(whole.path, 7)
    with pytest.raises(ConfigError, match="no rollout 2: they are numbered 0 to 1"):
        views.rollout(whole.path, 0, 2)
    with pytest.raises(StoreError, match="cannot open"):
        views.rollout(whole.path, 1, 0)


def test_inspection_imports_nothing_heavy(whole: RunDir) -> None:
    script = (
        "import sys; from pathlib import Path; from molt.inspect import views\n"
        "views.overview(Path(sys.argv[1])); views.rollout(Path(sys.argv[1]), 0, 0)\n"
        "print([m for m in ('torch', 'vllm', 'transformers', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(whole.path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
