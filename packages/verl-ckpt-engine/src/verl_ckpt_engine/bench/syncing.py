"""Whole transfers from this process to some receivers, timed and checked."""

from __future__ import annotations

import os
import time
import uuid
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from verl_ckpt_engine.bench.payload import make_weights
from verl_ckpt_engine.bench.receiving import LIMIT_S, PeakMemory, digests, receiver_process
from verl_contracts.clock import Deadline, SystemClock
from verl_contracts.plugins import families, load_plugin

if TYPE_CHECKING:
    from collections.abc import Iterator

    from verl_ckpt_engine.bench.receiving import Answered, Receiver
    from verl_contracts.weights import TopologyPlanner, Verification, WeightSender

__all__ = ["Case", "Syncs", "Timing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured."""

    backend: str
    """Name or class path of a `WeightBackend`."""
    receivers: int = 1
    num_bytes: int = 269_000_000
    bucket_bytes: int = 32 * 1024 * 1024
    verification: Verification = "full"
    hashes: bool = True
    """Whether digests are made at all. Without, nothing is verified: only to learn what they cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One transfer."""

    seconds: float
    """From preparing to the last receiver's last word."""
    num_bytes: int
    """To each receiver."""
    sender_extra: int
    """Most memory of the sender beyond the weights, in bytes; what is kept from the transfer before is not counted."""
    receiver_extra: int
    """The same of the receiver that took most."""

    @property
    def speed(self) -> float:
        """Bytes per second to each receiver."""
        return self.num_bytes / self.seconds


class Syncs:
    """A sender and its receivers. `open`, then `run` again and again."""

    def __init__(self, case: Case, receivers: list[Receiver]) -> None:
        backend = load_plugin(families.WEIGHT_BACKEND, case.backend, key="--backend")
        self._case = case
        self._receivers = receivers
        self._planner: TopologyPlanner = backend.planner_class()
        self._sender: WeightSender = backend.sender_class(owner="trainer", rank=0, clock=SystemClock())  # type: ignore[call-arg]
        self._memory = PeakMemory()
        self.source = make_weights(case.num_bytes, seed=1)

    @classmethod
    @contextmanager
    def open(cls, case: Case) -> Iterator[Syncs]:
        """Start the receivers; end them afterwards."""
        with ExitStack() as stack:
            names = [f"replica-{number}" for number in range(case.receivers)]
            receivers = [
                stack.enter_context(receiver_process(case.backend, name, case.num_bytes, hashes=case.hashes))
                for name in names
            ]
            syncs = cls(case, receivers)
            stack.callback(syncs.close)
            yield syncs

    def run(self) -> Timing:
        """Do one. Raises `RuntimeError` when what arrived is not what was sent."""
        case, sender = self._case, self._sender
        manifest = self.source.manifest(1)
        session = f"bench-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._memory.reset()
        begun = time.perf_counter()
        endpoints = [receiver.prepare(session) for receiver in self._receivers]
        mine = sender.prepare(manifest, session=session)
        plan = self._planner.plan(
            manifest, session=session, senders=[mine], receivers=endpoints, bucket_bytes=case.bucket_bytes
        )
        plan = replace(plan, verification=case.verification)
        for receiver in self._receivers:
            receiver.begin(plan)
        with digests(case.hashes):
            report = sender.send(plan, self.source, deadline=Deadline.after(SystemClock(), LIMIT_S))
        answers = [cast("Answered", receiver.answer()) for receiver in self._receivers]
        seconds = time.perf_counter() - begun
        extra = self._memory.extra()
        sender.close()
        if any(found != dict(report.digests) for found, _ in answers):
            raise RuntimeError("digests of sender and receiver differ")
        return Timing(
            seconds=seconds,
            num_bytes=manifest.num_bytes,
            sender_extra=extra,
            receiver_extra=max(most for _, most in answers),
        )

    def close(self) -> None:
        """Let the sender go."""
        self._sender.close()
