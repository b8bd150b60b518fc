"""The metrics that every mode records, in one table: METRICS.md is made from it, and tests hold the runs to it.

It owns names and their meaning. It prevents two modes from calling one thing by two names, and a metric of which nobody
can say what its unit is, or why it is missing from a run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

__all__ = ["ALWAYS", "METRICS", "MetricInfo", "describe", "render"]

ALWAYS = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInfo:
    """One metric, or several that differ in a part of their name."""

    name: str
    """A part in braces stands for any text: ``staleness/{versions}``."""
    unit: str
    meaning: str
    reduce: Literal["mean", "sum", "max", "min", "last"] = "last"
    """How the numbers of one step become one: those of samples, of updates, of ranks, of replicas."""
    present: str = ALWAYS
    """When a step has it; `ALWAYS`, or the condition."""
    section: str = ""
    """Heading that it stands under."""


def _section(name: str, *rows: MetricInfo) -> tuple[MetricInfo, ...]:
    return tuple(replace(row, section=name) for row in rows)


METRICS: tuple[MetricInfo, ...] = (
    *_section(
        "Reward",
        MetricInfo(name="reward", unit="score", meaning="Score of the samples trained on.", reduce="mean"),
        MetricInfo(name="reward/std", unit="score", meaning="Standard deviation of these scores over the batch."),
        MetricInfo(
            name="advantage/zero_groups",
            unit="share of groups",
            meaning="Groups without any advantage, which teach nothing: all their samples scored alike.",
        ),
        MetricInfo(
            name="sample/{name}",
            unit="the plug-in's",
            meaning="A number that the agent loop or the reward gave with its samples.",
            reduce="mean",
            present="when a plug-in gives it",
        ),
    ),
    *_section(
        "Lengths",
        MetricInfo(
            name="prompt_length/mean",
            unit="tokens",
            meaning="Tokens of a sample that the policy did not sample: the prompt, and what tools and users added.",
            reduce="mean",
        ),
        MetricInfo(name="prompt_length/max", unit="tokens", meaning="The most of them in a sample.", reduce="max"),
        MetricInfo(
            name="response_length/mean",
            unit="tokens",
            meaning="Tokens of a sample that the policy sampled and that are trained on.",
            reduce="mean",
        ),
        MetricInfo(name="response_length/max", unit="tokens", meaning="The most of them in a sample.", reduce="max"),
        MetricInfo(
            name="truncated", unit="share of samples", meaning="Samples that the length budget ended.", reduce="mean"
        ),
    ),
    *_section(
        "Policy",
        MetricInfo(name="actor/loss", unit="loss", meaning="What was minimized.", reduce="mean"),
        MetricInfo(name="actor/pg_loss", unit="loss", meaning="Its policy-gradient part.", reduce="mean"),
        MetricInfo(
            name="actor/entropy",
            unit="nats",
            meaning="Entropy of the policy at a trained token, at the sampling temperature.",
            reduce="mean",
            present="when a token was computed: not where all advantages are 0 and nothing else needs the tokens",
        ),
        MetricInfo(
            name="actor/clip_share",
            unit="share of tokens",
            meaning="Tokens whose gradient the loss clipped.",
            reduce="mean",
            present="as actor/entropy, and with a loss that says it, as ppo_clip does",
        ),
        MetricInfo(
            name="actor/ratio",
            unit="1",
            meaning="Probability of a token under the policy over that under the old one.",
            reduce="mean",
            present="as actor/clip_share",
        ),
        MetricInfo(
            name="actor/approx_kl",
            unit="nats",
            meaning="KL(old policy || policy) a token, by the estimate k3.",
            reduce="mean",
            present="as actor/clip_share",
        ),
        MetricInfo(
            name="actor/{name}",
            unit="the loss's",
            meaning="Another number that the loss gives by token.",
            reduce="mean",
            present="as actor/entropy, and with a loss that gives it",
        ),
        MetricInfo(
            name="actor/kl_loss",
            unit="nats",
            meaning="KL(policy || reference) a token, by the estimate that kl_loss_type names.",
            reduce="mean",
            present="with actor.use_kl_loss, otherwise as actor/entropy",
        ),
        MetricInfo(
            name="actor/grad_norm", unit="1", meaning="Norm of the gradient, before it was clipped.", reduce="mean"
        ),
        MetricInfo(name="actor/lr", unit="1", meaning="Learning rate."),
        MetricInfo(
            name="actor/skipped_updates",
            unit="updates",
            meaning="Optimizer steps left out because loss or gradient was not finite.",
            reduce="sum",
        ),
        MetricInfo(
            name="actor/zero_advantage_rows",
            unit="sequences",
            meaning="Sequences without any advantage; they are not computed unless entropy or KL needs them.",
            reduce="sum",
        ),
    ),
    *_section(
        "Rollout against trainer",
        MetricInfo(
            name="rollout/logprob_diff",
            unit="nats",
            meaning="|log-prob as sampled - log-prob before the first update| a token, where one version made it.",
            reduce="mean",
            present="as actor/entropy",
        ),
        MetricInfo(
            name="rollout/logprob_diff_max",
            unit="nats",
            meaning="The largest of these differences.",
            reduce="max",
            present="as actor/entropy",
        ),
        MetricInfo(
            name="rollout/logprob_diff_same_version",
            unit="nats",
            meaning="The mean over tokens of the version that is trained: what is left is numerics, not staleness. The "
            "run warns once where it is above actor_rollout_ref.rollout.logprob_diff_limit.",
            reduce="mean",
            present="as actor/entropy, when there are such tokens",
        ),
    ),
    *_section(
        "Staleness",
        MetricInfo(
            name="staleness/mean",
            unit="versions",
            meaning="How far a sample's oldest trained token is behind the policy that is trained.",
            reduce="mean",
        ),
        MetricInfo(name="staleness/max", unit="versions", meaning="The most of it in a sample.", reduce="max"),
        MetricInfo(
            name="staleness/{versions}",
            unit="samples",
            meaning="Samples of that staleness: a histogram from 0 to the bound.",
            reduce="sum",
        ),
    ),
    *_section(
        "Queue and waste",
        MetricInfo(
            name="groups_outstanding",
            unit="groups",
            meaning="Admitted and neither trained nor dropped, at the end of the step.",
        ),
        MetricInfo(name="groups_in_play", unit="groups", meaning="Those of them that are being generated."),
        MetricInfo(name="groups_ready", unit="groups", meaning="Those of them that wait to be trained."),
        MetricInfo(
            name="useful_tokens",
            unit="share of tokens",
            meaning="Tokens trained so far, of those trained or thrown away. What a dead process was sampling is in "
            "neither.",
        ),
        MetricInfo(name="groups_dropped", unit="groups", meaning="Dropped so far, for any reason."),
        MetricInfo(
            name="discards/{reason}",
            unit="groups",
            meaning="Dropped so far, by reason: unusable (samples without a score, or nothing to train on), stale, "
            "infrastructure (played again, or given up).",
        ),
        MetricInfo(
            name="failures/{outcome}",
            unit="samples",
            meaning="Samples so far that ended without a score: failed, timed_out, abstained (the reward declined).",
        ),
        MetricInfo(
            name="failures/processes", unit="failures", meaning="Failures of processes that were reported so far."
        ),
    ),
    *_section(
        "Replicas",
        MetricInfo(
            name="rollout/replicas",
            unit="replicas",
            meaning="Replicas that are neither dead nor invalid, that is, without verified weights. This section is "
            "about those that told their status during the step: they are asked when its batch is complete, and "
            "nothing waits for them.",
            present="when a replica answered",
        ),
        MetricInfo(
            name="rollout/running",
            unit="sequences",
            meaning="Being decoded when they answered.",
            reduce="sum",
            present="as rollout/replicas",
        ),
        MetricInfo(
            name="rollout/waiting",
            unit="requests",
            meaning="Accepted by a replica and not begun when they answered.",
            reduce="sum",
            present="as rollout/replicas",
        ),
        MetricInfo(
            name="rollout/generated_tokens_per_s",
            unit="tokens / s",
            meaning="Tokens sampled since they answered in the step before, over that time: those of validations and "
            "those that are thrown away too.",
            reduce="sum",
            present="when a replica answered in the step before too",
        ),
        MetricInfo(
            name="rollout/busy_share",
            unit="share of time",
            meaning="Part of that time in which a replica computed; otherwise it was idle, paused or asleep.",
            reduce="mean",
            present="as rollout/generated_tokens_per_s",
        ),
        MetricInfo(
            name="rollout/prefix_cache_hit_share",
            unit="share of tokens",
            meaning="Prompt tokens taken from the prefix cache, of those of all requests that ended in that time.",
            present="as rollout/generated_tokens_per_s, when requests ended",
        ),
    ),
    *_section(
        "Speed",
        MetricInfo(name="samples_per_s", unit="samples / s", meaning="Samples trained, over seconds/step."),
        MetricInfo(name="tokens_per_s", unit="tokens / s", meaning="Tokens trained, over seconds/step."),
        MetricInfo(
            name="seconds/step",
            unit="s",
            meaning="From asking for the batch to serving the weights made of it; validation comes after it.",
        ),
        MetricInfo(name="seconds/wait", unit="s", meaning="Waiting for the batch."),
        MetricInfo(name="seconds/update", unit="s", meaning="The update, as the driver sees it."),
        MetricInfo(
            name="seconds/update/{part}", unit="s", meaning="A part of the update, on the slowest rank.", reduce="max"
        ),
        MetricInfo(name="seconds/sync", unit="s", meaning="The weight sync.", present="in steps with a sync"),
        MetricInfo(
            name="seconds/sync/{phase}",
            unit="s",
            meaning="A phase of the sync, as its manager reports it.",
            present="in steps with a sync whose manager reports it",
        ),
        MetricInfo(
            name="seconds/sleep",
            unit="s",
            meaning="Replicas giving their memory back.",
            present="where replicas sleep while the trainer trains",
        ),
        MetricInfo(name="seconds/wake", unit="s", meaning="Replicas taking it again.", present="as seconds/sleep"),
        MetricInfo(
            name="seconds/sample",
            unit="s",
            meaning="One sample, from its start to its score.",
            reduce="mean",
        ),
        MetricInfo(name="time", unit="s since 1970", meaning="When the step ended."),
    ),
    *_section(
        "Validation",
        MetricInfo(
            name="val/score",
            unit="score",
            meaning="Score of the held-out samples, in a row of its own.",
            reduce="mean",
            present="after a validation",
        ),
        MetricInfo(
            name="val/version",
            unit="version",
            meaning="Weights that were validated, at least.",
            present="as val/score",
        ),
    ),
)
"""Every name that a run may record, in the order of METRICS.md."""


@cache
def describe(name: str) -> MetricInfo | None:
    """Return what is known of `name`; None for a name that is not in the table."""
    exact = [row for row in METRICS if row.name == name]
    pattern = [row for row in METRICS if "{" in row.name and re.fullmatch(_pattern(row.name), name)]
    return next(iter([*exact, *pattern]), None)


def render() -> str:
    """Return METRICS.md."""
    lines = [
        "# Metrics",
        "",
        "Every mode records these once a step, and every tracker gets them. A part of a name in braces stands for any",
        "text; *of a step* is how the numbers of samples, updates, ranks or replicas become one number.",
        "",
        "Made from `src/verl_trainers/core/metric_table.py` by `python tools/metrics.py --write`.",
    ]
    section = ""
    for row in METRICS:
        if row.section != section:
            section = row.section
            lines += [
                "",
                f"## {section}",
                "",
                "| name | unit | meaning | of a step | present |",
                "|---|---|---|---|---|",
            ]
        cells = (f"`{row.name}`", row.unit, row.meaning, row.reduce, row.present)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _pattern(name: str) -> str:
    head, _, rest = name.partition("{")
    return re.escape(head) + ".+" + re.escape(rest.partition("}")[2])
