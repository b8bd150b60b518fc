from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import pytest

from verl_contracts.errors import ConfigError
from verl_contracts.plugins import build_config, build_plugin, check_options, check_plugin, families, resolve_optional

if TYPE_CHECKING:
    from verl_contracts.clock import Clock

KEY = "actor_rollout_ref.rollout.options"


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int = 1


@dataclass(frozen=True, kw_only=True)
class Options:
    size: int
    rate: float = 0.5
    names: tuple[str, ...] = ()
    pair: tuple[int, str] = (1, "a")
    note: str | None = None
    mode: Literal["wait", "abort"] = "wait"
    fast: bool = False
    inner: Inner = field(default_factory=Inner)
    weights: dict[str, float] = field(default_factory=dict)
    clock: Clock | None = None
    """Cannot be resolved at run time, so it is not checked."""

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size must be ≥ 0, got {self.size}")


def test_options_become_a_typed_config() -> None:
    built = build_config(
        Options,
        {
            "size": 3,
            "rate": 2,
            "names": ["a", "b"],
            "pair": [2, "b"],
            "mode": "abort",
            "fast": True,
            "inner": {"size": 4},
        },
        key=KEY,
    )
    assert built == Options(
        size=3, rate=2.0, names=("a", "b"), pair=(2, "b"), mode="abort", fast=True, inner=Inner(size=4)
    )
    assert isinstance(built.rate, float)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, f"{KEY}.size: missing, and Options requires it"),
        ({"size": 1, "SIZE": 2}, f"{KEY}.SIZE: unknown option; nearest: 'size'; Options takes size, rate,"),
        ({"size": 1, "sise": 2}, f"{KEY}.sise: unknown option; nearest: 'size'; Options takes size, rate,"),
        ({"size": "3"}, f"{KEY}.size: must be int, got '3' (str)"),
        ({"size": True}, f"{KEY}.size: must be int, got True (bool)"),
        ({"size": 1.0}, f"{KEY}.size: must be int, got 1.0 (float)"),
        ({"size": None}, f"{KEY}.size: must be int, got None (NoneType)"),
        ({"size": 1, "rate": "x"}, f"{KEY}.rate: must be float, got 'x' (str)"),
        ({"size": 1, "fast": 1}, f"{KEY}.fast: must be bool, got 1 (int)"),
        ({"size": 1, "names": "ab"}, f"{KEY}.names: must be tuple[str, ...], got 'ab' (str)"),
        ({"size": 1, "names": ["a", 2]}, f"{KEY}.names[1]: must be str, got 2 (int)"),
        ({"size": 1, "pair": [1]}, f"{KEY}.pair: must be tuple[int, str], got [1] (list)"),
        ({"size": 1, "note": 5}, f"{KEY}.note: must be str | None, got 5 (int)"),
        ({"size": 1, "mode": "keep"}, f"{KEY}.mode: must be Literal['wait', 'abort'], got 'keep' (str)"),
        ({"size": 1, "inner": {"size": "x"}}, f"{KEY}.inner.size: must be int, got 'x' (str)"),
        ({"size": 1, "inner": 3}, f"{KEY}.inner: must be a mapping for Inner, got 3"),
        ({"size": 1, "weights": {"a": "b"}}, f"{KEY}.weights.a: must be float, got 'b' (str)"),
        ({"size": -1}, f"{KEY}: size must be ≥ 0, got -1"),
    ],
)
def test_wrong_option_is_named_with_its_full_key(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(Options, options, key=KEY)
    assert str(caught.value).startswith(message), str(caught.value)


def test_all_problems_are_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(Options, {"rate": "x", "wrong": 1}, key=KEY)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        f"{KEY}.wrong",
        f"{KEY}.size",
        f"{KEY}.rate",
    ]


def test_constructor_gets_arguments_and_options() -> None:
    import samples

    built = build_plugin(samples.WithOptions, {"weight": 2.0}, key="reward.options")
    assert (built.weight, built.power) == (2.0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "reward.options.weight: missing, and WithOptions requires it"),
        ({"weight": 1.0, "powr": 2}, "reward.options.powr: unknown option; nearest: 'power'; WithOptions takes weight"),
    ],
)
def test_wrong_constructor_option_is_named(options: dict[str, object], message: str) -> None:
    import samples

    with pytest.raises(ConfigError) as caught:
        build_plugin(samples.WithOptions, options, key="reward.options")
    assert str(caught.value).startswith(message)


def test_option_cannot_replace_what_the_contract_passes() -> None:
    import samples

    with pytest.raises(ConfigError, match=r"agent\.options\.client: unknown option"):
        build_plugin(samples.Loop, {"client": 1}, key="agent.options", arguments={"client": None})


@pytest.mark.parametrize("unset", [None, "", {}])
def test_unset_names_are_none(unset: object) -> None:
    assert resolve_optional(unset) is None


def test_name_is_kept_and_anything_else_refused() -> None:
    assert resolve_optional("a.b:C") == "a.b:C"
    for wrong in (3, ["a"], {"class": "a"}, False):
        with pytest.raises(ConfigError, match=r"trainer\.runtime: must be a name or a class path"):
            resolve_optional(wrong, key="trainer.runtime")


@pytest.mark.parametrize(
    ("config", "message"), [("Thawed", "a dataclass that is not frozen"), ("Right", "a frozen dataclass")]
)
def test_config_class_must_be_a_frozen_dataclass(config: str, message: str) -> None:
    import samples

    manager = type("Manager", (), {"Config": getattr(samples, config)})
    with pytest.raises(ConfigError, match=rf"(?s)\n  - Config: .*{message}"):
        check_plugin(families.CHECKPOINT_MANAGER, manager, key="k")


def test_options_are_checked_without_a_call_when_no_argument_is_at_hand() -> None:
    import samples

    check_options(samples.Loop, {}, key="agent.options", arguments=("client",))
    with pytest.raises(ConfigError, match=r"agent\.options\.client: missing"):
        check_options(samples.Loop, {}, key="agent.options")
    with pytest.raises(ConfigError, match=r"agent\.options\.clinet: unknown option"):
        check_options(samples.Loop, {"clinet": 1}, key="agent.options", arguments=("client",))
