# SPDX-License-Identifier: Apache-2.0
"""One whole run, strictly on-policy and with several turns, read back in every way there is."""

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import molt.store
from molt.config import load_resolved
from molt.data import row_of
from molt.inspect.history import read_history
from molt.metrics import METRICS
from molt.records import TRAIN, Checkpoint, Group, Lease, MoltError, Plan, PublishBegin, PublishEnd
from molt.store.journal import read_journal
from molt.store.schema import SegmentRow
from molt.store.shards import read_group, to_rows
from molt.store.verify import verify
from tests.e2e.attempt import Attempt
from tests.e2e.attempt import molt as run_molt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

STEPS, GROUPS, SAMPLES = 3, 6, 8
OVERRIDES = (
    "pool.max_lag=0", f"trainer.steps={STEPS}", f"trainer.groups={GROUPS}", "optim.warmup=0",
    "trainer.minibatches=2", "checkpoint.every=2", "eval.sampled.num_samples=4",
)  # fmt: skip
TOLERANCE = 1e-5  # nats; float32, the same arithmetic in another order
BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "vllm", "transformers", "nemo_automodel", "pandas"):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocked())
"""


class Finished:
    """A run that ended well, and everything it wrote."""

    def __init__(self, attempt: Attempt) -> None:
        self.path, self.attempt = attempt.run, attempt
        self.records = list(read_journal(attempt.run))
        self.config = load_resolved(attempt.run / "config.json")

    def of(self, kind: type) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]

    @cached_property
    def rows(self) -> list[SegmentRow]:
        groups = self.of(Group)
        return [r for g in groups for r in to_rows(read_group(self.path, g.where, 0.0))]

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.config.model.path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    attempt = Attempt(tmp_path_factory.mktemp("loop") / "guess", "guess", *OVERRIDES)
    try:
        attempt.end()
        assert attempt.status == 0, attempt.output
        yield Finished(attempt)
    finally:
        attempt.close()


def test_a_run_ends_by_telling_what_it_reached_and_leaves_nothing(run: Finished):
    output = run.attempt.output
    for name in ("eval/greedy/reward", "eval/sampled/reward", "reward/mean"):
        assert f"{name} " in output
    assert "molt inspect" in output.splitlines()[-1]
    assert run.attempt.left(5.0) == []


def test_every_public_metric_is_in_every_line(run: Finished):
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["step"], row["version"]) for row in rows] == [(1, 2), (2, 3), (3, 4)]
    for row in rows:
        names = {name for name in row if not name.startswith("eval/")}
        assert names == METRICS.keys() - {"eval/*"} | {"step", "version", "time"}
        assert all(np.isfinite(value) for value in row.values())


def test_evaluations_frame_the_run_and_carry_their_version(run: Finished):
    rows = run.attempt.rows
    for name, prompts in (("greedy", 6), ("sampled", 24)):
        first = next(row for row in rows if f"eval/{name}/reward" in row)
        assert (first[f"eval/{name}/step"], first[f"eval/{name}/version"]) == (0, 1)
        assert rows[-1][f"eval/{name}/step"] == STEPS
        assert rows[-1][f"eval/{name}/version"] == STEPS + 1
        assert rows[-1][f"eval/{name}/rollouts"] == prompts
        last = [r for r in run.rows if r.task == name and r.versions[-1] == STEPS + 1]
        mean = np.mean([r.reward for r in last if r.reward is not None])
        assert rows[-1][f"eval/{name}/reward"] == pytest.approx(mean)


def test_engine_and_trainer_agree_at_every_step(run: Finished):
    for row in run.attempt.rows:
        assert abs(row["mismatch/kl"]) <= 1e-6
        assert row["mismatch/ratio_max"] <= 1.001
        assert row["grad_norm"] > 0.01  # the weights did move in between


def test_no_trained_token_is_older_than_the_weights_it_trains(run: Finished):
    steps = {begin.version: begin.step for begin in run.of(PublishBegin)}
    step_of = {group: plan.step for plan in run.of(Plan) for group in plan.groups}
    lags = [
        step_of[row.group] - 1 - steps[version]
        for row in run.rows
        if row.task == TRAIN
        for version in row.versions[row.action_mask].tolist()
    ]
    assert len(lags) >= STEPS * GROUPS * SAMPLES  # a token a rollout at the least
    assert set(lags) == {0}


def test_every_group_of_the_journal_verifies(run: Finished):
    assert [f for f in verify(run.path) if f.kind == "problem"] == []
    assert len(run.of(Group)) == STEPS * GROUPS + 2 * 2 * 6  # two evaluations, twice, of 6 prompts


def test_the_journal_tells_the_whole_story(run: Finished):
    trained = range(STEPS * GROUPS)
    leases = [lease for lease in run.of(Lease) if lease.task == TRAIN]
    assert sorted(lease.group for lease in leases) == list(trained)
    seed = run.config.run.seed
    assert all(lease.prompt == row_of(seed, lease.group, 6, True) for lease in leases)
    assert sorted(g.group for g in run.of(Group) if g.task == TRAIN) == list(trained)
    plans = run.of(Plan)
    assert [plan.step for plan in plans] == [1, 2, 3]
    assert all(len(plan.groups) == GROUPS for plan in plans)
    assert sorted(group for plan in plans for group in plan.groups) == list(trained)
    assert [(b.version, b.step) for b in run.of(PublishBegin)] == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert [(end.version, end.ok) for end in run.of(PublishEnd)] == [(v, True) for v in range(1, 5)]
    assert [(c.step, c.version) for c in run.of(Checkpoint)] == [(2, 3), (3, 4)]


def test_sampled_tokens_are_what_the_agent_was_told(run: Finished):
    for row in run.rows:
        said = [m["content"] for m in json.loads(row.messages) if m["role"] == "assistant"]
        ids = [row.token_ids[start:end] for start, end in row.action_spans.tolist()]
        assert [run.tokenizer.decode(i, skip_special_tokens=True) for i in ids] == said
    assert {len(row.action_spans) for row in run.rows} == {1, 2, 3}


def test_a_segment_is_the_rendered_conversation(run: Finished):
    # Where the text says all about the tokens: a few samples have one that text does not show.
    same = 0
    for row in run.rows:
        text = run.tokenizer.apply_chat_template(json.loads(row.messages), tokenize=False)
        rendered = run.tokenizer.encode(text, add_special_tokens=False)[: len(row.token_ids)]
        same += rendered == row.token_ids.tolist()
    assert same >= 0.95 * len(run.rows)


def test_shards_open_in_other_tools_without_molt(run: Finished):
    program = """
import json, sys
from pathlib import Path
import duckdb, pandas, polars
import pyarrow as pa

paths = sorted(Path(sys.argv[1]).glob("shards/*/*.arrow"))
frame = polars.concat(polars.read_ipc(path) for path in paths)
table = pa.concat_tables(pa.ipc.open_file(path).read_all() for path in paths)
panda = pandas.concat(pandas.read_feather(path) for path in paths)
query = "select task, count(*), sum(len(token_ids)), sum(reward) from table group by 1"
query = query.replace("from table", 'from "table"')
of_polars = frame.group_by("task").agg(
    polars.len(), polars.col("token_ids").list.len().sum(), polars.col("reward").sum()
)
of_pandas = panda.assign(n=panda.token_ids.map(len)).groupby("task").agg(
    {"run": "count", "n": "sum", "reward": "sum"}
)
print(json.dumps([
    sorted(map(list, of_polars.rows())),
    sorted(map(list, duckdb.sql(query).fetchall())),
    sorted([task, *map(float, row)] for task, *row in of_pandas.itertuples()),
    "molt" in sys.modules,
]))
"""
    result = subprocess.run(
        [sys.executable, "-c", program, str(run.path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    *answers, imported = json.loads(result.stdout)
    assert not imported
    tasks = sorted({row.task for row in run.rows})
    mine = [[row for row in run.rows if row.task == task] for task in tasks]
    expected = [
        [task, len(rows), sum(len(r.token_ids) for r in rows), sum(r.reward or 0 for r in rows)]
        for task, rows in zip(tasks, mine, strict=True)
    ]
    assert answers == [expected] * 3


def test_the_run_is_one_table(run: Finished):
    table = molt.store.read(run.path)
    assert table.num_rows == len(run.rows)
    assert table.column("token_ids").to_pylist() == [row.token_ids.tolist() for row in run.rows]


def test_an_exported_checkpoint_gives_the_recorded_log_probabilities(run: Finished):
    import torch
    from transformers import AutoModelForCausalLM

    to = run.path.with_name("exported")
    result = run_molt("export", str(run.path), "--to", str(to))
    assert result.returncode == 0, result.stderr
    model = AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(run.config.model.path, dtype=torch.float32)
    rows = [r for r in run.rows if r.task == "sampled" and r.versions[-1] == STEPS + 1]
    assert len(rows) == 24
    worst = max(_gap(model, row) for row in rows)
    assert worst <= TOLERANCE
    assert max(_gap(before, row) for row in rows) > 100 * TOLERANCE  # what it would be untrained


def _gap(model: Any, row: SegmentRow) -> float:
    """Largest difference between a model's log-probabilities and the recorded ones."""
    import torch

    ids = torch.tensor(row.token_ids, dtype=torch.int64)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)
    picked = logprobs.gather(1, ids[1:, None])[:, 0].numpy()
    return float(np.nanmax(np.abs(picked - row.behavior_logprobs[1:])))


def test_inspection_needs_no_torch(run: Finished, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    said = []
    for options in ([], ["--group", "7"], ["--group", "7", "--rollout", "2"]):
        result = run_molt("inspect", str(run.path), *options, PYTHONPATH=str(tmp_path))
        assert result.returncode == 0, result.stderr
        said.append(result.stdout)
    overview, group, rollout = said
    assert "step 3, version 4" in overview
    assert "18 trained" in overview
    record = next(g for g in run.of(Group) if g.group == 7)
    step = next(plan.step for plan in run.of(Plan) if 7 in plan.groups)
    assert f"group 7 (train, prompt {record.prompt}" in group
    assert f"in the plan of step {step}, lag 0" in group
    assert record.where.path in group
    row = next(r for r in run.rows if (r.group, r.rollout) == (7, 2))
    for i in np.flatnonzero(row.action_mask):
        assert f"{row.behavior_logprobs[i]:.4f}" in rollout
    assert rollout.count("●") == row.action_mask.sum()


def test_the_import_of_torch_is_really_blocked(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    result = run_molt(
        "export", str(tmp_path), "--to", str(tmp_path / "x"), PYTHONPATH=str(tmp_path)
    )
    assert "torch is not installed here" in result.stderr


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("Temperature", "recorded temperature is multiplied by 0.8"),
        ("Positions", "check of agreement .* look for a position offset"),
        ("Seams", "check of layouts .* position ids or the attention mask"),
    ],
)
def test_the_gate_refuses_a_wrong_policy_on_what_the_engine_sampled(
    run: Finished, policy: str, says: str
):
    # The first plan again, under the weights that sampled it: only the policy is wrong.
    from molt.trainer import gate
    from molt.trainer.batch import read_plan
    from molt.trainer.policy import build

    trainer = run.config.trainer.model_copy(update={"policy": f"tests.e2e.wrong:{policy}"})
    config = run.config.model_copy(update={"trainer": trainer})
    plan = run.of(Plan)[0]
    groups = tuple(g for g in run.of(Group) if g.group in plan.groups)
    batch = read_plan(run.path, groups, {1: 0}, 0, 1)
    assert gate.check(build(run.config, 0, 1), batch, run.config)
    with pytest.raises(MoltError, match=says):
        gate.check(build(config, 0, 1), batch, config)


def test_history_and_coordinator_agree_on_what_was_trained(run: Finished):
    history = read_history(run.path)
    assert (history.step, history.trained, history.version) == (STEPS, STEPS, STEPS + 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_real_model_takes_three_steps(tmp_path: Path):
    attempt = Attempt(tmp_path / "smollm", "smollm")
    try:
        assert attempt.end().status == 0, attempt.output
        assert [row["step"] for row in attempt.rows] == [1, 2, 3]
        assert all(row["lag/max"] <= 1 for row in attempt.rows)
        assert attempt.rows[0]["mismatch/ratio_max"] <= 1.001  # on-policy: one version so far
        assert [f for f in verify(attempt.run) if f.kind == "problem"] == []
        assert attempt.left(5.0) == []
    finally:
        attempt.close()
