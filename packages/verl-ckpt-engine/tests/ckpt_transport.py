"""Weights, targets and one-call transfers for the tests of this package."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from verl_ckpt_engine.shm import ShmBackend, ShmReceiver, ShmSender
from verl_ckpt_engine.shm.memory import FILE_PREFIX
from verl_contracts.clock import Deadline, SystemClock
from verl_contracts.errors import WeightSyncError
from verl_contracts.weights import LoadReport, Manifest, TensorMeta

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from verl_contracts.weights import Plan, TransferReport, WeightReceiver, WeightTarget

CLOCK = SystemClock()
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float64)


def meta_of(name: str, tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def manifest_of(weights: dict[str, torch.Tensor], version: int) -> Manifest:
    return Manifest(
        version=version,
        tensors=tuple(meta_of(name, tensor) for name, tensor in weights.items()),
        num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in weights.values()),
    )


class DictSource:
    """Weights from a dict; `stop_after` cuts the stream, `wrong` gives another tensor under a name."""

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        *,
        stop_after: int | None = None,
        wrong: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.weights = weights
        self._stop_after = stop_after
        self._wrong = wrong or {}
        self.taken = 0

    def manifest(self, version: int, /) -> Manifest:
        return manifest_of(self.weights, version)

    def tensors(self) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        for index, (name, tensor) in enumerate(self.weights.items()):
            if index == self._stop_after:
                return
            self.taken += 1
            given = self._wrong.get(name, tensor)
            yield meta_of(name, given), given


class DictTarget:
    """Copies what arrives; `fail_at` raises at the n-th tensor (from 1), `hold` waits for an event there."""

    def __init__(
        self, *, fail_at: int | None = None, hold: tuple[int, threading.Event] | None = None, skip: Sequence[str] = ()
    ) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self._fail_at = fail_at
        self._hold = hold
        self._skip = tuple(skip)
        self.holding = threading.Event()

    def load(self, items: Iterable[tuple[TensorMeta, torch.Tensor]], /) -> LoadReport:
        for index, (meta, tensor) in enumerate(items, start=1):
            if index == self._fail_at:
                raise RuntimeError(f"engine refuses {meta.name}")
            if self._hold is not None and index == self._hold[0]:
                self.holding.set()
                self._hold[1].wait(30)
            if meta.name not in self._skip:
                self.weights[meta.name] = tensor.clone()
        return LoadReport(loaded=tuple(self.weights), skipped=self._skip)


def check_equal(got: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(sent)
    for name, tensor in sent.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert torch.equal(got[name], tensor), name


def new_session() -> str:
    return f"test-{os.getpid()}-{uuid.uuid4().hex[:12]}"


def held() -> int:
    """Return how many pieces of shared memory this process has, its own and others' that it maps."""
    gc.collect()
    inodes = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:verl-weights" in line:
            inodes.add(line.split()[4])
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            if "memfd:verl-weights" in str(link.readlink()):
                inodes.add(str(link.stat().st_ino))
    return len(inodes)


def named() -> list[Path]:
    """Return what lies around under a name: nothing, where memory needs none."""
    folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return [path for folder in folders for path in folder.glob(f"{FILE_PREFIX}*")]


class Transfer:
    """One sender and its receivers in threads of this process, prepared and planned."""

    def __init__(
        self,
        source: DictSource,
        *,
        receivers: int = 1,
        bucket_bytes: int = 1 << 20,
        limit_s: float = 20.0,
        endpoints: Transfer | None = None,
        keep_ring: bool = True,
    ) -> None:
        session = new_session()
        self.source = source
        if endpoints is None:
            self.sender = ShmSender(owner="trainer", rank=0, clock=CLOCK, keep_ring=keep_ring)
            self.receivers = [
                ShmReceiver(owner=f"r{index}", clock=CLOCK, keep_ring=keep_ring) for index in range(receivers)
            ]
        else:
            self.sender, self.receivers = endpoints.sender, endpoints.receivers
        manifest = source.manifest(1)
        self.plan: Plan = ShmBackend.planner_class().plan(
            manifest,
            session=session,
            senders=[self.sender.prepare(manifest, session=session)],
            receivers=[receiver.prepare(session=session, rank=0) for receiver in self.receivers],
            bucket_bytes=bucket_bytes,
        )
        self.limit_s = limit_s
        self._pool = ThreadPoolExecutor(receivers + 1)

    def send(self) -> Future[TransferReport]:
        deadline = Deadline.after(CLOCK, self.limit_s)
        return self._pool.submit(self.sender.send, self.plan, self.source, deadline=deadline)

    def receive(self, target: WeightTarget, index: int = 0) -> Future[TransferReport]:
        receiver: WeightReceiver = self.receivers[index]
        deadline = Deadline.after(CLOCK, self.limit_s)
        return self._pool.submit(receiver.receive, self.plan, target, deadline=deadline)

    def close_endpoints(self) -> None:
        self.sender.close()
        for receiver in self.receivers:
            receiver.close()

    def close(self) -> None:
        self.close_endpoints()
        self._pool.shutdown()

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def error_of(future: Future[TransferReport], within_s: float = 20.0) -> WeightSyncError:
    error = future.exception(within_s)
    assert isinstance(error, WeightSyncError), error
    return error


def sample_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return tensors of every awkward kind: mixed dtypes, empty, scalar, strided, a byte over, oversized."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(64, 48, generator=generator)
    weights = {
        "embed": torch.randn(300, 257, generator=generator),
        "empty": torch.empty(0, 7),
        "scalar": torch.tensor(3.5),
        "transposed": base.t(),
        "every_second": base[::2, 1::3],
        "expanded": torch.arange(5.0).expand(3, 5),
        "byte_over": torch.randint(0, 255, (1025,), dtype=torch.uint8, generator=generator),
        "oversized_strided": torch.randn(257, 129, generator=generator).t(),
    }
    for dtype in DTYPES:
        weights[f"of.{dtype}"] = torch.randint(0, 2, (33, 3), generator=generator).to(dtype)
    weights["last.empty"] = torch.empty(0, dtype=torch.bfloat16)
    return weights
