"""The bench's harness: how sides take turns, what is kept, and when nothing is."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path

import bench_table
import pytest
from bench import __main__ as command
from bench.core import BenchError, Benchmark, Conditions, Row, Target
from bench.processes import answer_of, run_python
from bench.results import describe_machine, read_report, write_report
from bench.rows import BENCHMARKS
from bench.rows.orchestration import parts
from bench.turns import middle, ratios, take_turns
from bench.work import Speed, Work, check_same_work, read_speed

ROW = Row(name="a", figure=0.8, spread=(0.7, 0.9), count=5, leaves_out="x", baseline="b", target=Target(limit=0.75))


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """A benchmark whose figure is known, or that fails."""

    rows: tuple[Row, ...] = (ROW,)
    error: str = ""
    name: str = "a"
    target: Target = ROW.target or Target(limit=0.0)
    baseline: str | None = "b"

    def measure(self, conditions: Conditions, /) -> tuple[Row, ...]:
        assert list(conditions.folder.iterdir()) == []
        (conditions.folder / "scratch").touch()
        if self.error:
            raise BenchError(self.error)
        return self.rows


@dataclass(frozen=True, kw_only=True)
class Broken(Fixed):
    """A benchmark that fails in a way that nobody thought of."""

    name: str = "broken"

    def measure(self, conditions: Conditions, /) -> tuple[Row, ...]:
        raise KeyError("a metric that was renamed")


def use(monkeypatch: pytest.MonkeyPatch, *benchmarks: Benchmark) -> None:
    monkeypatch.setattr(command, "BENCHMARKS", benchmarks)


def work_of(steps: int = 3, warm_up: int = 1) -> Work:
    return Work(
        recipe="r",
        model="m",
        train_file="t",
        reward="a:B",
        groups=2,
        n=4,
        max_tokens=5,
        dtype="float32",
        learning_rate=1e-6,
        clip_high=0.28,
        entropy=0.0,
        scale_rewards="none",
        steps=steps,
        warm_up=warm_up,
    )


def speed_of(tokens: float) -> Speed:
    return Speed(samples_per_s=1.0, response_tokens=tokens, reward=0.0)


def test_sides_alternate() -> None:
    order: list[str] = []

    def side(name: str) -> int:
        order.append(name)
        return len(order)

    found = take_turns({"a": lambda: side("a"), "b": lambda: side("b")}, rounds=3)
    assert order == list("ababab")
    assert found == {"a": [1, 3, 5], "b": [2, 4, 6]}


def test_a_ratio_belongs_to_its_pair() -> None:
    assert ratios([2.0, 20.0], [1.0, 10.0]) == [2.0, 2.0]
    with pytest.raises(ValueError, match="zip"):
        ratios([1.0], [1.0, 2.0])


def test_the_middle_is_median_and_quartiles() -> None:
    assert middle([5.0, 1.0, 2.0, 4.0, 3.0]) == (3.0, (2.0, 4.0))
    assert middle([7.0]) == (7.0, (7.0, 7.0))


@pytest.mark.parametrize(
    ("target", "figure", "met"),
    [
        (Target(limit=0.8), 0.8, True),
        (Target(limit=0.8), 0.79, False),
        (Target(limit=60.0, at_least=False), 59.9, True),
        (Target(limit=60.0, at_least=False), 60.0, False),
    ],
)
def test_a_target_is_met_or_missed_and_survives_text(target: Target, figure: float, met: bool) -> None:
    assert target.met_by(figure) is met
    assert Target.parse(str(target)) == target


def test_every_claim_is_listed_once_with_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [benchmark.name for benchmark in BENCHMARKS]
    assert len(set(names)) == len(names) >= 11


def test_figures_survive_the_disk(tmp_path: Path) -> None:
    plain = Row(name="b", figure=61.25, spread=(60.0, 62.0), count=20, leaves_out="y", unit="ms", settings="s")
    path = tmp_path / "new" / "a.json"
    write_report(path, describe_machine(), (ROW, plain))
    report, rows = read_report(path)
    assert rows == (ROW, plain)
    assert {"machine", "versions", "date", "commit", "load"} <= set(report)
    first, second = json.loads(path.read_text())["rows"]
    assert first["ratio"] == 0.8
    assert second["value"] == 61.25
    assert [entry.name for entry in path.parent.iterdir()] == ["a.json"]


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"rows": [{"name": "a"}]}')
    with pytest.raises(ValueError, match=r"a\.json is not a file of the bench: KeyError"):
        read_report(tmp_path / "a.json")


def test_a_claim_is_kept_when_it_was_measured_completely(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, Fixed())
    assert command.main(["--out", str(tmp_path)]) == 0
    assert read_report(tmp_path / "a.json")[1] == (ROW,)


@pytest.mark.parametrize(
    ("benchmark", "arguments", "code"),
    [
        (Fixed(), ["--pairs", "4"], 0),
        (Fixed(error="no model"), [], 1),
        (Fixed(rows=()), [], 1),
        (Fixed(name="c"), [], 1),
    ],
)
def test_nothing_is_written_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, benchmark: Fixed, arguments: list[str], code: int
) -> None:
    use(monkeypatch, benchmark)
    assert command.main(["--out", str(tmp_path), *arguments]) == code
    assert list(tmp_path.iterdir()) == []


def test_other_claims_are_measured_when_one_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, Fixed(error="no model", name="z"), Broken(), Fixed())
    assert command.main(["--out", str(tmp_path)]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_wrong_arguments_are_refused() -> None:
    for arguments in (["--row", "nothing"], ["--pairs", "0"]):
        with pytest.raises(SystemExit):
            command.main(arguments)


def test_a_child_that_fails_shows_its_last_lines() -> None:
    with pytest.raises(BenchError, match=r"(?s)ended with 1:.*ValueError: why"):
        run_python(["-c", "raise ValueError('why')"], limit_s=30)


def test_a_child_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    code = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(mark)!r}).write_text(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    with pytest.raises(BenchError, match="did not end within 2 s"):
        run_python(["-c", code], limit_s=2)
    stat = Path("/proc", mark.read_text(), "stat")
    until = time.monotonic() + 10
    while stat.exists() and stat.read_text().split()[2] != "Z":
        assert time.monotonic() < until, "the grandchild lives on"


def test_an_answer_is_the_last_line_of_a_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "echo_side.py").write_text("import sys; print('noise'); print(sys.argv[1])")
    assert answer_of("echo_side", {"speed": 2}, limit_s=30) == {"speed": 2.0}
    (tmp_path / "silent_side.py").write_text("print('no numbers')")
    with pytest.raises(BenchError, match="silent_side should end with a line of JSON numbers"):
        answer_of("silent_side", {}, limit_s=30)


def metrics(path: Path, steps: int, *, seconds: float = 0.5) -> Path:
    rows = [
        {
            "step": step,
            "time": 100.0 + seconds * step,
            "samples_per_s": 1.0,
            "response_length/mean": 4.0,
            "reward": float(step),
            "actor/zero_advantage_rows": 2.0,
        }
        for step in range(1, steps + 1)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"step": 0, "val/score": 1.0}, *rows]))
    return path


def test_speed_is_taken_between_the_ends_of_steps(tmp_path: Path) -> None:
    speed = read_speed(metrics(tmp_path / "m.jsonl", 3), work_of())
    assert speed == Speed(samples_per_s=16 / 1.0, response_tokens=4.0, reward=2.5, untrained=0.25)


def test_a_run_that_lacks_steps_has_no_speed(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"should hold steps 1 to 3, and holds \[1, 2\]"):
        read_speed(metrics(tmp_path / "m.jsonl", 2), work_of())


def test_sides_that_made_other_lengths_are_not_compared() -> None:
    check_same_work([speed_of(4.0)], [speed_of(4.1)], tolerance=0.05)
    with pytest.raises(BenchError, match=r"4\.00 tokens here and 5\.00 there"):
        check_same_work([speed_of(4.0)], [speed_of(5.0)], tolerance=0.05)


def test_parts_of_a_step_add_up_to_it(tmp_path: Path) -> None:
    steps = range(10, 13)
    events = [
        event
        for step in steps
        for event in (
            {"name": "bench.busy", "fields": {"version": step, "busy_s": 0.02 * step}},
            {"name": "sync.phase", "fields": {"version": step, "phase": "pause", "seconds": 0.004}},
        )
    ]
    laps = {"seconds/wait": 0.05, "seconds/update": 0.03, "seconds/sync": 0.01}
    inner = {"seconds/update/fetch": 0.002, "seconds/update/prepare": 0.003, "seconds/update/forward_backward": 0.02}
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": s, **laps, **inner}) + "\n" for s in steps))
    table = parts(tmp_path)
    assert {len(values) for values in table.values()} == {2}  # step 10 warms up
    assert table["total"] == pytest.approx([1000 * (0.05 - 0.02 + 0.03 - 0.02 + 0.01)] * 2)
    named = [values for name, values in table.items() if name != "total" and not name.startswith("compute")]
    assert [sum(column) for column in zip(*named, strict=True)] == pytest.approx(table["total"])


def readme(path: Path, *, marks: int = 1) -> Path:
    path.write_text("before\n" + f"{bench_table.BEGIN}\nold\n{bench_table.END}\n" * marks + "after\n")
    return path


def test_the_table_follows_the_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_table, "BENCHMARKS", (Fixed(), Fixed(name="unmeasured")))
    page, results = readme(tmp_path / "README.md"), tmp_path / "results"
    arguments = ["--readme", str(page), "--results", str(results)]
    write_report(results / "a.json", describe_machine(), (ROW,))
    assert bench_table.main(arguments) == 1
    assert bench_table.main([*arguments, "--write"]) == 0
    assert bench_table.main(arguments) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| `a` | 0.80 × | 0.70 … 0.90 | ≥ 0.75 | met |" in text  # noqa: RUF001
    assert "| `unmeasured` | not measured yet | | ≥ 0.75 | |" in text
    slower = Row(name="a", figure=0.5, spread=(0.4, 0.6), count=5, leaves_out="x", baseline="b", target=ROW.target)
    write_report(results / "a.json", describe_machine(), (slower,))
    assert bench_table.main(arguments) == 1
    assert bench_table.main([*arguments, "--write"]) == 0
    assert "≥ 0.75 | **missed** |" in page.read_text()


def test_a_table_without_its_place_or_with_a_stray_result_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_table, "BENCHMARKS", (Fixed(),))
    results = tmp_path / "results"
    for marks, name in itertools.product((0, 2), ("a",)):
        page = readme(tmp_path / "README.md", marks=marks)
        assert bench_table.main(["--readme", str(page), "--results", str(results / name)]) == 1
        assert "once" in capsys.readouterr().err
    write_report(results / "gone.json", describe_machine(), (ROW,))
    page = readme(tmp_path / "README.md")
    assert bench_table.main(["--readme", str(page), "--results", str(results)]) == 1
    assert "no claim: gone" in capsys.readouterr().err


def test_the_readme_of_this_repository_is_in_step() -> None:
    assert bench_table.main([]) == 0
