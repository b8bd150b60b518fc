"""Rows of JSONL and parquet files with verl's columns, checked one by one.

A malformed row is never skipped: the error lists the first few with file and line, and how many there are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from verl_contracts.errors import DataError
from verl_contracts.samples import Message

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from verl_contracts.events import JsonValue

__all__ = ["KINDS", "Row", "read_rows", "unknown_kind"]

KINDS = (".jsonl", ".json", ".parquet")
"""Endings of files that can be read."""

_SHOWN = 5
_MAX_DEPTH = 64
"""Levels of lists and objects in one value; deeper ones exhaust the stack of whoever walks them."""

_NO_VALUE = (ValueError, OverflowError, LookupError)
"""What Arrow raises for values that it can hold and Python cannot."""


@dataclass(frozen=True, slots=True)
class _Unusable:
    """A row that cannot be turned into Python values."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row, before tokenization."""

    place: str
    """``file:line`` in a JSONL file, ``file:row`` in a parquet file; both count from 1."""
    prompt: str | tuple[Message, ...]
    data_source: str = ""
    ground_truth: JsonValue = None
    extra_info: Mapping[str, JsonValue] = field(default_factory=dict)


def read_rows(files: Sequence[str], *, prompt_key: str, key: str = "data.train_files") -> list[Row]:
    """Read all rows of all files, in order; `key` names the files in the configuration.

    Raises `DataError` for unreadable files and malformed rows.
    """
    rows: list[Row] = []
    malformed: list[str] = []
    for file in files:
        for place, value in _read_file(Path(file), key):
            try:
                rows.append(_parse(value, place, prompt_key))
            except ValueError as exc:
                malformed.append(f"{place}: {exc}")
    if malformed:
        shown = "".join(f"\n  {line}" for line in malformed[:_SHOWN])
        more = f"\n  and {len(malformed) - _SHOWN} more" if len(malformed) > _SHOWN else ""
        raise DataError(
            f"{key}: {len(malformed)} malformed rows of {len(malformed) + len(rows)}; correct or remove them, since "
            f"none is skipped:{shown}{more}"
        )
    return rows


def _read_file(path: Path, key: str) -> Iterator[tuple[str, object]]:
    if path.suffix not in KINDS:
        raise DataError(f"{key}: {unknown_kind(path)}")
    yield from _read_parquet(path, key) if path.suffix == ".parquet" else _read_jsonl(path, key)


def unknown_kind(path: Path) -> str:
    """Say that `path` is no file of `KINDS`."""
    return f"{path}: unknown kind of file {path.suffix!r}; use .jsonl or .parquet"


def _read_jsonl(path: Path, key: str) -> Iterator[tuple[str, object]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}:{number}", line
    except (OSError, UnicodeDecodeError) as exc:
        raise DataError(f"{key}: {path}: cannot be read: {exc}") from exc


def _read_parquet(path: Path, key: str) -> Iterator[tuple[str, object]]:
    import pyarrow as pa  # here, because importing it takes long and JSONL needs none
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for value in _values(batch):
                    number += 1
                    yield f"{path}:{number}", value
    except (OSError, pa.ArrowException) as exc:
        raise DataError(f"{key}: {path}: cannot be read: {exc}") from exc


def _values(batch: pa.RecordBatch) -> Sequence[object]:
    """Return the rows, with `_Unusable` for each that holds what Python cannot, such as text that is no UTF-8."""
    try:
        return list(batch.to_pylist())
    except _NO_VALUE:
        rows = [batch.slice(i, 1) for i in range(batch.num_rows)]
        return [_unusable(row) or row.to_pylist()[0] for row in rows]


def _unusable(row: pa.RecordBatch) -> _Unusable | None:
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            column.to_pylist()
        except _NO_VALUE as exc:
            return _Unusable(f"column {name!r} ({column.type}) cannot be read: {exc}")
    return None


def _parse(value: object, place: str, prompt_key: str) -> Row:
    """Return the row. Raises ValueError saying what is wrong with it."""
    if isinstance(value, _Unusable):
        raise ValueError(value.reason)
    if isinstance(value, str):
        value = _load(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"must be an object with columns, got {type(value).__name__}")
    if prompt_key not in value:
        raise ValueError(f"has no column {prompt_key!r}; columns: {_names(value)}; see data.prompt_key")
    reward_model, extra_info = value.get("reward_model"), value.get("extra_info")
    for name, column in (("reward_model", reward_model), ("extra_info", extra_info)):
        if column is not None and not isinstance(column, Mapping):
            raise ValueError(f"column {name!r} must be an object, got {type(column).__name__}")
    data_source = value.get("data_source")
    if data_source is not None and not isinstance(data_source, str):
        raise ValueError(f"column 'data_source' must be text, got {type(data_source).__name__}")
    return Row(
        place=place,
        prompt=_prompt(value[prompt_key]),
        data_source=_text(data_source or "", "data_source"),
        ground_truth=_json(reward_model.get("ground_truth"), "ground_truth") if reward_model else None,
        extra_info={str(name): _json(item, f"extra_info.{name}") for name, item in (extra_info or {}).items()},
    )


def _prompt(value: object) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        if not value:
            raise ValueError("the prompt is empty")
        return _text(value, "the prompt")
    if not isinstance(value, Sequence) or not value:
        raise ValueError(f"the prompt must be text or a list of messages, got {value!r:.60}")
    messages: list[Message] = []
    for i, item in enumerate(value):
        role, content = (item.get("role"), item.get("content")) if isinstance(item, Mapping) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"message {i} of the prompt must have 'role' and 'content' as text, got {item!r:.60}")
        messages.append(Message(role=_text(role, "a role"), content=_text(content, f"message {i} of the prompt")))
    return tuple(messages)


def _load(line: str) -> object:
    """Return what a line of JSON holds. Raises ValueError."""
    try:
        value: object = json.loads(line, parse_constant=_refuse_constant)
    except json.JSONDecodeError as exc:
        raise ValueError(f"is not JSON: {exc}") from exc
    except RecursionError as exc:
        raise ValueError(f"is nested deeper than {_MAX_DEPTH} levels") from exc
    return value


def _refuse_constant(name: str) -> object:
    raise ValueError(f"holds {name}, which is no number in JSON; write null or leave it out")


def _names(value: Mapping[object, object]) -> str:
    return ", ".join(sorted(map(str, value))) or "none"


def _text(value: str, name: str) -> str:
    """Return `value`. Raises ValueError for half a character, as a cut UTF-16 text leaves behind."""
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        wrong = f"a lone surrogate, {value[exc.start]!a}, at character {exc.start}"
        raise ValueError(f"{name} holds {wrong}: it is no Unicode text and cannot be tokenized or written") from exc
    return value


def _json(value: object, name: str, depth: int = 0) -> JsonValue:
    if depth > _MAX_DEPTH:
        raise ValueError(f"{name:.60} is nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, str):
        return _text(value, name)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}, which is no number in JSON; write null or leave it out")
    if value is None or isinstance(value, (int, float, bool)):
        return value
    if isinstance(value, Mapping):
        return {_text(str(key), name): _json(item, f"{name}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(item, name, depth + 1) for item in value]
    raise ValueError(f"{name} must be JSON-like, got {type(value).__name__}")
