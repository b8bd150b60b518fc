from __future__ import annotations

import inspect
import pickle

import pytest

from verl_contracts import errors
from verl_contracts.failures import MAX_LINES, FailureRecord, first_cause

RECORD = FailureRecord(role="replica", rank=2, node="n1", cause="RuntimeError: out of memory", lines=("a", "b"))
SPECIAL: dict[type[errors.VerlError], errors.VerlError] = {
    errors.WaitTimeout: errors.WaitTimeout("weights of version 7", "replica 2", 1.5),
    errors.ActorFailed: errors.ActorFailed(RECORD),
    errors.WeightSyncError: errors.WeightSyncError("transfer", "cut", "w", ["r1", "r2"]),
}
ALL = [getattr(errors, name) for name in errors.__all__]


def _example(kind: type[errors.VerlError]) -> errors.VerlError:
    return SPECIAL.get(kind) or kind("key.path: 3 > 2; write less")


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_error_survives_pickling_with_everything(kind: type[errors.VerlError], protocol: int) -> None:
    error = _example(kind)
    copy = pickle.loads(pickle.dumps(error, protocol))
    assert type(copy) is kind
    assert (str(copy), copy.args, vars(copy)) == (str(error), error.args, vars(error))


@pytest.mark.parametrize("kind", ALL)
def test_error_is_of_the_tree_and_of_a_builtin_kind(kind: type[errors.VerlError]) -> None:
    assert issubclass(kind, errors.VerlError)
    if kind is not errors.VerlError:
        assert issubclass(kind, (ValueError, RuntimeError, TimeoutError))
    assert inspect.getdoc(kind)


def test_special_errors_say_who_and_what() -> None:
    assert str(SPECIAL[errors.WaitTimeout]) == "waited 1.5 s for weights of version 7, held by replica 2"
    assert str(SPECIAL[errors.WeightSyncError]) == (
        "weight sync failed in phase 'transfer' at tensor 'w': cut; missing: r1, r2"
    )
    assert str(SPECIAL[errors.ActorFailed]) == "replica[2] on n1: RuntimeError: out of memory\n  | a\n  | b"


def _chain() -> Exception:
    try:
        try:
            try:
                raise OSError("disk full")
            except OSError as exc:
                raise ValueError("row 3") from exc
        except ValueError:
            raise RuntimeError("step failed")  # noqa: B904 - the implicit chain is what is tested
    except RuntimeError as exc:
        return exc


def test_record_names_the_first_cause_of_a_chain() -> None:
    record = FailureRecord.from_exception(_chain(), role="worker", rank=1)
    assert record.cause.endswith(str(first_cause(_chain())))
    assert (record.role, record.rank, record.cause) == ("worker", 1, "OSError: disk full")
    assert any("disk full" in line for line in record.lines)


def _suppressed() -> None:
    try:
        raise OSError("irrelevant")
    except OSError:
        raise ValueError("told apart") from None


def test_record_stops_at_a_suppressed_context() -> None:
    with pytest.raises(ValueError, match="told apart") as caught:
        _suppressed()
    assert FailureRecord.from_exception(caught.value, role="w", rank=0).cause == "ValueError: told apart"


def test_record_of_a_cycle_ends() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert FailureRecord.from_exception(one, role="w", rank=0).cause == "ValueError: two"


def test_record_keeps_the_last_lines_only() -> None:
    def deep(n: int) -> None:
        if n == 0:
            raise RuntimeError("\n".join(f"line {i}" for i in range(100)))
        deep(n - 1)

    with pytest.raises(RuntimeError) as caught:
        deep(5)
    record = FailureRecord.from_exception(caught.value, role="w", rank=0)
    assert len(record.lines) == MAX_LINES
    assert record.lines[-1] == "line 99"
