"""Words of a shell script: quotes, variables, ``${VAR:-1}``, ``$((1024 * 2))``.

Owns what one word becomes, and the limits that keep a hostile script from growing without end. Reads every character
once; what is read again, because a variable or a function repeats it, counts against one budget for the whole script.
"""

from __future__ import annotations

import ast
import operator
import re
from dataclasses import dataclass, field

__all__ = ["OPAQUE", "Expansion", "State", "Variable", "Word", "WordReader"]

OPAQUE = "\0"
"""Stands around what only a shell could tell."""

_END = " \t\n;&|()<>"
_PLAIN = re.compile(r"""[^ \t\n;&|()<>\\'"$`]+""")
_PLAIN_QUOTED = re.compile(r'[^\\"$`]+')
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_BRACED = re.compile(r"([A-Za-z_]\w*|[0-9@*])(\[(?:[@*]|[0-9]{1,9})\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_BRACKETS = re.compile(r"""\\.|\$?[({]|[)}'"]|(?<=[\s;])\#|(?<!<)<<-?[ \t]*\\?['"]?(\w+)['"]?""", re.DOTALL)
_ANSI = re.compile(r"'((?:[^'\\]++|\\.)*+)'", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})|([0-7]{1,3})|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}
_MAX_REPEATED = 4_000_000
_MAX_NESTING = 16
_MAX_ARITHMETIC = 1000


@dataclass(slots=True)
class Variable:
    """What a name stands for."""

    words: list[str]
    lines: list[int] = field(default_factory=list)
    """Of each word, for an array; empty for other variables."""
    is_array: bool = False


@dataclass(slots=True)
class State:
    """What the parts of one script share."""

    variables: dict[str, Variable] = field(default_factory=dict)
    doubtful: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Name → line where it got one of several values, and why it has several."""
    notes: dict[str, None] = field(default_factory=dict)
    """What could not be known, each once."""
    repeated: int = 0

    def use(self, name: str) -> Variable | None:
        """Return what `name` stands for, if it is assigned; note it when that is one of several values."""
        variable = self.variables.get(name)
        if variable is not None and name in self.doubtful:
            line, why = self.doubtful[name]
            value = " ".join(variable.words).replace(OPAQUE, "")
            self.notes[f"line {line}: {name} is {why}; {value!r} was taken"] = None
        return variable

    def repeat(self, count: int, line: int) -> None:
        """Account for `count` characters that are read again. Raises ValueError when there are too many."""
        self.repeated += count
        if self.repeated > _MAX_REPEATED:
            raise ValueError(f"line {line}: variables and functions repeat more than {_MAX_REPEATED} characters")


@dataclass(slots=True)
class Word:
    """A word in the making: pieces, since an unquoted expansion may split it."""

    line: int
    done: list[tuple[str, int]] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    begun: bool = False

    def add(self, text: str) -> None:
        """Add `text` to the word."""
        self.parts.append(text)
        self.begun = True

    def split(self, pieces: list[str], lines: list[int]) -> None:
        """Add `pieces` as words of their own, the first and the last joined to their neighbours."""
        for index, piece in enumerate(pieces):
            if index:
                self.done.append(("".join(self.parts), self.line))
                self.parts = []
            self.line = lines[index] if index < len(lines) else self.line
            self.add(piece)

    def all(self) -> list[tuple[str, int]]:
        """Return the words that it became, each with its line."""
        return [*self.done, *([("".join(self.parts), self.line)] if self.begun else [])]

    def joined(self) -> str:
        """Return what it became as one text."""
        return " ".join(text for text, _ in self.all())


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """What stands in the place of ``$…``."""

    words: list[str]
    lines: list[int] = field(default_factory=list)
    """Of each word, when the words come from an array."""
    apart: bool = False
    """Whether the words stay apart inside quotes."""
    quoted: bool = False
    """Whether blanks in a word split it no more."""


class WordReader:
    """Reads words from `text`, which begins on `line`."""

    def __init__(self, text: str, state: State, line: int = 1) -> None:
        self._text = text
        self._state = state
        self._at = 0
        self._line = line

    def _word(self, end: str = _END) -> Word:
        """Read up to one of the characters in `end`."""
        word = Word(self._line)
        while self._at < len(self._text):
            char = self._text[self._at]
            following = self._text[self._at + 1 : self._at + 2]
            if plain := _PLAIN.match(self._text, self._at):
                word.add(self._take(len(plain.group())))
            elif char in "<>" and following == "(":
                word.add(f"{OPAQUE}{char}{self._balanced(1)}{OPAQUE}")
            elif char in end:
                break
            elif char == "\\":
                word.add(following) if following != "\n" else None
                self._skip(2)
            elif char == "'":
                word.add(self._to_quote())
            elif char == "$" and following == "'":
                self._skip(1)
                word.add(self._ansi())
            elif char == '"' or (char == "$" and following == '"'):
                self._skip(char == "$")
                self._quoted(word)
            elif char in "$`":
                self._unquoted(word)
            else:
                word.add(self._take(1))
        return word

    def _quoted(self, word: Word) -> None:
        opened = self._line
        self._skip(1)
        word.add("")
        while self._at < len(self._text) and self._text[self._at] != '"':
            char = self._text[self._at]
            if plain := _PLAIN_QUOTED.match(self._text, self._at):
                word.add(self._take(len(plain.group())))
            elif char == "\\" and self._text[self._at + 1 : self._at + 2] in ('"', "\\", "$", "`", "\n"):
                escaped = self._text[self._at + 1]
                word.add("" if escaped == "\n" else escaped)
                self._skip(2)
            elif char in "$`":
                found = self._expand()
                if found.apart and not found.words and not any(word.parts) and self._text.startswith('"', self._at):
                    word.begun = bool(word.done)  # "${EMPTY[@]}" is no word at all
                word.split(found.words if found.apart else [" ".join(found.words)], found.lines if found.apart else [])
            else:
                word.add(self._take(1))
        self._close('"', opened)

    def _unquoted(self, word: Word) -> None:
        found = self._expand()
        kept = [[piece] if found.quoted or OPAQUE in piece else piece.split() for piece in found.words]
        parts = [part for pieces in kept for part in pieces]
        word.split(parts, found.lines if len(parts) == len(found.words) else [])

    def _to_quote(self) -> str:
        """Take what stands between two of the character that is next."""
        quote, opened = self._take(1), self._line
        text = self._take(self._length_to(quote))
        self._close(quote, opened)
        return text

    def _close(self, quote: str, opened: int) -> None:
        if self._at >= len(self._text):
            raise ValueError(f"line {opened}: the quote {quote} is never closed")
        self._skip(1)

    def _ansi(self) -> str:
        match = _ANSI.match(self._text, self._at)
        if match is None:
            raise ValueError(f"line {self._line}: the quote $' is never closed")
        self._skip(len(match.group()))
        return _ESCAPE.sub(_unescape, match.group(1))

    def _expand(self) -> Expansion:
        """Read what begins with ``$`` or a backtick."""
        text, at = self._text, self._at
        if text[at] == "`":
            return Expansion(words=[f"{OPAQUE}`{self._to_quote()}`{OPAQUE}"])
        if text.startswith("$((", at):
            return Expansion(words=[self._arithmetic(self._balanced(1)[2:-2])])
        if text.startswith("$(", at):
            return Expansion(words=[f"{OPAQUE}${self._balanced(1)}{OPAQUE}"])
        if text.startswith("${", at):
            return self._braced(self._balanced(1)[1:-1])
        match = _NAME.match(text, at + 1)
        self._skip(1 + (len(match.group()) if match else 0))
        return self._value(match.group(), apart=match.group() == "@") if match else Expansion(words=["$"])

    def _braced(self, inner: str) -> Expansion:
        match = _BRACED.fullmatch(inner)
        if match is None:
            return Expansion(words=[f"{OPAQUE}${{{inner}}}{OPAQUE}"])
        name, index, how, otherwise = match.groups()
        variable = self._state.variables.get(name)
        if variable is not None and index not in (None, "[@]", "[*]"):
            self._state.use(name)
            position = int(index[1:-1])
            words = variable.words[position : position + 1]
            found = Expansion(words=words or [""])
        else:
            words = variable.words if variable is not None else []
            found = self._value(name, apart=index == "[@]" or name == "@")
        if how is None or how[-1] == "?":
            return found
        lacks = variable is None or (how[0] == ":" and words in ([], [""]))
        if how[-1] == "+":
            return Expansion(words=[""]) if lacks else self._otherwise(otherwise)
        if not lacks:
            return found
        other = self._otherwise(otherwise)
        if how[-1] == "=":
            self._state.variables[name] = Variable([" ".join(other.words)])
        return other

    def _otherwise(self, text: str) -> Expansion:
        """Read what stands after ``:-`` and the like."""
        self._state.repeat(len(text), self._line)
        reader = WordReader(text if '"' in text else f'"{text}"', self._state, self._line)
        words = reader._word(end="").all()
        is_quoted = text.startswith('"')
        return Expansion(
            words=[word for word, _ in words],
            lines=[line for _, line in words],
            apart=is_quoted and len(words) != 1,
            quoted=is_quoted,
        )

    def _value(self, name: str, *, apart: bool) -> Expansion:
        variable = self._state.use(name)
        if variable is not None:
            whole = variable.is_array and (apart or name == "*")
            words = variable.words if whole else variable.words[:1]
            self._state.repeat(sum(map(len, words)) + len(words), self._line)
            return Expansion(words=words, lines=variable.lines if whole else [], apart=apart)
        if not name[0].isalpha() and name[0] != "_":
            return Expansion(words=[f"{OPAQUE}${name}{OPAQUE}"])
        return Expansion(words=[] if apart else [f"${{oc.env:{name}}}"], apart=apart)

    def _arithmetic(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            variable = self._state.use(match.group(2))
            return f"({variable.words[0]})" if variable is not None and variable.words else match.group()

        if len(text) <= _MAX_ARITHMETIC:
            expanded = re.sub(r"(\$\{?)?([A-Za-z_]\w*)\}?", value, text).strip()
            try:
                if len(expanded) <= _MAX_ARITHMETIC:
                    return str(_evaluate(ast.parse(expanded, mode="eval").body))
            except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
                pass  # marked below
        return f"{OPAQUE}$(({text})){OPAQUE}"

    def _balanced(self, skipped: int) -> str:
        """Take from the bracket that is `skipped` characters ahead to the one that closes it."""
        self._skip(skipped)
        open_: list[str] = []
        at = self._at
        while match := _BRACKETS.search(self._text, at):
            token, at = match.group(), match.end()
            top = open_[-1] if open_ else ""
            if token[0] in "#<":
                at = self._passed(match) if top == "(" and open_[:2] != ["(", "("] else match.start() + 1
            elif token in ')}"' and token == {"(": ")", "{": "}"}.get(top, top):
                open_.pop()
            elif token == "'" and top == "(":
                at = self._text.find("'", at) + 1 or len(self._text)
            elif token == '"' or token[0] == "$" or (token in "({" and top in ("", token)):
                open_.append(token[-1])
            if not open_:
                return self._take(at - self._at)
            if len(open_) > _MAX_NESTING:
                raise ValueError(f"line {self._line}: brackets are nested more than {_MAX_NESTING} deep")
        raise ValueError(f"line {self._line}: {self._text[self._at]!r} is never closed")

    def _passed(self, match: re.Match[str]) -> int:
        """Return where a comment or a here-document inside a command ends."""
        start = match.start()
        if match.group(1) is not None:
            document = re.compile(rf"^[ \t]*{match.group(1)}[ \t]*$", re.MULTILINE).search(self._text, start)
            if document is None:
                line = self._line + self._text.count("\n", self._at, start)
                raise ValueError(f"line {line}: the here-document is never closed by {match.group(1)}")
            return document.end()
        end = self._text.find("\n", start)
        return end if end >= 0 else len(self._text)

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


def _unescape(match: re.Match[str]) -> str:
    *digits, other = match.groups()
    if other is not None:
        return _ESCAPES.get(other, other if other in "\\'\"?" else match.group())
    number = next(int(text, 8 if index == 3 else 16) for index, text in enumerate(digits) if text)
    return chr(number) if 0 < number < 0xD800 or 0xE000 <= number <= 0x10FFFF else match.group()


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
