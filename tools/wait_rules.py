"""Which calls wait until somebody else acts, and what counts as their limit. `lint_waits` says why this is asked.

The rules go by names, since no types are known here. They would rather miss a wait than refuse what is none: a method
is refused only in a form that no common method but the waiting one has.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

FIX = "give it a timeout, or await it within bounded(...) or asyncio.timeout(...)"

# Calls that wait for ever when they are given no argument at all; with one they have a limit or are another method.
NO_ARGUMENT_METHODS = frozenset({"wait", "join", "get", "acquire", "recv", "recv_bytes", "accept", "communicate"})
# As above on a thread's future; asyncio's raise instead of blocking: see `WaitVisitor._may_block`.
FUTURE_METHODS = frozenset({"result", "exception"})
# Asyncio methods that wait whatever their arguments are.
AWAITED_METHODS = frozenset(
    {"wait_for", "wait_closed", "drain", "read", "readline", "readexactly", "readuntil", "communicate"}
)
# Functions that need `timeout=`, or that many positional arguments, the last of which is the timeout.
FUNCTIONS = {
    "asyncio.wait": None,
    "asyncio.as_completed": None,
    "asyncio.open_connection": None,
    "concurrent.futures.wait": 2,
    "concurrent.futures.as_completed": 2,
    "multiprocessing.connection.wait": 2,
    "ray.get": None,
    "ray.wait": None,
    "select.select": 4,
    "socket.create_connection": 2,
    "subprocess.call": None,
    "subprocess.check_call": None,
    "subprocess.check_output": None,
    "subprocess.run": None,
    "urllib.request.urlopen": 3,
}
LIMITING_CALLS = frozenset({"bounded", "wait_for"})
LIMITING_BLOCKS = frozenset({"timeout", "timeout_at"})
SPAWNING_CALLS = frozenset({"create_task", "ensure_future"})
SOCKET_WAITS = frozenset({"accept", "connect", "recv", "recv_into", "recvfrom", "send", "sendall", "sendto"})
LOCK = re.compile(r"(?:lock|mutex|semaphore|condition|cond|sem)$", re.IGNORECASE)
QUEUE = re.compile(r"(?:queue|(?:^|_)q)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Finding:
    """One wait without a limit, or one waiver that is no good."""

    line: int
    end_line: int
    text: str


@dataclass(slots=True)
class _Scope:
    """What is known about the function that is being read."""

    limited: bool = False
    is_async: bool = False
    tasks: set[str] = field(default_factory=set)
    """Names of parameters annotated as asyncio tasks or futures."""
    limits: set[str] = field(default_factory=set)
    """Names that hold the result of `asyncio.timeout(...)`."""
    coroutines: set[str] = field(default_factory=set)
    """Names that hold coroutines made in this function."""
    polled: set[str] = field(default_factory=set)
    """Connections that the function asks by `poll` whether something has come."""


def _dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` for such an expression, and an empty string for any other."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def _last(node: ast.expr) -> str:
    """Return the last identifier of an expression: ``c`` for ``a.b.c``, ``a().c`` and ``c``."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _has_timeout(call: ast.Call) -> bool:
    """Whether a limit is given by keyword; it may be in ``**options``, which is believed."""
    values = [keyword.value for keyword in call.keywords if keyword.arg in (None, "timeout", "deadline")]
    return any(not _is_none(value) for value in values)


def _is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


class WaitVisitor(ast.NodeVisitor):
    """Walks one module; `findings` is the result."""

    def __init__(self, tree: ast.Module) -> None:
        self.findings: list[Finding] = []
        self._scope = _Scope()
        self._awaited: set[int] = set()
        self._exempt: set[int] = set()
        self._aliases = dict(_imports(tree))
        self._context_vars = set(_context_variables(tree))
        self._thread_futures = _uses_thread_futures(tree)

    def _refuse(self, node: ast.expr, text: str) -> None:
        end = node.end_lineno or node.lineno
        self.findings.append(Finding(line=node.lineno, end_line=end, text=f"{text} waits without a limit; {FIX}"))

    def _full_name(self, node: ast.expr) -> str:
        """Return the dotted name of a function, with what it was imported as undone."""
        first, dot, rest = _dotted(node).partition(".")
        return self._aliases.get(first, first) + dot + rest

    def _may_block(self, receiver: ast.expr) -> bool:
        """Whether `.result()` of it may block: not where only asyncio's futures can be meant."""
        name = _last(receiver)
        return self._thread_futures and not (self._scope.is_async or "task" in name or name in self._scope.tasks)

    # Scopes and limits

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        """Read a function, whose body runs later: no limit around its definition holds in it."""
        outer = self._scope
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        tasks = {each.arg for each in arguments if each.annotation and "asyncio." in ast.unparse(each.annotation)}
        polled = {receiver for receiver, method in _methods_called(node) if method == "poll"}
        self._scope = _Scope(is_async=isinstance(node, ast.AsyncFunctionDef), tasks=tasks, polled=polled)
        if not isinstance(node, ast.Lambda):
            self._sockets(node)
        self.generic_visit(node)
        self._scope = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Read a function."""
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """Read a coroutine."""
        self._function(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Read a lambda."""
        self._function(node)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        """Read a block that may be a limit, or may wait for a lock."""
        before = self._scope.limited
        for item in node.items:
            self.visit(item)
            if self._limits(item.context_expr):
                self._scope.limited = True
            elif not self._scope.limited and LOCK.search(_last(item.context_expr)):
                self._refuse(item.context_expr, f"async with {ast.unparse(item.context_expr)}")
        for statement in node.body:
            self.visit(statement)
        self._scope.limited = before

    def _limits(self, node: ast.expr) -> bool:
        """Whether entering `node` starts a limit: a call of `timeout`, or a name that one was given to."""
        if isinstance(node, ast.Call):
            return _last(node.func) in LIMITING_BLOCKS and bool(node.args) and not _is_none(node.args[0])
        return isinstance(node, ast.Name) and node.id in self._scope.limits

    def visit_Assign(self, node: ast.Assign) -> None:
        """Note what a name holds."""
        names = {_last(target) for target in node.targets}
        if self._limits(node.value):
            self._scope.limits |= names
        elif _makes_coroutines(node.value):
            self._scope.coroutines |= names
        self.generic_visit(node)

    # Waits

    def visit_Await(self, node: ast.Await) -> None:
        """Refuse to await a future or task that comes from anywhere."""
        value = node.value
        if isinstance(value, ast.Call):
            self._awaited.add(id(value))
        elif not self._scope.limited and isinstance(value, ast.Name | ast.Attribute | ast.Subscript):
            self._refuse(node, f"await {ast.unparse(value)}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Check one call, or let it pass where something around it is the limit."""
        name = _last(node.func)
        if name in LIMITING_CALLS and len(node.args) + len(node.keywords) > 1 and not self._gives_none(node):
            self._without_rule(node)
            return
        if name in SPAWNING_CALLS:
            # The wait is where the task is awaited.
            self._exempt.update(id(argument) for argument in node.args)
        if not self._scope.limited and id(node) not in self._exempt:
            self._check(node)
        self.generic_visit(node)

    def _gives_none(self, call: ast.Call) -> bool:
        """Whether `asyncio.wait_for(x, None)`, which is no limit, or `condition.wait_for(x, None)`."""
        timeout = _keyword(call, "timeout") or (call.args[1] if len(call.args) > 1 else None)
        return timeout is not None and _is_none(timeout)

    def _without_rule(self, node: ast.Call) -> None:
        before, self._scope.limited = self._scope.limited, True
        self.generic_visit(node)
        self._scope.limited = before

    def _check(self, node: ast.Call) -> None:
        shown = f"{ast.unparse(node.func)}()"
        full_name = self._full_name(node.func)
        if full_name in FUNCTIONS:
            position = FUNCTIONS[full_name]
            given = position is not None and len(node.args) >= position and not _is_none(node.args[position - 1])
            if not given and not _has_timeout(node):
                self._refuse(node, shown)
        elif full_name in ("asyncio.gather", "asyncio.shield"):
            # Coroutines made in place are read where they are defined; futures and tasks come from anywhere.
            arguments = [argument.value if isinstance(argument, ast.Starred) else argument for argument in node.args]
            held = [each for each in arguments if isinstance(each, ast.Name | ast.Attribute | ast.Subscript)]
            if any(_last(each) not in self._scope.coroutines for each in held):
                self._refuse(node, shown)
        elif full_name == "os.wait" or (full_name == "os.waitpid" and _is_zero(node.args[-1:])):
            self._refuse(node, shown)
        elif isinstance(node.func, ast.Attribute) and not _has_timeout(node):
            self._check_method(node, node.func, shown)

    def _check_method(self, node: ast.Call, function: ast.Attribute, shown: str) -> None:
        name, receiver = function.attr, function.value
        awaited = id(node) in self._awaited
        limits = [
            argument for argument in node.args if not isinstance(argument, ast.Constant) or argument.value is not True
        ]
        given = any(not _is_none(argument) for argument in limits)
        if _is_false(_keyword(node, "block")) or _is_false(_keyword(node, "blocking")):
            return
        if name.startswith("recv") and ast.unparse(receiver) in self._scope.polled:
            return
        if awaited and (name in AWAITED_METHODS or (name == "put" and QUEUE.search(_last(receiver)))):
            self._refuse(node, shown)
        elif name == "wait_for":
            if len(node.args) < 2 or _is_none(node.args[1]):
                self._refuse(node, shown)
        elif name in NO_ARGUMENT_METHODS and not given and not _only_other_keywords(node):
            if not (name == "get" and _last(receiver) in self._context_vars):
                self._refuse(node, shown)
        elif name in FUTURE_METHODS and not given and not node.keywords and self._may_block(receiver):
            self._refuse(node, shown)

    def _sockets(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Refuse a socket made in `function` that waits there and is never given a timeout."""
        made: dict[str, ast.expr] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and self._makes_socket(node.value):
                made.update((ast.unparse(target), node.value) for target in node.targets)
            elif isinstance(node, ast.withitem) and node.optional_vars and self._makes_socket(node.context_expr):
                made[ast.unparse(node.optional_vars)] = node.context_expr
        for name, where in made.items():
            methods = {method for receiver, method in _methods_called(function) if receiver == name}
            if methods & SOCKET_WAITS and not methods & {"settimeout", "setblocking"}:
                self._refuse(where, f"{name}.{min(methods & SOCKET_WAITS)}()")

    def _makes_socket(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and self._full_name(node.func) == "socket.socket"


def _methods_called(function: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the receiver, as source, and the name of each method that is called in `function`."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield ast.unparse(node.func.value), node.func.attr


def _makes_coroutines(node: ast.expr) -> bool:
    """Whether `node` collects what calls return, and these calls are not such that start tasks."""
    made = [node.elt] if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp) else []
    if isinstance(node, ast.List | ast.Tuple):
        made = node.elts
    return bool(made) and all(isinstance(each, ast.Call) and _last(each.func) not in SPAWNING_CALLS for each in made)


def _is_zero(arguments: list[ast.expr]) -> bool:
    return bool(arguments) and isinstance(arguments[0], ast.Constant) and arguments[0].value == 0


def _only_other_keywords(call: ast.Call) -> bool:
    """Whether `call` has keywords that no waiting method of the standard library takes: it is another method."""
    known = {"timeout", "block", "blocking"}
    return bool(call.keywords) and all(keyword.arg not in known for keyword in call.keywords)


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the local name and the full name of everything that is imported under another name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    yield alias.asname, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _context_variables(tree: ast.Module) -> Iterator[str]:
    """Yield the names that hold a `ContextVar`, whose `get()` does not wait."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            function = node.value.func
            if _last(function.value if isinstance(function, ast.Subscript) else function) == "ContextVar":
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (_last(target) for target in targets)


def _uses_thread_futures(tree: ast.Module) -> bool:
    """Whether a module has futures whose `result()` blocks, judged by how one comes by them."""
    sources = {"ThreadPoolExecutor", "ProcessPoolExecutor", "run_coroutine_threadsafe", "submit"}
    names = (_last(node) for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute))
    imported = (full_name.startswith("concurrent.futures.") for _, full_name in _imports(tree))
    return any(imported) or any(name in sources for name in names)
