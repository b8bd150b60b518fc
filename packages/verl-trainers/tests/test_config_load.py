"""Reading a configuration: what nothing means, where mistakes are, and that what is written is read back."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Union, get_args, get_origin

import pytest
from config_cases import build_tree
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from verl_contracts.errors import ConfigError
from verl_trainers.config.build import NAME_KEYS, leaf_keys, section_keys
from verl_trainers.config.dump import dump_config
from verl_trainers.config.load import load_config
from verl_trainers.config.schema import RunConfig

LEAVES = leaf_keys()
DEFAULT = RunConfig()


def tree_of(key: str, value: object) -> dict[str, object]:
    head, _, rest = key.partition(".")
    return {head: tree_of(rest, value) if rest else value}


def optional(hint: object) -> bool:
    return get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)


def value_at(config: object, key: str) -> object:
    for part in key.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize("nothing", [None, {}])
@pytest.mark.parametrize("key", section_keys())
def test_a_section_is_its_default_when_null_or_empty(key: str, nothing: object) -> None:
    assert build_tree(tree_of(key, nothing)) == (DEFAULT, [])


@pytest.mark.parametrize("value", ["", [], 0, False, "x"])
@pytest.mark.parametrize("key", section_keys())
def test_a_section_is_refused_by_name_when_it_is_a_value(key: str, value: object) -> None:
    config, mistakes = build_tree(tree_of(key, value))
    assert config == DEFAULT
    assert mistakes == [f"{key}: must be a section (key: value lines), got {value!r}"]


@pytest.mark.parametrize("key", sorted(LEAVES))
def test_a_leaf_is_null_only_where_the_schema_says_so(key: str) -> None:
    config, mistakes = build_tree(tree_of(key, None))
    hint = LEAVES[key]
    if optional(hint):
        assert mistakes == []
        assert value_at(config, key) is None
    elif get_origin(hint) is Mapping:
        assert (config, mistakes) == (DEFAULT, [])
    else:
        assert len(mistakes) == 1
        assert mistakes[0].startswith(f"{key}: null is not a value here")


@pytest.mark.parametrize("nothing", ["", {}])
@pytest.mark.parametrize("key", sorted(LEAVES))
def test_empty_text_is_unset_for_names_only(key: str, nothing: object) -> None:
    config, mistakes = build_tree(tree_of(key, nothing))
    assert config == DEFAULT
    if key in NAME_KEYS or (nothing == {} and get_origin(LEAVES[key]) is Mapping):
        assert mistakes == []
    else:
        assert len(mistakes) == 1
        assert mistakes[0].startswith(f"{key}: ")


@pytest.mark.parametrize("key", sorted(LEAVES))
def test_a_leaf_never_ends_in_anything_but_a_value_or_a_mistake(key: str) -> None:
    for value in ({}, [], 0, 1.5, True, "text", {"a": 1}, [1], float("nan")):
        config, mistakes = build_tree(tree_of(key, value))
        if config == DEFAULT and value != value_at(DEFAULT, key) and not optional(LEAVES[key]):
            assert mistakes or value in ({}, [])
        assert all(mistake.startswith(f"{key}: ") for mistake in mistakes)


def test_every_name_key_is_in_the_schema() -> None:
    assert set(LEAVES) >= NAME_KEYS


def test_agent_null_is_the_default() -> None:
    assert load_config(None, ["actor_rollout_ref.rollout.agent=null"]) == DEFAULT


def test_mistakes_carry_file_and_line_and_the_nearest_key(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "data:\n  train_files: [a.jsonl]\n  trian_batch_size: 4\nactor_rollout_ref:\n  actor:\n    grad_clip: high\n"
        "n: 8\n"
    )
    with pytest.raises(ConfigError) as error:
        load_config(file, ["reward.nmae=copy", "data.seed=null"])
    assert sorted(str(error.value).splitlines()) == [
        "override 'data.seed=null': data.seed: null is not a value here; leave the key out for its default",
        "override 'reward.nmae=copy': reward.nmae: unknown key; did you mean reward.name?",
        "run.yaml:3: data.trian_batch_size: unknown key; did you mean data.train_batch_size?",
        "run.yaml:6: actor_rollout_ref.actor.grad_clip: must be a number, got 'high'",
        "run.yaml:7: n: unknown key; did you mean actor_rollout_ref.rollout.n?",
    ]


def test_interpolations_are_resolved_and_all_broken_ones_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_TEST_MODEL", "elsewhere")
    file = tmp_path / "run.yaml"
    file.write_text("data: {train_files: ['${run_dir}/a.jsonl'], max_prompt_length: '${data.max_response_length}'}\n")
    config = load_config(
        file,
        ["data.max_response_length=7", "actor_rollout_ref.model.path=${oc.env:VERL_TEST_MODEL,models/x}"],
        run_dir="/runs/1",
    )
    assert config.data.train_files == ("/runs/1/a.jsonl",)
    assert config.data.max_prompt_length == 7
    assert config.actor_rollout_ref.model.path == "elsewhere"
    with pytest.raises(ConfigError) as error:
        load_config(file, ["data.max_response_length=${nope}", "reward.name=${no.thing}", "data.seed=???"])
    text = str(error.value)
    assert all(key in text for key in ("data.max_response_length", "reward.name", "data.seed"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: [\n", "not YAML"),
        ("- a\n- b\n", "must hold sections"),
        ("just text", "must hold sections"),
        ("data:\n  seed: 1\n  seed: 2\n", "duplicate"),
        ("run_dir: x\n", "--out"),
        ("data:\n  seed: 1\n  null: 2\n", r"run\.yaml:3: null is no key"),
        ("data:\n  {? : 2}\n", r"run\.yaml:2: nothing is no key"),
        ("data: 1\ntrainer: &t {mode: *t}\n", r"run\.yaml:2: \*t is a part of the value that it stands for"),
        ("data:\n" + "  x: &t\n    - *t\n", r"run\.yaml:3: \*t is a part"),
        ("data:\n  x: " + "[" * 99 + "]" * 99, r"run\.yaml:2: is nested deeper than 64 levels"),
        ("data:\n  x: " + "[" * 9999 + "]" * 9999, r"run\.yaml:2: is nested deeper than 64 levels"),
    ],
)
def test_a_file_is_refused_when_it_is_not_a_configuration(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(file)


def test_an_anchor_that_is_used_again_is_read(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data: {train_files: &f [a.jsonl], val_files: *f}\nruntime_options: {x: &x 1, y: *x}\n")
    config = load_config(file)
    assert config.data.val_files == ("a.jsonl",)
    assert config.runtime_options == {"x": 1, "y": 1}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer=[]", "trainer: must be a section (key: value lines), got []"),
        ("trainer.logger={a: 1}", "trainer.logger: must be a list, got {'a': 1}"),
        ("trainer.logger.x=1", "trainer.logger.x names a key in a list, which has none; give the whole list"),
        ("trainer.logger=[1", "not YAML: "),
        ("trainer.logger=" + "[" * 500 + "]" * 500, "is nested too deeply"),
    ],
)
def test_a_list_and_a_section_are_not_mixed(tmp_path: Path, override: str, words: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {mode: sync, logger: [jsonl]}\n")
    with pytest.raises(ConfigError) as error:
        load_config(file, [override])
    assert str(error.value).startswith(f"override {override!r}: {words}")


@pytest.mark.parametrize("override", ["data.seed", "=3", "", "data.seed=[1"])
def test_an_override_is_refused_when_it_is_not_key_value(override: str) -> None:
    with pytest.raises(ConfigError, match="override"):
        load_config(None, [override])


@pytest.mark.parametrize("override", ["run_dir=x", "run_dir.a=x"])
def test_the_run_folder_is_not_set_by_an_override(override: str) -> None:
    with pytest.raises(ConfigError, match=r"run_dir: is set by the command; write --out DIR"):
        load_config(None, [override])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml.*cannot be read"):
        load_config(tmp_path / "nowhere.yaml")


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("# nothing\n")
    assert load_config(tmp_path / "run.yaml") == DEFAULT


def test_lists_and_options_are_read_as_they_should(tmp_path: Path) -> None:
    config = load_config(
        None,
        [
            "data.train_files=one.jsonl",
            "actor_rollout_ref.actor.optim.betas=[0, 0.5]",
            "trainer.logger=[]",
            "runtime_options={num_cpus: 2, nested: {a: [1, x]}}",
            "data.system_prompt=yes sir",
        ],
    )
    assert config.data.train_files == ("one.jsonl",)
    assert config.actor_rollout_ref.actor.optim.betas == (0.0, 0.5)
    assert config.trainer.logger == ()
    assert config.runtime_options == {"num_cpus": 2, "nested": {"a": [1, "x"]}}
    assert config.data.system_prompt == "yes sir"


texts = st.text(st.characters(codec="utf-8", min_codepoint=32, exclude_categories=["C"]), min_size=1)


@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    texts,
    st.floats(1e-12, 1e6),
    st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.none() | st.booleans() | st.integers() | texts),
)
def test_what_is_dumped_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, text: str, number: float, options: dict[str, object]
) -> None:
    optim = dataclasses.replace(DEFAULT.actor_rollout_ref.actor.optim, lr=number)
    actor = dataclasses.replace(DEFAULT.actor_rollout_ref.actor, optim=optim)
    config = dataclasses.replace(
        DEFAULT,
        data=dataclasses.replace(DEFAULT.data, system_prompt=text, train_files=(text, "${not} a reference")),
        actor_rollout_ref=dataclasses.replace(DEFAULT.actor_rollout_ref, actor=actor),
        runtime_options=options,
    )
    file = tmp_path_factory.mktemp("dump") / "config.yaml"
    file.write_text(dump_config(config, derived={"steps": 4}), encoding="utf-8")
    assert load_config(file) == config
