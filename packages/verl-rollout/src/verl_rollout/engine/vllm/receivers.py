"""The receivers of one replica, one in each of vLLM's workers, seen from the replica.

Owns the order of vLLM's calls around a transfer, and the private folder of the sockets. vLLM's own calls carry no
results, and an error only as text; so plans, reports and causes go through `control`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import tempfile
from typing import TYPE_CHECKING, TypeVar

from verl_contracts.errors import StateError, VerlError, WeightSyncError
from verl_contracts.waits import bounded
from verl_rollout.addresses import answer
from verl_rollout.engine.receiving import not_loaded
from verl_rollout.engine.vllm.control import ControlClient, socket_path

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from vllm.v1.engine.async_llm import AsyncLLM

    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.rollout import RolloutSettings
    from verl_contracts.weights import EndpointInfo, Manifest, Plan, TransferReport, WeightReceiverHost

__all__ = ["VLLMReceiverHost"]

T = TypeVar("T")
_log = logging.getLogger(__name__)

_CONNECT_LIMIT_S = 30.0
_ABORT_LIMIT_S = 2.0
_ANSWER_LIMIT_S = 30.0
"""Longest that a worker may take to answer; it answers on a thread of its own, also while it loads."""


class VLLMReceiverHost:
    """A `WeightReceiverHost` over all workers of one `AsyncLLM`."""

    def __init__(
        self,
        llm: AsyncLLM,
        settings: RolloutSettings,
        *,
        replica_id: str,
        workers: int,
        clock: Clock,
        begin: Callable[[], None],
        restore: Callable[[], Awaitable[None]],
        committed: Callable[[int, bool], None],
    ) -> None:
        """Connect to nothing yet.

        `begin` declares the engine's weights invalid, `restore` puts back what vLLM drops with the old ones, and
        `committed` names the new ones.
        """
        self._llm = llm
        self._settings = settings
        self._replica_id = replica_id
        self._workers = workers
        self._clock = clock
        self._begin = begin
        self._restore = restore
        self._committed = committed
        self._folder: str | None = None
        self._clients: list[ControlClient] = []
        self._session: str | None = None
        self._open = False
        """Whether vLLM has an update that was started and not finished."""
        self._loaded = False
        self._transferring = False

    async def prepare(self, manifest: Manifest, /, *, session: str, deadline: Deadline) -> Sequence[EndpointInfo]:
        """Prepare each worker; check the manifest against the model's parameters."""
        from verl_contracts.weights import EndpointInfo

        await self._limited(self._connect(), "connecting to vLLM's workers", deadline)
        await self.close(deadline=deadline)
        await self._on_thread(lambda: self._check(manifest), "the check of the manifest", deadline)
        found = await self._ask("prepare", deadline, session=session)
        self._session = session
        return [answer(endpoint, EndpointInfo, method="prepare") for endpoint in found]

    async def transfer(self, plan: Plan, /, *, deadline: Deadline) -> Sequence[TransferReport]:
        """Load everything on every worker. From its start until `commit` the engine is invalid."""
        if self._session is None:
            raise StateError(f"{self._replica_id}: a transfer of {plan.session} was asked for, and nothing is prepared")
        if self._transferring:
            raise StateError(f"{self._replica_id}: a transfer is under way; {plan.session} would break into it")
        self._begin()
        self._loaded = False
        self._transferring = True
        try:
            return await self._transfer(plan, deadline)
        finally:
            self._transferring = False

    async def _transfer(self, plan: Plan, deadline: Deadline) -> Sequence[TransferReport]:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        from verl_contracts.weights import TransferReport

        if self._open:  # what an earlier sync left half done; the tensors come again
            await self._limited(self._llm.finish_weight_update(), "ending the update before", deadline)
        self._open = True
        begun = await asyncio.gather(
            self._ask("expect", deadline, plan=plan, limit_s=deadline.remaining(self._clock)),
            self._limited(self._llm.start_weight_update(), "the start of a weight update", deadline),
            return_exceptions=True,  # so that neither goes on when the other fails
        )
        for result in begun:
            if isinstance(result, BaseException):
                raise result
        try:
            request = WeightTransferUpdateRequest(update_info={"session": plan.session})
            await self._limited(self._llm.update_weights(request), "the load of the weights", deadline)
        except Exception as exc:
            self._open = False  # vLLM forgets an update that failed
            await self._ask_cause(exc, deadline)
            raise
        reports = await self._ask("report", deadline)
        self._loaded = True
        return [answer(report, TransferReport, method="report") for report in reports]

    async def commit(self, version: int, /, *, keep_cache: bool, deadline: Deadline) -> None:
        """Make the loaded weights vLLM's `version`; its spans are told with it."""
        if not self._loaded:
            raise not_loaded(self._replica_id, version, begun=self._open)
        await self._limited(self._llm.finish_weight_update(str(version)), "the end of a weight update", deadline)
        self._open = self._loaded = False
        if not keep_cache:
            again = self._llm.reset_prefix_cache(reset_running_requests=True)
            await self._limited(again, "dropping the cache", deadline)
        await self._limited(self._restore(), "loading the adapters again", deadline)
        self._committed(version, keep_cache)

    async def abort(self, reason: str, /, *, deadline: Deadline) -> None:
        """Make a transfer that is under way raise, on every worker."""
        if self._session is not None:
            await self._ask("abort", deadline, reason=reason)

    async def close(self, *, deadline: Deadline) -> None:
        """Remove what `prepare` created."""
        if self._session is not None:
            self._session = None
            await self._ask("close", deadline)

    async def shut_down(self) -> None:
        """Hang up, and remove the folder. Before vLLM is stopped."""
        clients, self._clients = self._clients, []
        if self._transferring:
            reason = {"reason": "the replica was closed"}
            aborting = (asyncio.to_thread(one.call, "abort", reason, limit_s=_ABORT_LIMIT_S) for one in clients)
            await asyncio.gather(*aborting, return_exceptions=True)
        await asyncio.gather(*(asyncio.to_thread(client.close) for client in clients))
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _connect(self) -> None:
        """Let each worker listen, once."""
        if self._clients:
            return
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        folder, key = tempfile.mkdtemp(prefix="verl-"), secrets.token_bytes(32)
        self._folder = folder
        init = {
            "folder": folder,
            "key": key.hex(),
            "backend": self._settings.weight_backend,
            "owner": self._replica_id,
        }
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init))

        def connect() -> list[ControlClient]:
            return [
                ControlClient(socket_path(folder, rank), key, rank=rank, limit_s=_CONNECT_LIMIT_S)
                for rank in range(self._workers)
            ]

        self._clients = await asyncio.to_thread(connect)

    def _check(self, manifest: Manifest) -> None:
        """Refuse tensors that the model does not have, or not in this shape, before anything is touched."""
        from verl_rollout.engine.torch.checkpoint import check_manifest, empty_model

        check_manifest(manifest, empty_model(self._settings.model_path))

    async def _ask(self, method: str, deadline: Deadline, **arguments: object) -> list[object]:
        """Call `method` on all workers at once."""
        limit_s = max(0.1, min(_ANSWER_LIMIT_S, deadline.remaining(self._clock)))
        return await asyncio.gather(
            *(asyncio.to_thread(client.call, method, arguments, limit_s=limit_s) for client in self._clients)
        )

    async def _ask_cause(self, exc: Exception, deadline: Deadline) -> None:
        """Raise what the workers say went wrong; vLLM passes on only text."""
        if isinstance(exc, VerlError):
            return
        for client in self._clients:
            try:
                await asyncio.to_thread(client.call, "report", {}, limit_s=_ANSWER_LIMIT_S)
            except (WeightSyncError, StateError) as cause:
                raise cause from exc
            except Exception as cause:
                raise WeightSyncError("transfer", f"{type(cause).__name__}: {cause}") from cause

    async def _on_thread(self, act: Callable[[], T], subject: str, deadline: Deadline) -> T:
        return await self._limited(asyncio.to_thread(act), subject, deadline)

    async def _limited(self, call: Awaitable[T], subject: str, deadline: Deadline) -> T:
        return await bounded(call, subject=subject, holder=self._replica_id, deadline=deadline, clock=self._clock)


if TYPE_CHECKING:

    def _is_host(x: VLLMReceiverHost) -> WeightReceiverHost:
        return x
