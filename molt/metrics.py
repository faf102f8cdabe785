# SPDX-License-Identifier: Apache-2.0
"""The public metrics: their names in `metrics.jsonl`, units, healthy ranges and meaning.

One table for the README, `molt watch` and `molt report`. A name ending in `*` stands for a family.
To add a metric: return it where it is known and explain it here.
"""

from typing import NamedTuple


class Metric(NamedTuple):
    """What a person should know about a number before trusting it."""

    unit: str
    healthy: str
    meaning: str


METRICS: dict[str, Metric] = {
    "reward/mean": Metric("reward", "rises", "mean reward of the plan's rollouts that have one"),
    "reward/std": Metric("reward", "> 0", "standard deviation of those rewards; 0 teaches nothing"),
    "rollout/tokens": Metric("tokens", "no drift to the limit", "sampled tokens a rollout"),
    "rollout/truncated_fraction": Metric("", "< 0.05", "rollouts cut by a token limit"),
    "rollout/segments": Metric("", "1 for an Env", "token sequences a rollout"),
    "rollout/replay_miss": Metric("", "0", "resumed sessions that diverged from their record"),
    "rollout/resumed_tokens": Metric(
        "tokens", "0 but after a restart", "sampled tokens taken over from sessions that were cut"
    ),
    "rollout/dead_tokens": Metric(
        "tokens", "0", "sampled tokens that a resumed agent did not use again"
    ),
    "rollout/retries": Metric("rollouts", "0", "played again, since their agent had failed"),
    "failures/engine_restarts": Metric("", "0", "vLLM servers that were started again"),
    "failures/runner_restarts": Metric("", "0", "runners that were started again"),
    "failures/lost_runners": Metric("", "0", "runners that ended or fell silent with open leases"),
    "failures/publications": Metric("", "0", "publications that failed and were repeated"),
    "pool/in_flight": Metric("groups", "steady", "groups leased or ready when the step ended"),
    "lag/mean": Metric("steps", "≤ pool.max_lag", "mean age of the weights behind a trained token"),
    "lag/max": Metric("steps", "≤ pool.max_lag if stale = wait", "age of the oldest trained token"),
    "loss/policy": Metric("", "near 0", "the policy loss, averaged as algo.aggregation says"),
    "loss/clip_fraction": Metric("", "< 0.2", "trained tokens whose gradient the clip removed"),
    "mismatch/kl": Metric(
        "nats",
        "≤ 1e-6 on-policy in float32, else ≤ 1e-2",
        "mean log μ − log π_old of trained tokens",
    ),
    "mismatch/ratio_max": Metric(
        "", "≤ 1.001 in float32 on-policy", "largest π_old/μ or its inverse over trained tokens"
    ),
    "entropy": Metric("nats", "falls slowly, not to 0", "mean entropy of π_old at trained tokens"),
    "grad_norm": Metric("", "steady", "norm before clipping, mean over the step's updates"),
    "lr": Metric("", "as scheduled", "learning rate of the step"),
    "nan_rollouts": Metric("rollouts", "0", "dropped for a log-probability that is not finite"),
    "skipped_updates": Metric("updates", "0", "minibatches without a token to train"),
    "time/step_s": Metric("s", "≈ the slower half", "from the end of one step to the next"),
    "time/wait_s": Metric("s", "≈ 0 if trainer-bound", "the trainer waited for a plan"),
    "time/train_s": Metric("s", "steady", "reading, packing, forward, backward and update"),
    "time/publish_s": Metric("s", "≪ time/step_s", "new weights to every engine"),
    "time/pause_s": Metric("s", "≪ time/step_s", "longest standstill of an engine for new weights"),
    "throughput/train_tokens_per_s": Metric(
        "tokens/s", "steady", "tokens trained on, prompts included"
    ),
    "throughput/rollout_tokens_per_s": Metric(
        "tokens/s", "steady", "tokens sampled by all engines"
    ),
    "eval/*": Metric("", "", "eval/<name>/<metric>: scores of an evaluation and its version"),
}
