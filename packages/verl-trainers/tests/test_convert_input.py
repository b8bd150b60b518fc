"""Reading launch scripts, launch lines and Hydra files."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_contracts.errors import ConfigError
from verl_trainers.convert.inputs import Source, read_input
from verl_trainers.convert.shell import read_commands

if TYPE_CHECKING:
    from pathlib import Path

LAUNCH = "python3 -m verl.trainer.main_ppo"


def read_script(folder: Path, text: str, *arguments: str) -> Source:
    script = folder / "run.sh"
    script.write_text(text, encoding="utf-8")
    return read_input([str(script), *arguments])


def values(source: Source) -> dict[str, object]:
    return {entry.key: entry.value for entry in source.entries if not entry.problem}


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("n=4\n{launch} a.b=$n", 4),
        ("n=4\n{launch} a.b=${{n}}", 4),
        ("n=4; m=$((n * 2 + 1))\n{launch} a.b=$m", 9),
        ("n=$((1024 * 2))\n{launch} a.b=$(((n + 512) / 3))", 853),
        ("n=$((2 ** 5 - -1))\n{launch} a.b=$n", 33),
        ("{launch} a.b=${{N:-7}}", 7),
        ("N=\n{launch} a.b=${{N:-7}}", 7),
        ("N=1\n{launch} a.b=${{N:-7}}", 1),
        ("n=1\nn=2\n{launch} a.b=$n", 2),
        ("dir=x\nfiles=\"['$dir/1', '$dir/2']\"\n{launch} a.b=\"$files\"", ["x/1", "x/2"]),
        ('{launch} a.b=\'["console","wandb"]\'', ["console", "wandb"]),
        ("{launch} a.b='two words'", "two words"),
        ("name='two words'\n{launch} a.b=\"$name\"", "two words"),
        ("{launch} \\\n  x=1 \\\n  a.b=1e-6", 1e-6),
        ("{launch} a.b=null", None),
        ("{launch} +a.b=True", True),
        ("{launch} ++a.b=off", False),
        ("{launch} a.b=$HOME/data", "${{oc.env:HOME}}/data"),
        ("export CUDA=1 N=3\n{launch} a.b=$N", 3),
        ("N=1 M=2 {launch} a.b=$M", 2),
        ("# n=5\nn=6 # n=7\n{launch} a.b=$n", 6),
        ("cat <<EOF\n{launch} a.b=1\nEOF\n{launch} a.b=2", 2),
        ("ray job submit --address=x -- {launch} a.b=3 | tee log", 3),
        ("{launch} a.b=1 2>&1 > log.txt", 1),
        ("{launch} a.b=$1", "given"),
        ("{launch} a.b=${{2:-none}}", "none"),
        ('A=(x=1 "a.b=two words")\n{launch} "${{A[@]}}"', "two words"),
        ("A=(x=1)\nA+=(a.b=5)\n{launch} ${{A[@]}}", 5),
        ('E="x=1 a.b=6"\n{launch} $E', 6),
    ],
)
def test_value_when_a_script_is_read(tmp_path: Path, script: str, expected: object) -> None:
    source = read_script(tmp_path, script.format(launch=LAUNCH), "given")
    wanted = expected.replace("{{", "{").replace("}}", "}") if isinstance(expected, str) else expected
    assert values(source)["a.b"] == wanted
    assert source.launched == "verl.trainer.main_ppo"


def test_place_when_an_array_holds_the_key(tmp_path: Path) -> None:
    source = read_script(tmp_path, f'A=(\n  a.b=1\n  # no\n  c.d=2\n)\n\n{LAUNCH} "${{A[@]}}" \\\n  e.f=3\n')
    assert [entry.place for entry in source.entries] == ["run.sh:2", "run.sh:4", "run.sh:8"]


def test_value_when_only_a_shell_could_tell(tmp_path: Path) -> None:
    (entry,) = read_script(tmp_path, f"d=$(date +%s)\n{LAUNCH} trainer.seed=$d").entries
    assert "$(date +%s)" in entry.problem
    assert "\0" not in f"{entry.value}{entry.problem}"


def test_note_when_a_variable_is_set_in_a_branch(tmp_path: Path) -> None:
    text = f'n=1\nif [ "$X" = 1 ]; then\n  n=2\nfi\nm=3\n{LAUNCH} a.b=$n a.c=$m'
    source = read_script(tmp_path, text)
    assert values(source) == {"a.b": 2, "a.c": 3}
    assert [note.partition(":")[0] for note in source.notes] == ["line 3"]


def test_arguments_when_a_script_passes_them_on(tmp_path: Path) -> None:
    source = read_script(tmp_path, f'{LAUNCH} a.b=1 "$@"', "c.d=2", "e.f=two words")
    assert values(source) == {"a.b": 1, "c.d": 2, "e.f": "two words"}


def test_keys_when_a_launch_line_is_given() -> None:
    source = read_input(["python3", "-m", "recipe.dapo.main_dapo", "a.b={c: 1,d:[x,y]}", "~e.f"])
    assert source.launched == "recipe.dapo.main_dapo"
    assert values(source) == {"a.b.c": 1, "a.b.d": ["x", "y"]}
    assert source.entries[-1].problem


def test_keys_when_only_overrides_are_given() -> None:
    assert values(read_input(["a.b=1", "c.d=[1,2]"])) == {"a.b": 1, "c.d": [1, 2]}


def test_order_when_a_file_has_overrides(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("trainer:\n  seed: 1\n  device: cuda\n", encoding="utf-8")
    source = read_input([str(file), "trainer.seed=2"])
    assert [(entry.key, entry.place) for entry in source.entries] == [
        ("trainer.seed", "own.yaml:2"),
        ("trainer.device", "own.yaml:3"),
        ("trainer.seed", "argument"),
    ]
    assert values(source)["trainer.seed"] == 2


def test_keys_when_defaults_name_a_file_beside(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("data: {seed: 3}\n", encoding="utf-8")
    file = tmp_path / "own.yaml"
    file.write_text(
        "defaults:\n  - ppo_trainer\n  - base\n  - _self_\n  - nowhere\ndata: {shuffle: false}\n", encoding="utf-8"
    )
    source = read_input([str(file)])
    assert source.bases == ("ppo_trainer",)
    assert values(source) == {"data.seed": 3, "data.shuffle": False}
    assert "nowhere" in source.entries[1].problem
    assert len(source.notes) == 1


def test_keys_when_a_script_names_a_config_beside(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").write_text("data: {seed: 3, shuffle: true}\n", encoding="utf-8")
    source = read_script(tmp_path, f"{LAUNCH} --config-path=config --config-name mine data.seed=4")
    assert values(source) == {"data.seed": 4, "data.shuffle": True}


def test_problem_when_a_reference_leads_nowhere(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("data: {seed: '${no.where}', train_files: '${data.x}', x: a}\n", encoding="utf-8")
    seed, files, _ = read_input([str(file)]).entries
    assert "no.where" in seed.problem
    assert (files.problem, files.value) == ("", "a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo nothing", "launches no trainer"),
        ("python3 -m verl.trainer.sft_trainer a.b=1", "verl.trainer.sft_trainer is not one"),
        (f"{LAUNCH} a.b=1\n{LAUNCH} a.b=2", "launches 2 trainers (run.sh:1, run.sh:2)"),
        (f"{LAUNCH} a.b=$((1 + ", "never closed"),
    ],
)
def test_refusal_when_a_script_launches_no_single_trainer(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_script(tmp_path, text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("bad.yaml", "a: [", "not a YAML file"),
        ("list.yaml", "- a\n- b\n", "must hold sections"),
        ("gone.yaml", None, "cannot be read"),
        ("gone.sh", None, "no such file"),
        ("binary.sh", "\udcff", "cannot be read"),
    ],
)
def test_refusal_when_a_file_is_unreadable(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_bytes(text.encode("utf-8", errors="surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        read_input([str(file)])
    assert message in str(caught.value)


def test_refusal_when_nothing_is_given() -> None:
    with pytest.raises(ConfigError, match="nothing to convert"):
        read_input([])


PIECES = [
    "$",
    "${",
    "$((",
    "$(",
    "(",
    ")",
    "))",
    "{",
    "}",
    '"',
    "'",
    "\\",
    "`",
    "\n",
    " ",
    "a",
    "b=",
    "A=(",
    "[@]",
    ":-",
]
PIECES += [";", "&", "|", "#", "<<E", "E", "1", "if", "fi", "+=", "@", "*", f"{LAUNCH} x.y="]


@settings(max_examples=300, deadline=2000)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=25))
def test_reading_when_a_script_is_nonsense(pieces: list[str]) -> None:
    with suppress(ValueError):  # an unclosed bracket, which is said with its line
        read_commands("".join(pieces), ["one"])
