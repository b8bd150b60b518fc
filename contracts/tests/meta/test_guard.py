"""The guard of the suites themselves: no standard test can be dropped unseen."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from subjects import StoreSubject

from verl_contracts.testing.suites.base import ContractSuite, contract_since

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEST = "test_taken_group_is_gone"


def _own() -> Callable[[object], None]:
    def test(self: object) -> None: ...

    return test


def test_overridden_test_is_refused_when_the_class_is_made() -> None:
    with pytest.raises(TypeError, match=rf"{TEST} overrides a test of ExperienceStoreSuite"):
        type("Mine", (StoreSubject,), {TEST: _own()})


def test_removed_test_is_refused_too() -> None:
    with pytest.raises(TypeError, match=TEST):
        type("Mine", (StoreSubject,), {TEST: None})


def test_mixin_cannot_override_either() -> None:
    mixin = type("Mixin", (), {TEST: _own()})
    with pytest.raises(TypeError, match=TEST):
        type("Mine", (mixin, StoreSubject), {})


@pytest.mark.parametrize(
    "mark",
    [
        pytest.mark.xfail(reason="known"),
        pytest.mark.xfail(strict=True),
        pytest.mark.xfail(strict=False, reason="known"),
        pytest.mark.skip(reason="known"),
    ],
)
def test_other_marks_do_not_excuse(mark: pytest.MarkDecorator) -> None:
    with pytest.raises(TypeError, match=TEST):
        type("Mine", (StoreSubject,), {TEST: mark(_own())})


def test_strict_xfail_with_a_reason_excuses() -> None:
    mark = pytest.mark.xfail(strict=True, reason="the store gives copies out, see its README")
    type("Mine", (StoreSubject,), {TEST: mark(_own())})


def test_further_tests_and_suites_may_be_added() -> None:
    type("Mine", (StoreSubject,), {"test_of_my_own": _own()})
    suite = type("Wider", (StoreSubject,), {"test_more": _own()}, suite=True)
    with pytest.raises(TypeError, match="overrides a test of Wider"):
        type("Mine", (suite,), {"test_more": _own()})


def test_newer_test_is_skipped_visibly_for_an_older_implementation(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "from verl_contracts.testing.suites.base import ContractSuite, contract_since\n"
        "class Suite(ContractSuite, suite=True):\n"
        "    @contract_since(0, 3)\n"
        "    def test_new(self): pass\n"
        "    def test_old(self): pass\n"
        "class TestOld(Suite): implements = '0.2'\n"
        "class TestNew(Suite): implements = '0.3'\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60.0, check=False)
    assert "3 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "tests contract 0.3; the implementation declares 0.2" in done.stdout


def test_mark_keeps_the_version() -> None:
    @contract_since(1, 2)
    def test() -> None: ...

    assert vars(test)["contract_since"] == (1, 2)
    assert issubclass(StoreSubject, ContractSuite)
