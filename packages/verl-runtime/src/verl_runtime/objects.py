"""One hosted object: found by class path, built, called by method name, closed.

Both runtimes host objects through this module, so that a class which works in one works in the other: plain methods
never run two at a time, `async def` methods never leave the event loop, and whatever waits has a deadline.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, cast

from verl_contracts.errors import PluginError
from verl_contracts.plugins.finding import find_class, nearest
from verl_contracts.waits import bounded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.runtime import ActorContext, ObjectSpec

__all__ = ["Exited", "HostedObject", "Stopped"]

_log = logging.getLogger(__name__)


class Exited(Exception):
    """The object asked its process to end, by `sys.exit` or the like; carries the reason in words."""


class Stopped(Exception):
    """The object was closed before the call reached it."""


class HostedObject:
    """An object and the single thread that its constructor and its plain methods run on.

    The constructor runs on that thread as well, because it may load a model for minutes: an object that needs the event
    loop starts its tasks in its first `async def` method. With ``threads=False`` everything runs on the loop.
    """

    def __init__(self, *, name: str, threads: bool) -> None:
        self._name = name
        self._target: object = None
        self._wants_deadline: dict[str, bool] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name) if threads else None

    async def build(self, spec: ObjectSpec, context: ActorContext) -> None:
        """Import the class and construct the object; raises what either raised."""

        def construct() -> object:
            return find_class(spec.path, key="target", role=self._name)(context=context, **spec.arguments)

        self._target = await self._run(construct)

    async def invoke(self, method: str, arguments: Mapping[str, object], *, deadline: Deadline) -> object:
        """Call ``method(**arguments)``, adding `deadline` when the method takes it. Raises what the method raises."""
        if self._target is None:
            raise Stopped(f"{self._name} was stopped before {method!r} reached it")
        function = self._find(method)
        if self._takes_deadline(method, function) and "deadline" not in arguments:
            arguments = {**arguments, "deadline": deadline}
        try:
            if inspect.iscoroutinefunction(function):
                return await cast("Awaitable[object]", function(**arguments))
            result = await self._run(lambda: function(**arguments))
            return await result if inspect.isawaitable(result) else result  # wait: limited by whoever invokes
        except SystemExit as exc:
            raise Exited(f"SystemExit: {exc.code}") from exc

    async def close(self, *, deadline: Deadline, clock: Clock) -> None:
        """Call the object's own `close`, if it has one, and let the thread go. Logs what `close` raised."""
        function = getattr(self._target, "close", None)
        try:
            if callable(function):
                await bounded(
                    self.invoke("close", {}, deadline=deadline),
                    subject=f"close of {self._name}",
                    holder=self._name,
                    deadline=deadline,
                    clock=clock,
                )
        except Exception:  # a failing close must not keep the actor alive
            _log.exception("closing %s failed; it is stopped all the same", self._name)
        finally:
            self._target = None
            if self._thread is not None:
                self._thread.shutdown(wait=False, cancel_futures=True)

    def _find(self, method: str) -> Callable[..., object]:
        function = None if method.startswith("_") else getattr(self._target, method, None)
        if not callable(function):
            kind = type(self._target)
            names = [name for name in dir(kind) if not name.startswith("_")]
            raise PluginError(
                f"{self._name} hosts {kind.__module__}:{kind.__qualname__}, which has no public method "
                f"{method!r}{nearest(method, names)}"
            )
        return cast("Callable[..., object]", function)

    def _takes_deadline(self, method: str, function: Callable[..., object]) -> bool:
        if method not in self._wants_deadline:
            try:
                self._wants_deadline[method] = "deadline" in inspect.signature(function).parameters
            except ValueError:  # a C function without a signature
                self._wants_deadline[method] = False
        return self._wants_deadline[method]

    async def _run(self, function: Callable[[], object]) -> object:
        if self._thread is None:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)
