"""The file that groups are saved in: everything that training on them later needs, and what proves that it may.

JSON lines: a head that says how the samples were made, a group per line, and a last line with their number, so that a
file that was cut is seen as such. Floats are written so that they come back bit for bit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verl_contracts.errors import DataError
from verl_contracts.runtime import PayloadRef
from verl_contracts.samples import FAILED, SCORED, GroupResult, GroupUid, SampleResult, Trajectory
from verl_contracts.tokens import LogprobKind, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verl_contracts.training import TrainRow
    from verl_trainers.config.schema import RunConfig

__all__ = [
    "RolloutHead",
    "RolloutLimits",
    "group_line",
    "head_line",
    "head_of",
    "last_line",
    "limits_of",
    "read_rollouts",
    "weights_fingerprint",
]

FORMAT = "verl-rollouts-1"
_EDGE_BYTES = 1 << 20


HEAD_KEYS = {
    "weights": "weights in actor_rollout_ref.model.path",
    "n": "actor_rollout_ref.rollout.n",
    "temperature": "actor_rollout_ref.rollout.temperature",
    "top_p": "actor_rollout_ref.rollout.top_p",
    "top_k": "actor_rollout_ref.rollout.top_k",
}
"""Field of the head → what decides it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutHead:
    """How the samples of a file were made. Training on them asks for the same."""

    weights: str
    """Fingerprint of the weights that sampled."""
    n: int
    """Samples in a group."""
    temperature: float
    top_p: float
    top_k: int | None
    """None when nothing was cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """What a saved group must keep to, to be trained on."""

    n: int
    max_tokens: int
    """Prompt and response together."""
    vocab_size: int
    allow_fewer: bool
    """Whether a group of fewer than `n` samples may be trained on."""


def limits_of(config: RunConfig) -> RolloutLimits:
    """Return the limits under `config`. Raises `DataError` when the model does not say how many tokens it knows."""
    file = Path(config.actor_rollout_ref.model.path) / "config.json"
    try:
        model = _mapping(json.loads(file.read_text(encoding="utf-8")))
        vocab_size = _int(_mapping(model.get("text_config", model))["vocab_size"])
    except (OSError, ValueError, TypeError, KeyError) as exc:
        raise DataError(f"actor_rollout_ref.model.path: {file} does not say vocab_size: {exc}") from exc
    return RolloutLimits(
        n=config.actor_rollout_ref.rollout.n,
        max_tokens=config.data.max_prompt_length + config.data.max_response_length,
        vocab_size=vocab_size,
        allow_fewer=config.reward.unusable == "train_rest",
    )


def head_of(config: RunConfig) -> RolloutHead:
    """Return how samples are made under `config`. Reads the model's weights in part."""
    rollout = config.actor_rollout_ref.rollout
    return RolloutHead(
        weights=weights_fingerprint(Path(config.actor_rollout_ref.model.path)),
        n=rollout.n,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
    )


def weights_fingerprint(model: Path) -> str:
    """Return what tells apart two folders' weights: size, first and last MiB of each file. Names do not count."""
    digest = hashlib.sha256()
    for file in sorted([*model.glob("*.safetensors"), *model.glob("*.bin")]):
        with file.open("rb") as data:
            size = file.stat().st_size
            digest.update(f"{size};".encode())
            digest.update(data.read(_EDGE_BYTES))
            data.seek(max(0, size - _EDGE_BYTES))
            digest.update(data.read(_EDGE_BYTES))
    return digest.hexdigest()[:16]


def head_line(head: RolloutHead) -> str:
    """Return the first line."""
    return json.dumps({"format": FORMAT, **dataclasses.asdict(head)})


def group_line(uid: str, samples: Sequence[tuple[TrainRow, tuple[Trajectory, ...]]]) -> str:
    """Return the line of one group."""
    rows = [
        {
            "index": row.sample,
            "score": row.score,
            "trajectories": [
                {
                    "ids": part.ids,
                    "loss_mask": part.loss_mask,
                    "logprobs": part.logprobs,
                    "spans": [(span.version, span.kv_version, span.start, span.end) for span in part.spans],
                    "logprob_kind": part.logprob_kind,
                    "prompt_length": part.prompt_length,
                    "truncated": part.truncated,
                }
                for part in trajectories
            ],
        }
        for row, trajectories in samples
    ]
    return json.dumps({"uid": uid, "samples": rows}, allow_nan=False)


def last_line(groups: int) -> str:
    """Return the line that says that the file is complete."""
    return json.dumps({"groups": groups})


def read_rollouts(file: str, *, head: RolloutHead, limits: RolloutLimits) -> list[GroupResult]:
    """Return the groups of a file, their tokens inside.

    Raises `DataError` when the file is cut or malformed, or when its samples cannot be trained on under `head`.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise DataError(f"data.rollout_files: {file} cannot be read: {exc}") from exc
    if not lines:
        raise DataError(f"data.rollout_files: {file} is empty")
    _check_head(_object(lines[0], f"{file}:1"), head, file)
    if _object(lines[-1], f"{file}:{len(lines)}").get("groups") != len(lines) - 2:
        raise DataError(
            f"data.rollout_files: {file} is cut: the last line does not say that it holds {len(lines) - 2} groups"
        )
    return [_group(line, limits, f"{file}:{number}") for number, line in enumerate(lines[1:-1], start=2)]


def _check_head(found: Mapping[str, object], wanted: RolloutHead, file: str) -> None:
    if found.get("format") != FORMAT:
        raise DataError(f"data.rollout_files: {file} was not written by trainer.rollout_only (its head: {found!r:.80})")
    wrong = [
        f"{key}: {found.get(name)!r} when they were sampled, {now!r} now"
        for name, key in HEAD_KEYS.items()
        if found.get(name) != (now := getattr(wanted, name))
    ]
    if wrong:
        shown = "".join(f"\n  {line}" for line in wrong)
        raise DataError(f"data.rollout_files: make these equal, to train on the samples in {file}:{shown}")


def _group(line: str, limits: RolloutLimits, place: str) -> GroupResult:
    """Return one group; samples that were not saved come back as failed ones."""
    row = _object(line, place)
    try:
        saved = [_sample(item, limits) for item in _list(row["samples"])]
        missing = [
            SampleResult(index=index, outcome=FAILED)
            for index in range(limits.n)
            if index not in [sample.index for sample in saved]
        ]
        if missing and not limits.allow_fewer:
            raise ValueError(
                f"{len(saved)} of {limits.n} samples have a score; reward.unusable=train_rest trains on such a group"
            )
        samples = sorted([*saved, *missing], key=lambda sample: sample.index)
        return GroupResult(uid=GroupUid.parse(str(row["uid"])), samples=tuple(samples))
    except (KeyError, TypeError, ValueError) as exc:
        raise DataError(f"data.rollout_files: {place} cannot be trained on: {exc}") from exc


def _sample(value: object, limits: RolloutLimits) -> SampleResult:
    row = _mapping(value)
    trajectories = tuple(_trajectory(_mapping(item)) for item in _list(row["trajectories"]))
    for part in trajectories:
        if len(part.ids) > limits.max_tokens:
            raise ValueError(
                f"{len(part.ids)} tokens, and data.max_prompt_length + data.max_response_length = {limits.max_tokens}"
            )
        if not 0 <= min(part.ids) <= max(part.ids) < limits.vocab_size:
            raise ValueError(
                f"token ids {min(part.ids)}..{max(part.ids)}, and the model has 0..{limits.vocab_size - 1}"
            )
        if any(span.version for span in part.spans):
            raise ValueError("tokens of another version than 0, that of the weights a run starts from")
    if not any(part.num_trained for part in trajectories):
        raise ValueError(f"sample {row['index']} has no token that the policy sampled")
    return SampleResult(
        index=_int(row["index"]),
        outcome=SCORED,
        score=_float(row["score"]),
        payload=PayloadRef(num_bytes=0, value=trajectories),
        num_tokens=sum(len(part.ids) for part in trajectories),
        num_trained=sum(part.num_trained for part in trajectories),
        versions=(0, 0),
        truncated=any(part.truncated for part in trajectories),
    )


def _trajectory(row: Mapping[str, object]) -> Trajectory:
    spans = [[_int(number) for number in _list(span)] for span in _list(row["spans"])]
    return Trajectory(
        ids=tuple(_int(each) for each in _list(row["ids"])),
        loss_mask=tuple(_int(each) for each in _list(row["loss_mask"])),
        logprobs=tuple(_float(each) for each in _list(row["logprobs"])),
        spans=tuple(VersionSpan(version=v, kv_version=kv, start=start, end=end) for v, kv, start, end in spans),
        logprob_kind=LogprobKind(str(row["logprob_kind"])),
        prompt_length=_int(row["prompt_length"]),
        truncated=row["truncated"] is True,
    )


def _object(line: str, place: str) -> Mapping[str, object]:
    try:
        return _mapping(json.loads(line))
    except (ValueError, TypeError) as exc:
        raise DataError(f"data.rollout_files: {place} is not a JSON object: {exc}") from exc


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"an object was expected, got {value!r:.40}")
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"a list was expected, got {value!r:.40}")
    return value


def _int(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"a whole number was expected, got {value!r:.40}")
    return value


def _float(value: object) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(f"a finite number was expected, got {value!r:.40}")
    return float(value)
