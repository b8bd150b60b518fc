"""Generation at scale: replicas, how requests are spread over them, and who owns them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, NewType, Protocol, Self, TypeAlias

from verl_contracts.pickling import cheap_pickle

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verl_contracts.clock import Deadline
    from verl_contracts.events import EventSink
    from verl_contracts.runtime import DeviceGrant, ObjectSpec, Runtime
    from verl_contracts.tokens import AbortedCompletion, Completion, GenerationRequest
    from verl_contracts.weights import WeightReceiverHost

__all__ = [
    "ABORTED",
    "ASLEEP",
    "DEAD",
    "FAILURE",
    "INVALID",
    "KEEP",
    "LORA",
    "OPENAI",
    "PAUSED",
    "SERVING",
    "SLEEP",
    "SUCCESS",
    "BalancerRow",
    "Capability",
    "ChecksSettings",
    "LLMClient",
    "LLMServerManager",
    "Lease",
    "LeaseOutcome",
    "LoadBalancer",
    "OpenAIEndpoint",
    "PauseMode",
    "Replica",
    "ReplicaState",
    "ReplicaStatus",
    "RolloutSettings",
    "SupportsLora",
    "SupportsOpenAI",
    "SupportsSleep",
]

ReplicaState = NewType("ReplicaState", str)
SERVING = ReplicaState("serving")
PAUSED = ReplicaState("paused")
ASLEEP = ReplicaState("asleep")
INVALID = ReplicaState("invalid")
"""Holds no verified weights: before the first sync, or after one that failed. Serves nothing until a full sync."""
DEAD = ReplicaState("dead")

Capability = NewType("Capability", str)
"""What some replicas can do beyond the rest. A build that cannot do it does not claim it."""
SLEEP = Capability("sleep")
"""It `SupportsSleep`."""
KEEP = Capability("keep")
"""It can be paused with `keep`, and tells which tokens came after the update."""
OPENAI = Capability("openai")
"""It `SupportsOpenAI`."""
LORA = Capability("lora")
"""It `SupportsLora`. One that does not claim it refuses a request with an adapter by `DataError`."""

LeaseOutcome = NewType("LeaseOutcome", str)
SUCCESS = LeaseOutcome("success")
ABORTED = LeaseOutcome("aborted")
"""The replica stopped early on request; it is healthy."""
FAILURE = LeaseOutcome("failure")
"""The replica failed; it is quarantined."""

PauseMode: TypeAlias = Literal["wait", "abort", "keep"]
"""`wait`: finish what runs. `abort`: return what was generated so far. `keep`: freeze, continue after the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """A replica at one moment."""

    replica: str
    state: ReplicaState
    version: int | None
    """Version of the committed weights; None while it holds none."""
    running: int
    """Sequences being decoded."""
    waiting: int
    """Requests accepted and not started."""
    generated_tokens: int
    """Tokens generated since the start."""
    busy_s: float = 0.0
    """Seconds since the start in which the engine computed; the rest it was idle, paused or asleep."""
    prompt_tokens: int = 0
    """Prompt tokens of the requests that ended since the start, finished or cut; those that never began do not count.
    0 also where nobody counts them."""
    cached_prompt_tokens: int = 0
    """Those of them whose keys and values were taken from the prefix cache, and not computed."""


class Replica(Protocol):
    """One inference engine, wherever it lives. This is all that a balancer, a client and a weight sync need of it.

    Concurrency: every method may be called while others run. `generate` before weights were committed raises
    `StateError`. A method of a dead replica raises `ActorFailed`, within the deadline at the latest.
    """

    @property
    def replica_id(self) -> str:
        """Unique in the run, and stable over restarts."""
        ...

    @property
    def capacity(self) -> int:
        """Sequences that it decodes at once; more requests than that wait inside."""
        ...

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What it can do beyond the methods here. Constant."""
        ...

    @property
    def receiver_host(self) -> WeightReceiverHost:
        """The face of its weight receivers, one per rank of the engine."""
        ...

    async def generate(self, request: GenerationRequest, /, *, deadline: Deadline) -> Completion | AbortedCompletion:
        """Generate one sequence. Never returns an empty `Completion`."""
        ...

    async def abort(self, request_ids: Sequence[str] | None, /, *, deadline: Deadline) -> None:
        """Cut these requests, or all when None. Unknown ids are ignored. The requests return `AbortedCompletion`."""
        ...

    async def pause(self, mode: PauseMode, /, *, deadline: Deadline) -> None:
        """Return once nothing is decoded any more. Requests that arrive later wait. Idempotent.

        `keep` is for those that claim `KEEP`.
        """
        ...

    async def resume(self, *, deadline: Deadline) -> None:
        """Decode again. Idempotent. Raises `StateError` when the replica is asleep; an invalid one stays silent."""
        ...

    async def status(self, *, deadline: Deadline) -> ReplicaStatus:
        """Return the present status. Answers while the engine is busy."""
        ...


class SupportsSleep(Protocol):
    """A replica that can give its device memory back, and claims `SLEEP`. Only a paused replica may sleep."""

    async def sleep(self, *, deadline: Deadline) -> None:
        """Free weights and KV cache; the replica keeps no version afterwards. Idempotent."""
        ...

    async def wake(self, *, deadline: Deadline) -> None:
        """Allocate again. It is invalid until a full sync, and paused until `resume`. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIEndpoint:
    """Where one replica answers the OpenAI protocol."""

    base_url: str
    """For example ``"http://127.0.0.1:40123/v1"``."""
    api_key: str = field(repr=False)
    """Bearer token."""
    model: str
    """Name to ask for."""


class SupportsOpenAI(Protocol):
    """A replica that also answers the OpenAI protocol, and claims `OPENAI`.

    Its answers carry the weight version, and while it is paused they wait like all others.
    """

    async def openai_endpoint(self, *, deadline: Deadline) -> OpenAIEndpoint:
        """Return where; the first call starts the server."""
        ...


class SupportsLora(Protocol):
    """A replica that can answer with a LoRA adapter over its weights, and claims `LORA`.

    A request names its adapter; one that is not loaded is refused by `DataError`. An adapter is what its folder held
    when it was loaded, whatever becomes of the folder. It outlives weight syncs and sleep: afterwards it lies over the
    new weights. A replica that is started anew holds none.

    Spans tell the version of the weights below an adapter, and nothing of the adapter: give another one another name.
    """

    async def load_adapter(self, name: str, /, *, folder: str, deadline: Deadline) -> None:
        """Load an adapter in PEFT's format, `adapter_config.json` and `adapter_model.safetensors`, from a folder.

        The replica reads the folder, not the caller. Idempotent for the same files. Raises `DataError` when they are
        not there, when their rank is above the replica's limit, or when they are made for another model; `StateError`
        when the name stands for other files, when there is no room for one more, or when the replica is asleep.
        """
        ...

    async def unload_adapter(self, name: str, /, *, deadline: Deadline) -> None:
        """Let requests that run with it end, and forget it; from the call on, others are refused.

        Harmless when it is unknown. At the deadline `WaitTimeout` is raised, and it stays loaded.
        """
        ...

    async def adapters(self, *, deadline: Deadline) -> Sequence[str]:
        """Return the names of those that are loaded, in order of loading."""
        ...


@cheap_pickle
@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to run one sequence on one replica."""

    lease_id: int
    replica: str
    epoch: int
    """Counts additions of this replica; a lease of an earlier epoch changes no count when it is released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancerRow:
    """One replica as the balancer sees it."""

    replica: str
    epoch: int
    capacity: int
    in_flight: int
    state: Literal["active", "draining", "quarantined"]


class LoadBalancer(Protocol):
    """Spreads sequences over replicas. State lives in one place; others reach it through a proxy with this same face.

    Leases are taken many at a time. The order of grants is the order of calls.
    """

    async def acquire(self, n: int, /, *, keys: Sequence[str | None], deadline: Deadline) -> tuple[Lease, ...]:
        """Grant n leases, one per key: on the replica that last served the key, else on the least loaded.

        A key of None is not sticky. Waits for capacity. Raises `NoHealthyReplica` when no replica is left that could
        ever serve, `WaitTimeout` at the deadline; then no lease is held.
        """
        ...

    async def release(self, leases: Sequence[Lease], outcome: LeaseOutcome, /) -> None:
        """Give leases back. `FAILURE` quarantines their replica. A stale or repeated release is a no-op."""
        ...

    async def add(self, replica: str, /, *, capacity: int) -> None:
        """Add a replica, or bring a quarantined, draining or removed one back with a new epoch."""
        ...

    async def drain(self, replica: str, /, *, deadline: Deadline) -> None:
        """Grant no further leases on it, and return when none is in flight."""
        ...

    async def remove(self, replica: str, /) -> None:
        """Forget it. Leases in flight become stale. Harmless when it is unknown."""
        ...

    async def snapshot(self) -> tuple[BalancerRow, ...]:
        """Return all rows, in order of addition."""
        ...


class LLMClient(Protocol):
    """What an agent loop asks for tokens. One method: routing, retries and resumption are behind it."""

    async def generate(self, request: GenerationRequest, /, *, deadline: Deadline) -> Completion | AbortedCompletion:
        """Generate one sequence on some replica. A failed replica is never seen here while another one is left.

        A resumable client returns `AbortedCompletion` only at its cap of attempts. Raises `NoHealthyReplica`,
        `WaitTimeout`.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """What every rollout implementation is told. Its own options are its `Config`."""

    model_path: str
    """Hugging Face folder; the engine takes shapes from it and, unless `load_weights`, no values."""
    engine: str = "torch"
    """Inference engine: `torch` is the embedded one."""
    engine_options: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments for the engine's `Config`."""
    num_replicas: int = 1
    """Replicas to create when no grant is given; with a grant, one per `devices_per_replica` bundles."""
    devices_per_replica: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What an engine that runs on either computes on; `auto` is a GPU where its process sees one."""
    max_model_len: int = 2048
    """Most tokens of prompt and response together."""
    max_num_seqs: int = 64
    """Sequences decoded at once per replica."""
    seed: int = 0
    deterministic: bool = False
    weight_backend: str = "shm"
    """Name or class path of the `WeightBackend` whose receiver the engine hosts."""
    resumable: bool = True
    """Whether the client continues aborted sequences."""
    request_limit_s: float = 600.0
    """Longest that one request may take on one replica."""
    role: str = "rollout"
    """Part of every actor's name."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments for the implementation's `Config`."""


class ChecksSettings(Protocol):
    """An `LLMServerManager` that can tell before anything is started that it cannot serve, an unknown engine perhaps.

    Optional; found by `inspect` on the class. What is not refused here is refused by `create`.
    """

    @classmethod
    def check(cls, settings: RolloutSettings, /) -> None:
        """Return if `create` may be tried; raise `ConfigError` naming the key otherwise. Quick, and starts nothing."""
        ...


class LLMServerManager(Protocol):
    """Owns a set of replicas. The one plug-in point for rollout.

    `create` → use → `close`. A new replica is invalid until the first weight sync. A manager made with a grant spawns
    on these devices and never releases them; without one it places a pool of its own and releases it at `close`.
    """

    Config: ClassVar[type]
    """Frozen dataclass of the implementation's own options, built from `RolloutSettings.options`."""

    @classmethod
    async def create(
        cls,
        settings: RolloutSettings,
        /,
        *,
        runtime: Runtime,
        grant: DeviceGrant | None,
        start_rank: int | None,
        events: EventSink,
        deadline: Deadline,
    ) -> Self:
        """Start the replicas. `start_rank` numbers them from there; None means from 0."""
        ...

    def replicas(self) -> Sequence[Replica]:
        """Return the replicas in order of rank, those that are invalid or dead included."""
        ...

    def client(self) -> LLMClient:
        """Return a client for this process."""
        ...

    def client_spec(self) -> ObjectSpec:
        """Return how to build an `LLMClient` in another process."""
        ...

    def addresses(self) -> Sequence[str]:
        """Return network addresses, one per replica that has one."""
        ...

    async def add(self, count: int, /, *, deadline: Deadline) -> Sequence[Replica]:
        """Start further replicas. They join the balancer by `admit`, after their first sync."""
        ...

    async def admit(self, replica_ids: Sequence[str], /) -> None:
        """Let these replicas serve: they hold committed weights. Idempotent."""
        ...

    async def exclude(self, replica_ids: Sequence[str], /) -> None:
        """Let these replicas serve no more, without stopping them. Idempotent."""
        ...

    async def remove(self, replica_ids: Sequence[str], /, *, deadline: Deadline) -> None:
        """Drain and stop these replicas."""
        ...

    async def close(self, *, deadline: Deadline) -> None:
        """Stop everything that `create` and `add` started. Idempotent."""
        ...
