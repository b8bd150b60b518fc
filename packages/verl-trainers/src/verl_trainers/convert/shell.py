"""The commands of a shell script, with the script's own variables put in.

Reads what launch scripts are made of: assignments, arrays, loops, functions and their calls, redirections,
here-documents. Runs nothing. What only a shell could tell (``$(date)``) is marked, so that it cannot pass for a value;
a variable that the script does not assign comes from the environment, and stays so: ``${oc.env:NAME}``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from verl_trainers.convert.shell_words import OPAQUE, State, Variable, WordReader

__all__ = ["OPAQUE", "Command", "read_commands"]

_OPENING, _CLOSING = ("if", "for", "while", "until", "case", "select"), ("fi", "done", "esac")
_WORDS = frozenset({*_OPENING, *_CLOSING, "then", "else", "elif", "do", "function", "{", "}", "!", "time"})
_DECLARING = frozenset({"export", "declare", "local", "readonly", "typeset"})
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_REDIRECTION = re.compile(r"(?:[0-9]*|&(?=>))(?:<<<|<<-?|<&|<>|<(?!\()|>>|>&|>\||>(?!\())[ \t]*")
_DELIMITER = re.compile(r"""'([^'\n]*)'|"([^"\n]*)"|\\?([^\s;&|()<>'"\\]+)""")
_FUNCTION = re.compile(r"(?:function[ \t]+([\w:.-]+)(?:[ \t]*\([ \t]*\))?|([\w:.-]+)[ \t]*\([ \t]*\))\s*\{(?=\s)")
_ARITHMETIC = re.compile(r"\(\([^\n()]*+(?:\([^\n()]*+\)[^\n()]*+)*+\)\)")
_LOOP = re.compile(r"[ \t]+([A-Za-z_]\w*)\s*(in\b|(?=;|do\b))")
_IN = re.compile(r"\s+in\b")
_PATTERN = re.compile(r"(?:\s|#[^\n]*\n)*+(?!esac\b)\(?[^()\n;]{0,1000}+\)")
_MAX_CALLS = 20
_CALL = 100
"""What a call counts, beside the text that it repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of a script, expanded."""

    words: tuple[tuple[str, int], ...]
    """Words, each with the line where it begins."""
    uncalled: str = ""
    """The function that holds the command, when nothing in the script calls it; its arguments are then unknown."""


@dataclass(slots=True)
class _Function:
    body: str
    line: int
    is_called: bool = False


@dataclass(slots=True)
class _State(State):
    functions: dict[str, _Function] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    is_skimming: bool = False
    """Whether only the end of a function is looked for."""

    def set_arguments(self, words: list[str], lines: list[int]) -> None:
        """Make `words` what ``$1`` and ``$@`` stand for."""
        self.take_arguments()
        self.variables |= {str(index): Variable([text]) for index, text in enumerate(words[:9], start=1)}
        self.variables |= {name: Variable(words, lines, is_array=True) for name in "@*"}

    def take_arguments(self) -> dict[str, Variable]:
        """Make ``$1`` and ``$@`` unknown, and return what they stood for."""
        return {name: self.variables.pop(name) for name in "123456789@*" if name in self.variables}


def read_commands(script: str, arguments: list[str]) -> tuple[list[Command], list[str]]:
    """Return the commands of `script`, called with `arguments`, and notes about what could not be known.

    Raises ValueError, with the line, for what is never closed, and for a script that grows without end.
    """
    state = _State()
    state.set_arguments(arguments, [])
    try:
        commands = _Reader(script.replace("\r\n", "\n").replace(OPAQUE, ""), state).commands()
        for name, function in state.functions.items():
            if not function.is_called:
                state.take_arguments()
                state.running = [name]
                found = _Reader(function.body, state, function.line).commands()
                commands += [Command(words=command.words, uncalled=name) for command in found]
    except RecursionError as exc:
        raise ValueError("blocks and functions are nested too deeply") from exc
    return commands, list(state.notes)


class _Reader(WordReader):
    """Reads commands up to the end of the text, or to the brace that closes a function."""

    def __init__(self, text: str, state: _State, line: int = 1) -> None:
        super().__init__(text, state, line)
        self._shared = state
        self._depth = 0
        self._braces = 0
        self._documents: list[tuple[str, int]] = []
        self._ended = False

    def commands(self) -> list[Command]:
        """Read on to the end."""
        found: list[Command] = []
        words: list[tuple[str, int]] = []
        while self._at < len(self._text) and not self._ended:
            char = self._text[self._at]
            if char in " \t" or self._text.startswith("\\\n", self._at):
                self._skip(1 if char in " \t" else 2)
            elif char == "#":
                self._skip(self._length_to("\n"))
            elif char in "0123456789&<>" and (match := _REDIRECTION.match(self._text, self._at)) is not None:
                self._redirect(match.group())
            elif char == "(" and (match := _ARITHMETIC.match(self._text, self._at)) is not None:
                self._skip(len(match.group()))
            elif char in "\n;&|()":
                self._separate(char)
                found += self._finish(words)
                words = []
            elif not self._define(words) and not self._assign(words):
                self._add(words)
        if self._documents:
            raise _unclosed_document(*self._documents[0])
        return [*found, *self._finish(words)]

    def _separate(self, char: str) -> None:
        """Skip what ends a command."""
        self._skip(1)
        if char == "\n":
            for end, line in self._documents:
                self._skip_document(end, line)
            self._documents = []
        elif char == ";" and self._text.startswith((";", "&"), self._at):
            self._skip(2 if self._text.startswith(";&", self._at) else 1)
            self._skip_pattern()

    def _add(self, words: list[tuple[str, int]]) -> None:
        """Read a word of a command; those of the language before it are not among its words."""
        new = self._word().all()
        if words or len(new) != 1 or new[0][0] not in _WORDS:
            words += new
            return
        word = new[0][0]
        self._depth += (word in _OPENING) - (word in _CLOSING)
        self._braces += (word == "{") - (word == "}")
        self._ended = self._braces < 0 and self._shared.is_skimming
        if word in ("for", "select"):
            self._loop()
        elif word == "case":
            while self._text.startswith((" ", "\t"), self._at):
                self._skip(1)
            self._word()
            if match := _IN.match(self._text, self._at):
                self._skip(len(match.group()))
                self._skip_pattern()

    def _loop(self) -> None:
        line, match = self._line, _LOOP.match(self._text, self._at)
        if match is None:
            return
        self._skip(len(match.group()))
        name, arguments = match.group(1), self._state.variables.get("@", Variable([]))
        values = [text for text, _ in self._until("\n;&|()")] if match.group(2) else arguments.words
        self._state.variables[name] = Variable(values[:1] or [f"{OPAQUE}${name}{OPAQUE}"])
        self._state.doubtful.pop(name, None)
        if len(values) > 1:
            self._state.doubtful[name] = (line, f"the variable of a loop over {len(values)} values")

    def _finish(self, words: list[tuple[str, int]]) -> list[Command]:
        if not words or self._shared.is_skimming:
            return []
        name, line = words[0]
        function = self._shared.functions.get(name)
        if function is not None:
            return self._call(name, function, words)
        if name == "shift" and self._depth == 0 and "@" in self._state.variables:
            count = int(words[1][0]) if len(words) > 1 and re.fullmatch(r"\d{1,3}", words[1][0], re.ASCII) else 1
            old = self._state.variables["@"]
            self._state.repeat(len(old.words), line)
            self._shared.set_arguments(old.words[count:], old.lines[count:])
        elif name in ("read", "mapfile", "readarray"):
            for word, _ in words[1:]:
                if re.fullmatch(r"[A-Za-z_]\w*", word):
                    self._state.variables[word] = Variable([f"{OPAQUE}{name} {word} (line {line}){OPAQUE}"])
        return [Command(words=tuple(words))]

    def _call(self, name: str, function: _Function, words: list[tuple[str, int]]) -> list[Command]:
        """Return the commands of a function, with the words of the call as its arguments."""
        shared = self._shared
        function.is_called = True
        if name in shared.running or len(shared.running) >= _MAX_CALLS:
            shared.notes[f"line {words[0][1]}: {name} calls itself, or is called too deep, and was not followed"] = None
            return []
        shared.repeat(len(function.body) + _CALL, words[0][1])
        outer = shared.take_arguments()
        shared.set_arguments([text for text, _ in words[1:]], [line for _, line in words[1:]])
        shared.running.append(name)
        body = _Reader(function.body, shared, function.line)
        body._depth = self._depth
        found = body.commands()
        shared.running.pop()
        shared.take_arguments()
        shared.variables |= outer
        return found

    def _define(self, words: list[tuple[str, int]]) -> bool:
        """Read the definition of a function, whose body is read again by each call."""
        match = None if words else _FUNCTION.match(self._text, self._at)
        if match is None:
            return False
        opened = self._line
        self._skip(len(match.group()))
        start, line = self._at, self._line
        end = _Reader(self._text, _State(is_skimming=True), line)
        end._at = start
        end.commands()
        if not end._ended:
            raise ValueError(f"line {opened}: the function {match.group(1) or match.group(2)} is never closed")
        self._skip(end._at - start)
        body = self._text[start : end._at].rstrip().removesuffix("}")
        self._shared.functions[match.group(1) or match.group(2)] = _Function(body, line)
        return True

    def _assign(self, words: list[tuple[str, int]]) -> bool:
        """Read an assignment, which comes before the words of a command, or after `export` and the like."""
        match = _ASSIGNMENT.match(self._text, self._at)
        if match is None or (words and words[0][0] not in _DECLARING):
            return False
        line, name = self._line, match.group(1)
        self._skip(len(match.group()))
        if self._text.startswith("(", self._at):
            values = self._array()
            variable = Variable([text for text, _ in values], [at for _, at in values], is_array=True)
        else:
            variable = Variable([self._word().joined()])
        old = self._state.variables.get(name)
        if match.group(2) and old is not None and old.is_array:
            old.words += variable.words
            old.lines += variable.lines or [line]
            variable = old
        elif match.group(2) and old is not None:
            self._state.repeat(len(old.words[0]), line)
            variable = Variable([old.words[0] + " ".join(variable.words)])
        if self._depth > 0:
            self._state.doubtful[name] = (line, "assigned in a branch or a loop, which is not evaluated")
        elif not match.group(2):
            self._state.doubtful.pop(name, None)
        self._state.variables[name] = variable
        return True

    def _array(self) -> list[tuple[str, int]]:
        opened = self._line
        self._skip(1)
        values = self._until(")")
        if self._at >= len(self._text):
            raise ValueError(f"line {opened}: the array is never closed")
        self._skip(1)
        return values

    def _until(self, end: str) -> list[tuple[str, int]]:
        """Read words up to one of the characters in `end`."""
        values: list[tuple[str, int]] = []
        while self._at < len(self._text) and (char := self._text[self._at]) not in end:
            if char == "#":
                self._skip(self._length_to("\n"))
            elif char in " \t\n;&|()<>" and not self._text.startswith(("<(", ">("), self._at):
                self._skip(1)
            else:
                values += self._word().all()
        return values

    def _redirect(self, operator: str) -> None:
        """Skip a redirection and where it goes; what a here-document holds is skipped at the end of the line."""
        self._skip(len(operator))
        delimiter = _DELIMITER.match(self._text, self._at)
        if operator.strip().lstrip("0123456789") in ("<<", "<<-") and delimiter is not None:
            self._documents.append((next(text for text in delimiter.groups() if text is not None), self._line))
            self._skip(len(delimiter.group()))
        else:
            self._word()

    def _skip_document(self, end: str, line: int) -> None:
        while self._at < len(self._text):
            text = self._take(self._length_to("\n"))
            self._skip(1)
            if text.strip() == end:
                return
        raise _unclosed_document(end, line)

    def _skip_pattern(self) -> None:
        """Skip the pattern of a `case`, whose words are no command."""
        if match := _PATTERN.match(self._text, self._at):
            self._skip(len(match.group()))


def _unclosed_document(end: str, line: int) -> ValueError:
    return ValueError(f"line {line}: the here-document is never closed by {end}")
