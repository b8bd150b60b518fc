"""Whether one vLLM lives, and what it died of."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from verl_contracts.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from vllm.v1.engine.async_llm import AsyncLLM

    from verl_rollout.engine.vllm.causes import Causes

__all__ = ["Life"]

T = TypeVar("T")
_log = logging.getLogger(__name__)

_KILLED = "; it was killed, by somebody or for want of memory, which the kernel's log would tell (dmesg)"


class Life:
    """From the start of an engine to its death or its end. Every call after that raises the same."""

    def __init__(self, llm: AsyncLLM, causes: Causes, *, replica_id: str, died: Callable[[Exception], None]) -> None:
        """`died` is called once, with what waiting requests shall fail with."""
        self._llm = llm
        self._causes = causes
        self._replica_id = replica_id
        self._died = died
        self._error: Exception | None = None
        self.closing = False

    @property
    def over(self) -> bool:
        """Whether it ended in either way."""
        return self.closing or self._error is not None or self._llm.errored

    def check(self) -> None:
        """Raise if it is over."""
        if self.over:
            raise self.end()

    def end(self) -> Exception:
        """Return what to raise now that it is over; the first caller notes the death."""
        if self.closing:
            return StateError(f"replica {self._replica_id} was closed")
        if self._error is None:
            cause = self._causes.last() or "it logged no error"
            if cause.endswith("logged no error") or "died unexpectedly" in cause:  # a worker, says its parent
                cause += _KILLED
            self._error = RuntimeError(f"vLLM's engine process of {self._replica_id} is dead: {cause}")
            _log.error("%s", self._error)
            self._died(self._error)
        return self._error

    async def watch(self, call: Awaitable[T]) -> T:
        """Await a call of vLLM; raise `end` when it tells that vLLM died."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await call  # wait: the callers bound it
        except EngineDeadError:
            raise self.end() from None  # which says the cause; vLLM's says that it is in the log
