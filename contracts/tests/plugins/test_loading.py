from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from typing import TYPE_CHECKING

import pytest

from verl_contracts.errors import ContractVersionError, PluginError
from verl_contracts.plugins import FAMILIES, families, load_plugin

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from verl_contracts.plugins import Family

KEY = "reward.function"
GROUP = "verl_contracts.reward_functions"
LOOP_KEY = "actor_rollout_ref.rollout.agent.default_agent_loop"


def _refused(spec: str, family: Family[object] = families.REWARD_FUNCTION, key: str = KEY) -> str:
    with pytest.raises(PluginError) as caught:
        load_plugin(family, spec, key=key)
    message = str(caught.value)
    assert message.startswith(f"{key}: "), message
    assert f"process {os.getpid()}" in message
    return message


@pytest.mark.parametrize("name", ["Right", "Decorated", "Loose", "Static", "Fitting", "WithOptions"])
def test_class_that_fits_is_returned_when_named_by_path(name: str) -> None:
    import samples

    for path in (f"samples.{name}", f"samples:{name}"):
        assert load_plugin(families.REWARD_FUNCTION, path, key=KEY) is getattr(samples, name)


def test_nested_class_is_found_when_written_with_a_colon() -> None:
    assert load_plugin(families.REWARD_FUNCTION, "samples:Outer.Inner", key=KEY).__qualname__ == "Outer.Inner"


def test_nested_class_with_a_dot_is_told_to_use_a_colon() -> None:
    assert "so write samples:Outer.Inner" in _refused("samples.Outer.Inner")


def test_awaitable_is_as_good_as_a_coroutine() -> None:
    assert load_plugin(families.AGENT_LOOP, "samples:LoopAwaitable", key=LOOP_KEY)


REFUSED = {
    "samples:Missing": (
        "reward.function: samples:Missing does not meet the contract RewardFunction 0.1 (process {pid}): "
        "score: missing; the contract wants `def score(self, request: RewardRequest, response: str, /) -> RewardResult`"
        "; nearest: 'scores'"
    ),
    "samples:Arity": (
        "reward.function: samples:Arity does not meet the contract RewardFunction 0.1 (process {pid}): "
        "score: lacks positional parameter 'response'. It has `def score(self, request: RewardRequest) -> RewardResult`"
        "; the contract wants `def score(self, request: RewardRequest, response: str, /) -> RewardResult`"
    ),
    "samples:TooMuch": (
        "reward.function: samples:TooMuch does not meet the contract RewardFunction 0.1 (process {pid}): "
        "score: requires 'extra', which nobody passes. It has "
        "`def score(self, request: RewardRequest, response: str, extra: int) -> RewardResult`"
        "; the contract wants `def score(self, request: RewardRequest, response: str, /) -> RewardResult`"
    ),
    "samples:Async": (
        "reward.function: samples:Async does not meet the contract RewardFunction 0.1 (process {pid}): "
        "score: is async, but must be sync. It has "
        "`async def score(self, request: RewardRequest, response: str, /) -> RewardResult`"
        "; the contract wants `def score(self, request: RewardRequest, response: str, /) -> RewardResult`"
    ),
    "samples:IsAttribute": (
        "reward.function: samples:IsAttribute does not meet the contract RewardFunction 0.1 (process {pid}): "
        "score: is 1.0, which cannot be called; "
        "the contract wants `def score(self, request: RewardRequest, response: str, /) -> RewardResult`"
    ),
    "samples:IsProperty": (
        "reward.function: samples:IsProperty does not meet the contract RewardFunction 0.1 (process {pid}): "
        "score: is a property; "
        "the contract wants `def score(self, request: RewardRequest, response: str, /) -> RewardResult`"
    ),
    "samples:EmptyBody": (
        "reward.function: samples:EmptyBody does not meet the contract RewardFunction 0.1 (process {pid}): "
        "score: missing; the contract wants `def score(self, request: RewardRequest, response: str, /) -> RewardResult`"
        "; the class inherits the contract's own empty body"
    ),
    "samples:Abstract": (
        "reward.function: samples:Abstract does not meet the contract RewardFunction 0.1 (process {pid}): "
        "is abstract: score not written"
    ),
    "samples:PositionalConstructor": (
        "reward.function: samples:PositionalConstructor does not meet the contract RewardFunction 0.1 (process {pid}): "
        "constructor: 'weight' is positional-only, but everything is passed by keyword; "
        "has `def __init__(weight: float, /) -> None`"
    ),
    "samples:Rigth": (
        "reward.function: 'samples:Rigth' not found: 'samples' has no attribute 'Rigth'; nearest: 'Right' "
        "(process {pid})"
    ),
    "samples:Outer.Iner": (
        "reward.function: 'samples:Outer.Iner' not found: 'samples.Outer' has no attribute 'Iner'; nearest: 'Inner' "
        "(process {pid})"
    ),
    "samples.not_a_class": "reward.function: 'samples.not_a_class' is 3, not a class (process {pid})",
    "samples:": "reward.function: 'samples:' is no class path; write package.module.Class or package.module:Class "
    "(process {pid})",
    "verl_contracts.reward.RewardFunction": (
        "reward.function: 'verl_contracts.reward.RewardFunction' not found: no module 'verl_contracts.reward'; "
        "nearest: 'verl_contracts.rewards' (process {pid})"
    ),
    "raising_import:Thing": (
        "reward.function: importing 'raising_import' for 'raising_import:Thing' failed: ZeroDivisionError: at import "
        "(process {pid})"
    ),
}


@pytest.mark.parametrize("spec", REFUSED)
def test_wrong_plugin_is_refused_with_one_line_that_says_why(spec: str) -> None:
    message = _refused(spec)
    assert message == REFUSED[spec].format(pid=os.getpid())
    assert "\n" not in message


LOOPS = {
    "samples:LoopWithoutClient": "constructor: lacks keyword 'client'; nearest: 'clint'",
    "samples:LoopKeyword": "run: lacks keyword 'deadline'; nearest: 'dead_line'; requires 'dead_line', which nobody",
    "samples:LoopStream": "run: is an async generator, but must be a coroutine",
    "samples:LoopSync": "run: is sync, but must be `async def`",
}


@pytest.mark.parametrize("spec", LOOPS)
def test_wrong_agent_loop_is_refused_with_its_member(spec: str) -> None:
    assert LOOPS[spec] in _refused(spec, families.AGENT_LOOP, LOOP_KEY)


def test_everything_wrong_is_listed_at_once_when_nothing_fits() -> None:
    key = families.LLM_SERVER_MANAGER.key
    message = _refused("samples:Right", families.LLM_SERVER_MANAGER, key)
    for member in ("Config", "create", "replicas", "client", "add", "admit", "exclude", "remove", "close"):
        assert f"\n  - {member}: missing" in message


@pytest.mark.parametrize("name", ["Newer", "OtherMajor", "Malformed"])
def test_other_contract_version_is_an_error_of_its_own(name: str) -> None:
    with pytest.raises(ContractVersionError, match=f"{KEY}: samples:{name}"):
        load_plugin(families.REWARD_FUNCTION, f"samples:{name}", key=KEY)


def test_missing_module_keeps_the_true_import_error() -> None:
    with pytest.raises(PluginError, match="needs module 'not_installed_anywhere'") as caught:
        load_plugin(families.REWARD_FUNCTION, "broken_import:Thing", key=KEY)
    cause = caught.value.__cause__
    assert isinstance(cause, ModuleNotFoundError)
    assert cause.name == "not_installed_anywhere"


def test_missing_module_names_the_extra_that_brings_it(install: Callable[..., None]) -> None:
    install(
        "team-rewards",
        GROUP,
        {"broken": "broken_import:Thing", "fine": "samples:Right", "raising": "raising_import:Thing"},
        ("verl-contracts", "not-installed-anywhere>=2; extra == 'cuda'", "numpy; extra == 'other'"),
    )
    with pytest.raises(PluginError) as caught:
        load_plugin(families.REWARD_FUNCTION, "broken", key=KEY)
    message = str(caught.value)
    assert "run: pip install 'team-rewards[cuda]'" in message
    usable = message.rpartition("usable here: ")[2].split(", ")
    assert "'fine'" in usable
    assert not {"'broken'", "'raising'"} & set(usable)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_installed_name_is_loaded(install: Callable[..., None]) -> None:
    install("team-rewards", GROUP, {"fine": "samples:Right"})
    assert load_plugin(families.REWARD_FUNCTION, "fine", key=KEY).__name__ == "Right"


def test_unknown_name_lists_what_is_there(install: Callable[..., None]) -> None:
    install("team-rewards", GROUP, {"length": "samples:Right", "exact": "samples:Static"})
    message = _refused("lenght")
    assert "no reward function is called 'lenght'; nearest: 'length'; available: " in message
    listed = message.partition("available: ")[2].partition(". ")[0].split(", ")
    assert listed == sorted(listed)
    assert {"'exact'", "'length'"} <= set(listed)
    assert "names no reward function; available: " in _refused("")


def test_contested_name_lists_both_owners(install: Callable[..., None]) -> None:
    install("team-a", GROUP, {"same": "samples:Right"})
    install("team-b", GROUP, {"same": "samples:Static"})
    with pytest.raises(PluginError) as caught:
        load_plugin(families.REWARD_FUNCTION, "same", key=KEY)
    message = str(caught.value)
    assert "offered more than once" in message
    assert "team-a (samples:Right)" in message
    assert "team-b (samples:Static)" in message


@pytest.mark.parametrize("here", [True, False], ids=["on the path", "not on the path"])
def test_module_that_is_nowhere_shows_where_was_searched(
    here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*([str(tmp_path)] if here else []), *filter(None, sys.path)])
    message = _refused("nowhere_at_all.Thing")
    assert "no module 'nowhere_at_all'" in message
    where = f"the current folder {tmp_path} and what is installed"
    assert (where if here else f"what is installed, and not the current folder {tmp_path})") in message
    assert "sys.path" not in message


@pytest.mark.parametrize(
    ("missing", "nearest"),
    [
        ("my_pakage", "; nearest: 'my_package'"),
        ("_pikle", ""),
        ("asyncioo", ""),
        ("pytets", "; nearest: 'pytest'"),
        ("verl_contract", "; nearest: 'verl_contracts'"),
    ],
)
def test_near_modules_are_those_of_the_folder_then_really_near_installed_ones(
    missing: str, nearest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("my_package", "_pikkle"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert f"not found: no module {missing!r}{nearest} (process " in _refused(f"{missing}.Thing")


def test_role_of_the_process_is_named_when_given() -> None:
    with pytest.raises(PluginError, match=rf"\(process {os.getpid()}, agent\[3\]\)"):
        load_plugin(families.REWARD_FUNCTION, "samples:Nothing", key=KEY, role="agent[3]")


def test_refusal_survives_pickling() -> None:
    with pytest.raises(PluginError) as caught:
        load_plugin(families.REWARD_FUNCTION, "samples:Newer", key=KEY)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy)) == (ContractVersionError, str(caught.value))


def test_class_outside_the_project_is_loaded_in_a_spawned_process(tmp_path: Path) -> None:
    (tmp_path / "users_own.py").write_text(
        "class Mine:\n    def score(self, request, response, /):\n        raise NotImplementedError\n"
    )
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        loaded = pool.apply_async(_load_there, (str(tmp_path),))
        assert loaded.get(timeout=60.0) == "users_own:Mine"


def _load_there(folder: str) -> str:
    sys.path.insert(0, folder)
    found = load_plugin(families.REWARD_FUNCTION, "users_own.Mine", key=KEY, role="reward[0]")
    return f"{found.__module__}:{found.__qualname__}"


def test_families_are_known_by_their_group() -> None:
    assert all(family.group == group and group.startswith("verl_contracts.") for group, family in FAMILIES.items())
    assert len({family.key for family in FAMILIES.values()}) == len(FAMILIES)


def test_a_distribution_whose_entry_points_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "bad-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nno equals sign\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match=r"entry_points\.txt of bad in .* is malformed.*install that distribution"):
        load_plugin(families.REWARD_FUNCTION, "anything", key=KEY)
