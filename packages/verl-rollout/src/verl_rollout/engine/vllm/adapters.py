"""The LoRA adapters of one vLLM: which there are, who runs with them, and that they outlive a weight update.

vLLM drops them with the weights that they lie over, and would read their folders again at the next request, in the
middle of a step, where a file that is gone kills it and one that was written anew changes an answer unseen. So each is
copied when it is loaded, checked against the model, and loaded again from the copy before an update is committed.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from verl_contracts.errors import DataError, StateError, WeightSyncError
from verl_contracts.waits import bounded
from verl_rollout.engine.requests import check_adapter

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.rollout import RolloutSettings, SupportsLora
    from verl_contracts.tokens import GenerationRequest
    from verl_rollout.engine.vllm.flights import Condition
    from verl_rollout.engine.vllm.life import Life
    from verl_rollout.engine.vllm.options import VLLMOptions

__all__ = ["Adapters", "TakesAdapters"]

_CAUSE: Final = re.compile(r".*Worker failed with error '(.*)', please check.*")


@dataclass(slots=True, eq=False)
class _Adapter:
    folder: Path
    """Our copy."""
    digest: str
    lora: LoRARequest
    users: int = 0
    """Requests that run with it."""
    leaving: int = 0
    """Calls that wait to unload it."""
    unused: asyncio.Event = field(default_factory=asyncio.Event)


class Adapters:
    """Those of one engine, by name. No two share a cached prefix: vLLM makes an adapter's name part of its identity."""

    def __init__(
        self, llm: AsyncLLM, settings: RolloutSettings, options: VLLMOptions, *, replica_id: str, life: Life
    ) -> None:
        """Have none yet."""
        self._llm = llm
        self._model_path = settings.model_path
        self._most = options.max_loras
        self._max_rank = options.max_lora_rank
        self._replica_id = replica_id
        self._life = life
        self._loaded: dict[str, _Adapter] = {}
        self._changing = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._root: Path | None = None

    @property
    def known(self) -> Collection[str] | None:
        """Names that a request may ask for, in order of loading; None when this engine takes no adapters."""
        return [name for name, adapter in self._loaded.items() if not adapter.leaving] if self._most else None

    @contextmanager
    def using(self, request: GenerationRequest) -> Iterator[LoRARequest | None]:
        """Keep the adapter of a request loaded while it runs. Raises `DataError` when it is gone by now."""
        check_adapter(request, self.known)
        if request.adapter is None:
            yield None
            return
        adapter = self._loaded[request.adapter]
        adapter.users += 1
        adapter.unused.clear()
        try:
            yield adapter.lora
        finally:
            adapter.users -= 1
            if not adapter.users:
                adapter.unused.set()

    async def load(self, name: str, folder: str) -> None:
        """Load one, unless it is loaded; see `SupportsLora.load_adapter`. Callers bound it."""
        async with self._changing:
            if self._root is None:
                self._root = Path(tempfile.mkdtemp(prefix="verl-lora-"))
            number = next(self._numbers)
            copy = self._root / str(number)
            try:
                adapter = await self._read(name, folder, copy, number)
                if adapter is not None:
                    await self._drop_others()
                    await self._give(adapter)
                    self._loaded[name] = adapter
            except DataError as exc:
                raise DataError(
                    f"replica {self._replica_id} cannot load adapter {name!r} from {folder}: {exc}"
                ) from exc
            finally:
                if name not in self._loaded or self._loaded[name].folder != copy:
                    shutil.rmtree(copy, ignore_errors=True)

    async def unload(self, name: str) -> None:
        """Forget one when nothing runs with it; see `SupportsLora.unload_adapter`. Callers bound it."""
        adapter = self._loaded.get(name)
        if adapter is None:
            return
        adapter.leaving += 1
        try:
            await adapter.unused.wait()  # wait: the callers bound it
            async with self._changing:
                if self._loaded.get(name) is adapter:
                    await self._life.watch(self._llm.remove_lora(adapter.lora.lora_int_id))
                    del self._loaded[name]
        finally:
            adapter.leaving -= 1
        await asyncio.to_thread(shutil.rmtree, adapter.folder, ignore_errors=True)

    async def restore(self) -> None:
        """Load all of them again, over new weights. Raises `WeightSyncError` naming the one that does not load."""
        async with self._changing:
            for name, adapter in self._loaded.items():
                try:
                    await self._give(adapter)
                except DataError as exc:
                    raise WeightSyncError("commit", f"adapter {name!r} cannot be loaded again: {exc}") from exc

    async def shut_down(self) -> None:
        """Remove our copies."""
        if self._root is not None:
            await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)

    async def _give(self, adapter: _Adapter) -> None:
        """Let vLLM load one. Raises `DataError` with what it says of one that it refuses."""
        try:
            await self._life.watch(self._llm.add_lora(adapter.lora))
        except Exception as exc:
            if self._life.over:
                raise
            text = " ".join(str(exc).split())
            cause = _CAUSE.fullmatch(text)
            raise DataError(f"vLLM refuses it: {cause[1] if cause else text}") from exc

    async def _drop_others(self) -> None:
        """Let vLLM forget what it loaded after its caller had given up: our count of slots would be wrong."""
        ours = {adapter.lora.lora_int_id for adapter in self._loaded.values()}
        for other in set(await self._life.watch(self._llm.list_loras())) - ours:
            await self._life.watch(self._llm.remove_lora(other))

    async def _read(self, name: str, folder: str, copy: Path, number: int) -> _Adapter | None:
        """Copy and check an adapter; None when the very same is loaded."""
        from vllm.lora.request import LoRARequest

        from verl_rollout.engine.adapter_files import check_files, copy_files
        from verl_rollout.engine.torch.checkpoint import empty_model

        digest = await asyncio.to_thread(copy_files, folder, copy)
        before = self._loaded.get(name)
        if before is not None and before.digest == digest and not before.leaving:
            return None
        if before is not None:
            why = "is being unloaded" if before.leaving else "stands for other files; unload it or take another name"
            raise StateError(f"replica {self._replica_id} cannot load adapter {name!r}: the name {why}")
        if len(self._loaded) >= self._most:
            raise StateError(
                f"replica {self._replica_id} holds {', '.join(self._loaded)}, as many adapters as "
                f"engine_kwargs.max_loras={self._most} allows; unload one before {name!r}, or raise it"
            )
        await asyncio.to_thread(
            lambda: check_files(copy, empty_model(self._model_path), max_rank=self._max_rank),
        )
        adapter = _Adapter(folder=copy, digest=digest, lora=LoRARequest(f"{name}#{number}", number, str(copy)))
        adapter.unused.set()
        return adapter


class TakesAdapters:
    """The part of an engine that `SupportsLora`; `_adapters` and the rest are the engine's own."""

    _adapters: Adapters
    _now: Condition
    _life: Life
    _replica_id: str
    _clock: Clock

    async def load_adapter(self, name: str, /, *, folder: str, deadline: Deadline) -> None:
        """Load an adapter; see `SupportsLora.load_adapter`."""
        self._ready()
        if not name:
            raise DataError("an adapter needs a name")
        if self._now.asleep:
            raise StateError(f"replica {self._replica_id} is asleep; wake it before it loads adapter {name!r}")
        loading = self._adapters.load(name, folder)
        await bounded(
            loading, subject=f"adapter {name!r}", holder=self._replica_id, deadline=deadline, clock=self._clock
        )

    async def unload_adapter(self, name: str, /, *, deadline: Deadline) -> None:
        """Forget an adapter; see `SupportsLora.unload_adapter`."""
        self._ready()
        unloading = self._adapters.unload(name)
        subject = f"the end of requests with adapter {name!r}"
        await bounded(unloading, subject=subject, holder=self._replica_id, deadline=deadline, clock=self._clock)

    async def adapters(self, *, deadline: Deadline) -> Sequence[str]:
        """Return the names of those that are loaded."""
        self._ready()
        return tuple(self._adapters.known or ())

    def _ready(self) -> None:
        self._life.check()
        if self._adapters.known is None:
            raise StateError(f"replica {self._replica_id} takes no adapters: set engine_kwargs.max_loras to 1 or more")


if TYPE_CHECKING:

    def _supports_lora(x: TakesAdapters) -> SupportsLora:
        return x
