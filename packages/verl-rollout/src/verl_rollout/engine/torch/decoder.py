"""What the compute thread does: fill slots, decode one token for all of them, hand back what has ended.

Plain and synchronous, so that every interleaving of admission, abort and update can be tested step by step. All
decisions are taken between two iterations; nothing here knows of threads, loops or deadlines.

A prompt's last token is never prefilled: decoding begins with it. So tokens are chosen in one place only, and a prompt
whose other tokens lie in some active slot already needs no computation at all, just a copy.

In deterministic mode every pass has one shape, whoever takes part, and tokens that were generated before an
interruption are decoded again instead of prefilled. Then each bit of a sequence is a function of its prompt and key.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from verl_contracts.errors import ConfigError, StateError
from verl_contracts.rollout import ReplicaStatus
from verl_contracts.tokens import SAMPLED, AbortedCompletion, Completion, VersionSpan
from verl_rollout.engine.torch.cache import BlockDecode, Decode, Prefill
from verl_rollout.engine.torch.forward import build_forward
from verl_rollout.engine.torch.rows import Rows
from verl_rollout.engine.torch.sampling import choose, stream_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    from transformers import PreTrainedModel

    from verl_contracts.rollout import ReplicaState, RolloutSettings
    from verl_contracts.tokens import GenerationRequest
    from verl_rollout.engine.torch.model import Shape

__all__ = ["Decoder", "Job", "Result"]

_ALIGN = 8
"""Key lengths are multiples of this."""
_PREFILL_TOKENS = 4096
"""Most tokens of one prefill pass, padding included, unless a single prompt is longer."""
_FIXED_ROWS = 4
"""In deterministic mode: rows of every prefill pass, and fewest rows of a decode pass."""
_FIXED_TOKENS = 32
"""In deterministic mode: tokens of every prefill pass, and positions of every block of attention."""


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way through the decoder."""

    request: GenerationRequest
    ticket: int = 0
    """Whatever the owner wants to find it by."""
    marks: list[tuple[int, int, int]] = field(default_factory=list)
    """(first generated token, version, kv_version) of each span."""
    prefix: tuple[int, ...] | None = None
    """Key in the table of prefixes, while its slot serves as a source."""
    filled: bool = False
    """Whether its slot holds valid keys and values."""
    copied: int | None = None
    """Prompt tokens whose keys and values were copied from another slot; None before it has any."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a job ended."""

    job: Job
    value: Completion | AbortedCompletion | StateError


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class Decoder:
    """Slots, the queue before them, and the version that they decode with."""

    def __init__(self, model: PreTrainedModel, shape: Shape, settings: RolloutSettings, *, replica_id: str) -> None:
        self._model = model
        self._forward = build_forward(model, max_length=settings.max_model_len)
        self._shape = shape
        self._settings = settings
        self._replica_id = replica_id
        self._fixed = settings.deterministic
        self._slots = settings.max_num_seqs
        self._width = _round_up(max(_FIXED_ROWS, self._slots), shape.row_unit) if self._fixed else self._slots
        self._rows = Rows(self._width, settings.max_model_len)
        self._prefixes: dict[tuple[int, ...], Job] = {}
        self.version: int | None = None
        self.active: list[Job] = []
        """Job i sits in slot i."""
        self.waiting: deque[Job] = deque()
        self.generated_tokens = 0
        self._prompt_tokens = 0
        self._copied_tokens = 0
        self._allocate_cache()
        self._probe()

    def allocate(self) -> None:
        """Take hold of the model's parameters, and make an empty cache."""
        self._forward.bind()
        self._allocate_cache()

    def _allocate_cache(self) -> None:
        longest = self._settings.max_model_len
        self._cache = self._shape.build_cache(
            slots=self._width, dtype=getattr(torch, self._settings.dtype), max_length=longest
        )
        if self._fixed:
            self._cache.ensure(_round_up(longest, _FIXED_TOKENS))

    def release(self) -> None:
        """Let go of the parameters, and free the cache. Only when nothing is active."""
        self._forward.release()
        self._cache = self._shape.build_cache(slots=0, dtype=torch.float32, max_length=0)

    def _probe(self) -> None:
        """Run both kinds of pass once, so that a model that they do not fit is refused here and not in a run."""
        try:
            with torch.inference_mode():
                self._prefill([(0, (0, 0))])
                self._decode(1)
        except RuntimeError as exc:
            raise ConfigError(
                f"{type(self._model).__name__} does not run with {self._shape.heads} key heads of size "
                f"{self._shape.head_dim}, as its config says: {exc}; take vllm for this model"
            ) from exc
        self._allocate_cache()

    def status(self, state: ReplicaState, *, busy_s: float) -> ReplicaStatus:
        """Return the replica's status. May be called from another thread: it only reads."""
        return ReplicaStatus(
            replica=self._replica_id,
            state=state,
            version=self.version,
            running=len(self.active),
            waiting=len(self.waiting),
            generated_tokens=self.generated_tokens,
            busy_s=busy_s,
            prompt_tokens=self._prompt_tokens,
            cached_prompt_tokens=self._copied_tokens,
        )

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self.waiting.append(job)

    def admit(self) -> list[Result]:
        """Fill free slots from the queue. Returns the jobs that want newer weights than there are."""
        refused: list[Result] = []
        version = self.version
        if version is None:
            return refused
        while self.waiting and len(self.active) < self._slots:
            job = self.waiting.popleft()
            if version < job.request.min_version:
                reason = f"request {job.request.request_id!r} wants version {job.request.min_version} or newer"
                refused.append(
                    Result(job, StateError(f"{reason}, the replica holds {version}; sync the weights first"))
                )
                continue
            request = job.request
            self._rows.set(len(self.active), request, stream_of(self._settings.seed, request.key))
            job.marks = [(0, version, version)]
            self.active.append(job)
        return refused

    def step(self) -> list[Result]:
        """Decode one token for every active job, and return those that have ended."""
        if self.version is None:
            raise StateError("no weights committed; the engine must not decode")
        self._fill()
        count = len(self.active)
        if not count:
            return []
        ids, logprobs = self._decode(count)
        broken = ~np.isfinite(logprobs)
        fresh, ended, stopped = self._rows.advance(count, ids, logprobs)
        self.generated_tokens += fresh
        results: list[Result] = []
        for row in (broken | ended).nonzero()[0][::-1].tolist():
            job = self.active[row]
            if broken[row]:
                results.append(Result(job, self._diverged(job)))
                self._cache.clear(row)
                self._vacate(row)
                continue
            tokens, values, spans = self._output(row)
            completion = Completion(
                request_id=job.request.request_id,
                token_ids=tokens,
                logprobs=values,
                spans=spans,
                finish_reason="stop" if stopped[row] else "length",
                logprob_kind=SAMPLED,
                replica=self._replica_id,
            )
            self._vacate(row)
            results.append(Result(job, completion))
        return results

    def abort(self, wanted: Callable[[Job], bool], *, reason: str, queued: bool = True) -> list[Result]:
        """Cut the active jobs that are `wanted`, and those in the queue too if `queued`."""
        results: list[Result] = []
        for row in range(len(self.active) - 1, -1, -1):
            job = self.active[row]
            if wanted(job):
                results.append(self._aborted(job, self._output(row), reason))
                self._vacate(row)
        if queued:
            cut = [job for job in self.waiting if wanted(job)]
            if cut:
                self.waiting = deque(job for job in self.waiting if not wanted(job))
                results.extend(self._aborted(job, ((), (), ()), reason) for job in cut)
        return results

    def commit(self, version: int, *, keep_cache: bool) -> None:
        """Go on with the weights of `version`; active jobs keep what is cached, or compute it anew at the next step."""
        self.version = version
        self._prefixes.clear()
        for row, job in enumerate(self.active):
            generated = int(self._rows.known[row]) - len(job.request.prompt_ids)
            job.marks.append((generated, version, job.marks[-1][2] if keep_cache and job.filled else version))
            job.filled = job.filled and keep_cache
            job.prefix = None

    def _decode(self, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Run the model over the active rows and choose: [count] ids and log-probs."""
        width = self._width if self._fixed else count
        tokens, positions = self._rows.inputs(width)
        ids, place = self._put(tokens), self._put(positions)
        needed = int(positions[:count].max()) + 1
        self._cache.ensure(needed)
        if self._fixed:
            length = _round_up(needed, _FIXED_TOKENS)
            step: Decode = BlockDecode(self._cache, place, length=length, block=_FIXED_TOKENS)
        else:
            step = Decode(self._cache, place, length=min(_round_up(needed, _ALIGN), self._cache.length))
        logits = self._forward.logits(ids[:, None], place[:, None], step)
        sampling = self._rows.sampling(width)
        chosen, logprobs = choose(
            logits.float(),
            self._put(sampling.u),
            greedy=self._put_some(sampling.greedy),
            temperature=self._put_some(sampling.temperature),
            top_p=self._put_some(sampling.top_p),
            top_k=self._put_some(sampling.top_k),
        )
        # One copy, since each waits for the device; float64 holds ids and float32 exactly.
        both = torch.stack([chosen.double(), logprobs.double()]).cpu().numpy()[:, :count]
        return both[0].astype(np.int64), both[1].astype(np.float32)

    def _put(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        """Return `values` on the device; on the CPU they share memory, and must not change before they are used."""
        return torch.from_numpy(values).to(self._shape.device, non_blocking=True)

    def _put_some(self, values: npt.NDArray[np.generic] | None) -> torch.Tensor | None:
        return None if values is None else self._put(values)

    def _fill(self) -> None:
        """Compute or copy the prefixes of jobs whose slots are empty, each distinct prefix once."""
        leaders: list[tuple[int, tuple[int, ...]]] = []
        followers: dict[tuple[int, ...], list[int]] = {}
        for row, job in enumerate(self.active):
            if job.filled:
                continue
            request = job.request
            fixed = len(request.prompt_ids) - request.resumed_tokens
            known = int(self._rows.known[row])
            prefix = tuple(self._rows.tokens[row, : (fixed if self._fixed else known) - 1].tolist())
            self._rows.position[row] = len(prefix)
            job.filled = True
            job.copied = min(len(prefix), len(request.prompt_ids)) if prefix in self._prefixes else 0
            if not prefix:
                continue
            if prefix in self._prefixes:
                followers.setdefault(prefix, []).append(row)
                continue
            self._prefixes[prefix] = job
            job.prefix = prefix
            leaders.append((row, prefix))
        for group in self._groups(leaders):
            self._prefill(group)
        for prefix, rows in followers.items():
            self._cache.copy(self.active.index(self._prefixes[prefix]), rows, len(prefix))

    def _groups(self, leaders: list[tuple[int, tuple[int, ...]]]) -> list[list[tuple[int, tuple[int, ...]]]]:
        """Split prefixes into passes of similar length."""
        groups: list[list[tuple[int, tuple[int, ...]]]] = []
        for leader in sorted(leaders, key=lambda item: len(item[1])):
            group = groups[-1] if groups else None
            full = group is not None and (
                len(group) >= _FIXED_ROWS if self._fixed else (len(group) + 1) * len(leader[1]) > _PREFILL_TOKENS
            )
            if group is None or full:
                groups.append([leader])
            else:
                group.append(leader)
        return groups

    def _prefill(self, group: list[tuple[int, tuple[int, ...]]]) -> None:
        """Compute keys and values of these prefixes, padded on the right."""
        longest = max(len(prefix) for _, prefix in group)
        if self._fixed:
            count, chunk = _FIXED_ROWS, _FIXED_TOKENS
        else:
            count, chunk = len(group), min(longest, _PREFILL_TOKENS)
        padded = _round_up(longest, chunk)
        self._cache.ensure(padded)
        tokens = np.zeros((count, padded), dtype=np.int64)
        slots = np.full(count, self._cache.scratch, dtype=np.int64)
        for index, (row, prefix) in enumerate(group):
            tokens[index, : len(prefix)] = prefix
            slots[index] = row
        # What lies beyond a sequence is junk, at whatever position.
        positions = self._cache.indices[:padded].clamp(max=self._settings.max_model_len - 1).expand(count, padded)
        ids, places = self._put(tokens), self._put(slots)
        for start in range(0, padded, chunk):
            part = slice(start, start + chunk)
            self._forward.fill(
                ids[:, part], positions[:, part], Prefill(self._cache, places, start=start, tokens=chunk)
            )

    def _diverged(self, job: Job) -> StateError:
        return StateError(
            f"request {job.request.request_id!r} met a log-prob that is not finite under version {self.version}; "
            "the weights hold NaN or infinite values, or overflow: check the update that made them"
        )

    def _output(self, row: int) -> tuple[tuple[int, ...], tuple[float, ...], tuple[VersionSpan, ...]]:
        """Return what the job in `row` has generated."""
        job = self.active[row]
        start, end = len(job.request.prompt_ids), int(self._rows.known[row])
        ends = [*(mark[0] for mark in job.marks[1:]), end - start]
        spans = tuple(
            VersionSpan(version=version, kv_version=kv_version, start=first, end=last)
            for (first, version, kv_version), last in zip(job.marks, ends, strict=True)
            if last > first
        )
        tokens = self._rows.tokens[row, start:end].tolist()
        return tuple(tokens), tuple(self._rows.logprobs[row, start:end].tolist()), spans

    def _aborted(
        self, job: Job, output: tuple[tuple[int, ...], tuple[float, ...], tuple[VersionSpan, ...]], reason: str
    ) -> Result:
        tokens, logprobs, spans = output
        value = AbortedCompletion(
            request_id=job.request.request_id,
            token_ids=tokens,
            logprobs=logprobs,
            spans=spans,
            logprob_kind=SAMPLED,
            replica=self._replica_id,
            reason=reason,
        )
        return Result(job, value)

    def _vacate(self, row: int) -> None:
        """Free `row`, and let the last active row take its place."""
        job = self.active[row]
        if job.prefix is not None and self._prefixes.get(job.prefix) is job:
            del self._prefixes[job.prefix]
        if job.copied is not None:
            self._prompt_tokens += len(job.request.prompt_ids)
            self._copied_tokens += job.copied
        last = len(self.active) - 1
        if row != last:
            moved = self.active[row] = self.active[last]
            if moved.filled:
                self._cache.copy(last, [row], int(self._rows.position[last]))
            self._rows.move(last, row)
        self.active.pop()
        self._rows.position[last] = 0
