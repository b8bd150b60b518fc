"""Launch scripts as a shell would read them: functions, loops, redirections, here-documents, quotes; and limits."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from verl_contracts.errors import ConfigError
from verl_trainers.convert.inputs import Source, read_input
from verl_trainers.convert.shell import read_commands

if TYPE_CHECKING:
    from pathlib import Path

LAUNCH = "python3 -m verl.trainer.main_ppo"


def read_script(folder: Path, text: str, *arguments: str) -> Source:
    script = folder / "run.sh"
    script.write_text(text.replace("LAUNCH", LAUNCH), encoding="utf-8")
    return read_input([str(script), *arguments])


def values(source: Source) -> dict[str, object]:
    return {entry.key: entry.value for entry in source.entries if not entry.problem}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("X=''; Y=5; LAUNCH a.b=${X:-$Y} c.d=${Y:+$Y}", {"a.b": 5, "c.d": 5}),
        ("X=''; LAUNCH a.b=1${X:+2} c.d=1${Z:+2} e.f=1${X+2}", {"a.b": 1, "c.d": 1, "e.f": 12}),
        ("Y=5; LAUNCH a.b=${X:-${Z:-$Y}}", {"a.b": 5}),
        (": ${N:=8}\nLAUNCH a.b=$N", {"a.b": 8}),
        ("A=(a.b=1 'c.d=x y'); LAUNCH ${A[@]+\"${A[@]}\"}", {"a.b": 1, "c.d": "x y"}),
        ('run() { LAUNCH a.b=1 "$@"; }\nrun c.d=3', {"a.b": 1, "c.d": 3}),
        ('function run {\n  local n=$1; shift\n  LAUNCH a.b=$n "$@"\n}\nrun x c.d=3 | tee log', {"a.b": "x", "c.d": 3}),
        ('n=1\nrun() {\n  LAUNCH a.b=$n "$@"\n}\nn=2\nif true; then run c.d=3; fi', {"a.b": 2, "c.d": 3}),
        ('inner() { LAUNCH "$@"; }\nouter() { inner a.b=$1; }\nouter 4', {"a.b": 4}),
        ("train() { LAUNCH a.b=1; }\ncase $1 in\n  train) train ;;\n  eval|*) echo no;;\nesac", {"a.b": 1}),
        ("if true; then n=2; fi; LAUNCH a.b=$n", {"a.b": 2}),
        ("LAUNCH a.b=3 2>&1 c.d=16", {"a.b": 3, "c.d": 16}),
        ("LAUNCH a.b=3 &> log c.d=16 >& log e.f=1 >>log g.h=2", {"a.b": 3, "c.d": 16, "e.f": 1, "g.h": 2}),
        ("LAUNCH a.b=3>log c.d=4 > >(tee log) e.f=5 &", {"a.b": 3, "c.d": 4, "e.f": 5}),
        ("LAUNCH a.b=3 <<EOF c.d=16\na.b=4\nEOF\n", {"a.b": 3, "c.d": 16}),
        ("cat<<EOF\nLAUNCH a.b=1\nEOF\nLAUNCH a.b=2", {"a.b": 2}),
        ("cat <<\\EOF >x; cat <<-'END'\nLAUNCH a.b=1\nEOF\nit's\n\tEND\nLAUNCH a.b=2", {"a.b": 2}),
        ("cat <<<\"it's\" ; LAUNCH a.b=2", {"a.b": 2}),
        ("LAUNCH c.d=$'it\\'s' e.f=$'\\x41\\u00e9'", {"c.d": "it's", "e.f": "Aé"}),
        ("LAUNCH a.b=\"$'z\"", {"a.b": "$'z"}),
        ('LAUNCH a.b=$"x"', {"a.b": "x"}),
        ("((n = 1 << 2)); LAUNCH a.b=1", {"a.b": 1}),
        ("d=$(echo \"a)\" ')' \"$(date \"+%s\")\"); LAUNCH a.b=1", {"a.b": 1}),
        ("d=$(cat <<<\"x\"); LAUNCH a.b=1", {"a.b": 1}),
        ("d=$(cat <<'EOF'\nit's :)\nEOF\n) ; e=$(a # don't\n); n=$((1 << 2)); LAUNCH a.b=1", {"a.b": 1}),
        ("echo starting verl.trainer.main_ppo\nLAUNCH a.b=1", {"a.b": 1}),
        (f"echo {LAUNCH} a.b=1\npkill -f verl.trainer.main_ppo\nLAUNCH a.b=2", {"a.b": 2}),
    ],
)  # fmt: skip
def test_values_when_a_script_is_read(tmp_path: Path, text: str, expected: dict[str, object]) -> None:
    source = read_script(tmp_path, text)
    assert values(source) == expected
    assert [note for note in source.notes if "branch" not in note] == []


@pytest.mark.parametrize(
    ("word", "expected"),
    [(r"$'a\nb'", "a\nb"), (r"$'\101\t\\'x", "A\t\\x"), (r"$'\q\ud800\0'", r"\q\ud800\0"), (r"\$'a\nb'", r"$a\nb")],
)
def test_word_when_its_quotes_are_ansi_c(word: str, expected: str) -> None:
    (command,), _ = read_commands(f"echo {word}", [])
    assert command.words[1] == (expected, 1)


def test_note_when_a_loop_gives_the_value(tmp_path: Path) -> None:
    source = read_script(tmp_path, "for i in 1 2; do sleep 1; done\nfor lr in 1e-6 1e-5; do LAUNCH a.b=$lr; done\n")
    assert values(source) == {"a.b": 1e-6}
    assert source.notes == ("line 2: lr is the variable of a loop over 2 values; '1e-6' was taken",)


@pytest.mark.parametrize("loop", ["for n in $(seq 3)", "while read n", "for n"])
def test_problem_when_only_a_shell_could_tell_what_a_loop_gives(tmp_path: Path, loop: str) -> None:
    (entry,) = read_script(tmp_path, f"{loop}; do LAUNCH a.b=$n; done").entries
    assert "only a shell" in entry.problem


def test_place_when_a_call_gives_the_key(tmp_path: Path) -> None:
    source = read_script(tmp_path, 'run() {\n  LAUNCH a.b=1 "$@"\n}\n\nrun c.d=3\n')
    assert [entry.place for entry in source.entries] == ["run.sh:2", "run.sh:5"]


def test_note_when_nothing_calls_the_function_that_launches(tmp_path: Path) -> None:
    source = read_script(tmp_path, 'run() {\n  LAUNCH a.b=1 "$@"\n}\n')
    assert values(source) == {"a.b": 1}
    assert [note for note in source.notes if "nothing calls" in note]
    assert [note for note in source.notes if "$@" in note]


def test_call_when_the_script_runs_what_it_is_given(tmp_path: Path) -> None:
    text = 'ppo() { LAUNCH a.b=1 "$@"; }\ngrpo() { LAUNCH a.b=2 "$@"; }\n"$@"\n'
    assert values(read_script(tmp_path, text, "grpo", "c.d=3")) == {"a.b": 2, "c.d": 3}


def test_note_when_a_function_calls_itself(tmp_path: Path) -> None:
    source = read_script(tmp_path, "run() { LAUNCH a.b=1; run; }\nrun\n")
    assert values(source) == {"a.b": 1}
    assert [note for note in source.notes if "calls itself" in note]


def test_note_when_a_word_is_no_override(tmp_path: Path) -> None:
    source = read_script(tmp_path, "LAUNCH a.b=1 --multirun\n")
    assert source.notes == ("run.sh:1: --multirun is no key=value, and was not read",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nx='1\nLAUNCH a.b=1\n", "line 2: the quote ' is never closed"),
        ('\n\nLAUNCH a.b="1\n\n', 'line 3: the quote " is never closed'),
        ("x=`date\nLAUNCH a.b=1", "line 1: the quote ` is never closed"),
        ("x=$'1\nLAUNCH a.b=1", "line 1: the quote $' is never closed"),
        ("x=$(date\nLAUNCH a.b=1", "line 1: '(' is never closed"),
        ("\nx=(1\nLAUNCH a.b=1", "line 2: the array is never closed"),
        ("\nrun() {\nLAUNCH a.b=1", "line 2: the function run is never closed"),
        ("\ncat <<EOF\nLAUNCH a.b=1\n", "line 2: the here-document is never closed by EOF"),
        ("\nx=$(cat\ncat <<EOF\n)\nLAUNCH a.b=1", "line 3: the here-document is never closed by EOF"),
        ("cat <<EOF", "line 1: the here-document is never closed by EOF"),
        ("run() { LAUNCH a.b=1; }\nrun\nrun", "launches 2 trainers"),
    ],
)
def test_refusal_when_something_is_never_closed(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_script(tmp_path, text)
    assert message in str(caught.value)


def _seconds(script: str) -> float:
    begun = time.process_time()
    read_commands(script, [])
    return time.process_time() - begun


def test_time_when_a_line_holds_2000_overrides() -> None:
    script = f"{LAUNCH} {' '.join(f'a.b{index}={index}' for index in range(2000))}"
    assert _seconds(script) < 2
    assert len(read_commands(script, [])[0][0].words) == 2003


@pytest.mark.parametrize("script", ["echo " + "a=b " * 500_000, "echo $(date)\n" * 100_000], ids=["line", "lines"])
def test_time_when_a_script_is_two_megabytes(script: str) -> None:
    assert _seconds(script) < 5


@pytest.mark.parametrize(
    "piece",
    ["a=b ", "x", "'a' ", '"a b" ', "\\a", "$(a) ", "$(#", "$(a <<b\nb\n) ", "$((1 << a)) ",
     "echo $(date)\n", "`a` ", ";", ";; ", "(", "((", "((a", "# a\n",
     "a() { b; }\n", "f() { ", "{ ", "case a in ", "for a in b; do ", "a+=b ", "a+=(b)\n", "<<<a ", ">a ", "2>&1 ",
     "\\\n", "\n", " ", "&", "${a:-b} ", "${a:-\"b\"} ", "$((1 + 1)) ", "$'a' ", "a|", "${", "$(", "'", '"', "$'", "`",
     "<<", "<<a\n", "a() { a; }; a; ", "shift\n", "case a in b) c;; esac\n", "a[", "1", "$", "export a=b\n"],
)  # fmt: skip
def test_time_when_a_script_is_one_piece_over_and_over(piece: str) -> None:
    begun = time.process_time()
    with suppress(ValueError):  # what is never closed
        read_commands(piece * (200_000 // len(piece)), ["one"])
    assert time.process_time() - begun < 2


@pytest.mark.parametrize(
    "script",
    [
        "a=xxxxxxxxxx\n" + "a=$a$a\n" * 60,
        "a=(x x)\n" + 'a=("${a[@]}" "${a[@]}")\n' * 60,
        "f0() { echo; }\n" + "".join(f"f{n}() {{ f{n - 1}; f{n - 1}; }}\n" for n in range(1, 19)) + "f18\n" * 100,
    ],
)
def test_refusal_when_a_script_grows_without_end(script: str) -> None:
    begun = time.process_time()
    with pytest.raises(ValueError, match="repeat more than"):
        read_commands(script, [])
    assert time.process_time() - begun < 10
