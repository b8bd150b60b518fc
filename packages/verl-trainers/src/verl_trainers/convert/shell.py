"""The launch line in a shell script, with the script's own variables put in.

Reads what launch scripts are made of: assignments, arrays, quotes, continuations, ``${VAR:-1}``, ``$((1024 * 2))``.
Runs nothing. What only a shell could tell (``$(date)``) is marked, so that it cannot pass for a value; a variable that
the script does not assign comes from the environment, and stays so: ``${oc.env:NAME}``.
"""

from __future__ import annotations

import ast
import operator
import re
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["OPAQUE", "Command", "read_commands"]

OPAQUE = "\0"
"""Stands around what only a shell could tell."""

_OPENING, _CLOSING = ("if", "for", "while", "until", "case", "select"), ("fi", "done", "esac")
_WORDS = frozenset({*_OPENING, *_CLOSING, "then", "else", "elif", "do", "function", "{", "}", "!", "time"})
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_BRACED = re.compile(r"([A-Za-z_]\w*|[0-9@*])(\[[@*0-9]+\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_HERE_DOCUMENT = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of a script, expanded."""

    words: tuple[tuple[str, int], ...]
    """Words, each with the line where it begins."""


@dataclass(slots=True)
class _Variable:
    words: list[str]
    lines: list[int] = field(default_factory=list)
    """Of each word, for an array; empty for other variables."""
    is_array: bool = False


@dataclass(slots=True)
class _Word:
    """A word in the making: pieces, since an unquoted expansion may split it."""

    line: int
    done: list[tuple[str, int]] = field(default_factory=list)
    text: str = ""
    begun: bool = False

    def add(self, text: str) -> None:
        self.text += text
        self.begun = True

    def split(self, pieces: list[str], lines: list[int]) -> None:
        """Add `pieces` as words of their own, the first and the last joined to their neighbours."""
        for index, piece in enumerate(pieces):
            if index:
                self.done.append((self.text, self.line))
                self.text = ""
            self.line = lines[index] if index < len(lines) else self.line
            self.add(piece)

    def all(self) -> list[tuple[str, int]]:
        return [*self.done, *([(self.text, self.line)] if self.begun else [])]

    def joined(self) -> str:
        return " ".join(text for text, _ in self.all())


_Expansion: TypeAlias = tuple[list[str], list[int], bool]
"""Words, the lines of those that come from an array, and whether quotes keep the words apart."""


def read_commands(script: str, arguments: list[str]) -> tuple[list[Command], list[str]]:
    """Return the commands of `script`, called with `arguments`, and notes about what could not be known."""
    reader = _Reader(script, arguments)
    return reader.commands(), reader.notes()


class _Reader:
    def __init__(self, script: str, arguments: list[str]) -> None:
        self._text = script.replace("\r\n", "\n")
        self._at = 0
        self._line = 1
        self._depth = 0
        self._variables = {str(index): _Variable([text]) for index, text in enumerate(arguments, start=1)}
        self._variables |= dict.fromkeys("@*", _Variable(arguments, is_array=True))
        self._branches: dict[str, list[int]] = {}

    def commands(self) -> list[Command]:
        found: list[Command] = []
        words: list[tuple[str, int]] = []
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in "\n;&|()":
                self._skip(1)
                found += self._finish(words)
                words = []
            elif char in " \t" or self._text.startswith("\\\n", self._at):
                self._skip(1 if char in " \t" else 2)
            elif char == "#":
                self._skip(self._length_to("\n"))
            elif here := _HERE_DOCUMENT.match(self._text, self._at):
                self._skip_document(here.group(1), len(here.group()))
            elif not self._assign(bare=not words):
                words += self._word().all()
        return [*found, *self._finish(words)]

    def notes(self) -> list[str]:
        return [
            f"line {lines[-1]}: {name} is assigned in a branch or a loop, which is not evaluated; its last value, "
            f"{' '.join(self._variables[name].words)!r}, was taken"
            for name, lines in self._branches.items()
        ]

    def _finish(self, words: list[tuple[str, int]]) -> list[Command]:
        while words and words[0][0] in _WORDS:
            word = words.pop(0)[0]
            self._depth += (word in _OPENING) - (word in _CLOSING)
        return [Command(words=tuple(words))] if words else []

    def _assign(self, *, bare: bool) -> bool:
        """Read an assignment, which comes before the words of a command, or after `export` and the like."""
        start = self._text.rfind("\n", 0, self._at) + 1
        before = re.sub(r".*[;&|(]", "", self._text[start : self._at]).split()
        match = _ASSIGNMENT.match(self._text, self._at)
        exported = before and before[0] in ("export", "declare", "local", "readonly", "typeset")
        if match is None or not (bare or exported):
            return False
        line, name = self._line, match.group(1)
        self._skip(len(match.group()))
        if self._text.startswith("(", self._at):
            values = self._array()
            variable = _Variable([text for text, _ in values], [at for _, at in values], is_array=True)
        else:
            variable = _Variable([self._word().joined()])
        old = self._variables.get(name)
        if match.group(2) and old is not None:
            joined = [*old.words, *variable.words] if old.is_array else [old.words[0] + variable.words[0]]
            variable = _Variable(joined, [*old.lines, *variable.lines], is_array=old.is_array)
        if self._depth > 0:
            self._branches.setdefault(name, []).append(line)
        self._variables[name] = variable
        return True

    def _array(self) -> list[tuple[str, int]]:
        self._skip(1)
        values: list[tuple[str, int]] = []
        while self._at < len(self._text) and self._text[self._at] != ")":
            char = self._text[self._at]
            if char in " \t\n;&|(":
                self._skip(1)
            elif self._text.startswith("\\\n", self._at):
                self._skip(2)
            elif char == "#":
                self._skip(self._length_to("\n"))
            else:
                values += self._word().all()
        self._skip(1)
        return values

    def _word(self) -> _Word:
        word = _Word(self._line)
        while self._at < len(self._text) and self._text[self._at] not in " \t\n;&|()":
            char = self._text[self._at]
            if self._text.startswith("\\\n", self._at):
                self._skip(2)
            elif char == "\\":
                word.add(self._text[self._at + 1 : self._at + 2])
                self._skip(2)
            elif char == "'":
                self._skip(1)
                word.add(self._take(self._length_to("'")))
                self._skip(1)
            elif char == '"':
                self._quoted(word)
            elif char in "$`":
                self._unquoted(word)
            else:
                word.add(self._take(1))
        return word

    def _quoted(self, word: _Word) -> None:
        self._skip(1)
        word.add("")
        while self._at < len(self._text) and self._text[self._at] != '"':
            char = self._text[self._at]
            if char == "\\" and self._text[self._at + 1 : self._at + 2] in ('"', "\\", "$", "`", "\n"):
                escaped = self._text[self._at + 1]
                word.add("" if escaped == "\n" else escaped)
                self._skip(2)
            elif char in "$`":
                pieces, lines, is_array = self._expand()
                if is_array and not pieces and not word.text and self._text[self._at : self._at + 1] == '"':
                    word.begun = bool(word.done)  # "${EMPTY[@]}" is no word at all
                word.split(pieces if is_array else [" ".join(pieces)], lines if is_array else [])
            else:
                word.add(self._take(1))
        self._skip(1)

    def _unquoted(self, word: _Word) -> None:
        pieces, lines, _ = self._expand()
        parts = [part for piece in pieces for part in (piece.split() if OPAQUE not in piece else [piece])]
        word.split(parts, lines if len(parts) == len(pieces) else [])

    def _expand(self) -> _Expansion:
        """Read what begins with ``$`` or a backtick."""
        text, at = self._text, self._at
        if text[at] == "`":
            self._skip(1)
            command = self._take(self._length_to("`"))
            self._skip(1)
            return [f"{OPAQUE}`{command}`{OPAQUE}"], [], False
        if text.startswith("$((", at):
            return [self._arithmetic(self._balanced(1)[2:-2])], [], False
        if text.startswith("$(", at):
            return [f"{OPAQUE}${self._balanced(1)}{OPAQUE}"], [], False
        if text.startswith("${", at):
            return self._braced(self._balanced(1)[1:-1])
        match = _NAME.match(text, at + 1)
        if match is None:
            self._skip(1)
            return ["$"], [], False
        self._skip(1 + len(match.group()))
        return self._value(match.group(), match.group() == "@")

    def _braced(self, inner: str) -> _Expansion:
        match = _BRACED.fullmatch(inner)
        if match is None:
            return [f"{OPAQUE}${{{inner}}}{OPAQUE}"], [], False
        name, index, how, otherwise = match.groups()
        known = name in self._variables
        if index not in (None, "[@]", "[*]") and known:
            position = int(index[1:-1])
            return self._variables[name].words[position : position + 1] or [""], [], False
        if how is not None and how[-1] in "-=?" and not known:
            nested = _Reader(f'"{otherwise}"' if '"' not in otherwise else otherwise, [])
            nested._variables = self._variables
            return [nested._word().joined() if how[-1] != "?" else _env(name)], [], False
        if how is not None and how[-1] == "+":
            return [otherwise if known else ""], [], False
        if how is not None and how[0] == ":" and self._variables[name].words in ([], [""]):
            return [otherwise], [], False
        return self._value(name, index == "[@]" or name == "@")

    def _value(self, name: str, apart: bool) -> _Expansion:
        variable = self._variables.get(name)
        if variable is not None:
            whole = variable.is_array and (apart or name == "*")
            return (variable.words if whole else variable.words[:1]), (variable.lines if whole else []), apart
        if not name[0].isalpha() and name[0] != "_":
            return [f"{OPAQUE}${name}{OPAQUE}"], [], False
        return ([] if apart else [_env(name)]), [], apart

    def _arithmetic(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            words = self._variables[match.group(2)].words if match.group(2) in self._variables else []
            return f"({words[0]})" if words else match.group()

        expanded = re.sub(r"(\$\{?)?([A-Za-z_]\w*)\}?", value, text)
        try:
            return str(_evaluate(ast.parse(expanded.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return f"{OPAQUE}$(({text})){OPAQUE}"

    def _balanced(self, skipped: int) -> str:
        """Take from the bracket that is `skipped` characters ahead to the one that closes it."""
        self._skip(skipped)
        opening = self._text[self._at]
        closing = {"(": ")", "{": "}"}[opening]
        depth = 0
        for length, char in enumerate(self._text[self._at :], start=1):
            depth += (char == opening) - (char == closing)
            if depth == 0:
                return self._take(length)
        raise ValueError(f"line {self._line}: {opening!r} is never closed")

    def _skip_document(self, end: str, length: int) -> None:
        """Skip a here-document; what follows on its first line is skipped too."""
        self._skip(length)
        match = re.compile(rf"^\s*{re.escape(end)}\s*$", re.MULTILINE).search(self._text, self._at)
        self._skip((match.end() if match else len(self._text)) - self._at)

    def _length_to(self, char: str) -> int:
        end = self._text.find(char, self._at)
        return (len(self._text) if end < 0 else end) - self._at

    def _take(self, length: int) -> str:
        taken = self._text[self._at : self._at + length]
        self._skip(length)
        return taken

    def _skip(self, length: int) -> None:
        self._line += self._text.count("\n", self._at, self._at + length)
        self._at += length


def _env(name: str) -> str:
    return f"${{oc.env:{name}}}"


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
}


def _evaluate(node: ast.expr) -> int:
    """Compute whole numbers as a shell does. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Pow) and 0 <= right <= 64:
            return int(left**right)
        for kind, apply in _OPERATORS.items():
            if isinstance(node.op, kind):
                return int(apply(left, right))
    raise ValueError("not whole-number arithmetic")
