"""Data: rows of both kinds of file, tokenization, order, the cursor, and what is refused with file and line."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from verl_contracts.errors import DataError
from verl_contracts.samples import Message, Prompt
from verl_trainers.config.schema import DataConfig
from verl_trainers.data.rows import read_rows
from verl_trainers.data.source import PromptSource
from verl_trainers.data.tokenizer import PromptTokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WORDS = ("<eos>", "<user>", "<system>", "<assistant>", "a", "b", "c", "d")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
    "{% if loud %}d {% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tokenizer(folder: Path, *, template: str | None = TEMPLATE, eos: str | None = "<eos>") -> Path:
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="d"))
    core.pre_tokenizer = WhitespaceSplit()
    wrap: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    tokenizer = wrap(tokenizer_object=core, eos_token=eos, pad_token=eos)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    return PromptTokenizer(str(write_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


def write_jsonl(file: Path, rows: Sequence[object]) -> str:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(file)


def open_source(
    data: DataConfig, file: str, tokenizer: PromptTokenizer, *, epochs: int | None = 1, shuffle: bool | None = None
) -> PromptSource:
    return PromptSource.open(data, files=[file], tokenizer=tokenizer, epochs=epochs, shuffle=shuffle)


def drain(source: PromptSource) -> list[Prompt]:
    return list(iter(source.next, None))


def test_text_and_chats_become_ids(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    chat = [{"role": "user", "content": "a b"}]
    row = {"data_source": "math", "reward_model": {"ground_truth": {"n": [1, 2]}}, "extra_info": {"index": 3}}
    file = write_jsonl(tmp_path / "x.jsonl", [{"prompt": "a c"}, "", {"prompt": chat, **row}])
    text, messages = drain(open_source(DataConfig(), file, tokenizer, shuffle=False))
    assert text.prompt_ids == (4, 6)
    assert text.messages == ()
    assert messages.prompt_ids == (1, 4, 5, 3)
    assert messages.messages == (Message(role="user", content="a b"),)
    assert (messages.data_source, messages.ground_truth) == ("math", {"n": [1, 2]})
    assert messages.extra_info == {"index": 3}
    assert (messages.epoch, messages.row) == (0, 1)


def test_parquet_reads_the_same_as_jsonl(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": text}],
            "data_source": "s",
            "reward_model": {"ground_truth": text, "style": "rule"},
            "extra_info": {"index": i},
        }
        for i, text in enumerate("abc")
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    write_jsonl(tmp_path / "x.jsonl", rows)
    read = [
        [
            (row.prompt, row.data_source, row.ground_truth, row.extra_info)
            for row in read_rows([str(file)], prompt_key="prompt")
        ]
        for file in (tmp_path / "x.parquet", tmp_path / "x.jsonl")
    ]
    assert read[0] == read[1]
    assert len(read[0]) == 3


def test_system_prompt_and_template_options_are_used(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    own = [{"role": "system", "content": "c"}, {"role": "user", "content": "a"}]
    file = write_jsonl(tmp_path / "x.jsonl", [{"q": [{"role": "user", "content": "a"}]}, {"q": own}])
    data = DataConfig(prompt_key="q", system_prompt="b", chat_template_kwargs={"loud": True})
    first, second = drain(open_source(data, file, tokenizer, shuffle=False))
    assert first.prompt_ids == (2, 5, 1, 4, 7, 3)
    assert second.prompt_ids == (2, 6, 1, 4, 7, 3)


def test_no_chat_template_is_an_error_that_says_how_to_give_one(tmp_path: Path) -> None:
    bare = PromptTokenizer(str(write_tokenizer(tmp_path / "bare", template=None)))
    file = write_jsonl(tmp_path / "x.jsonl", [{"prompt": [{"role": "user", "content": "a"}]}])
    with pytest.raises(DataError, match=r"no chat template: put a chat_template\.jinja"):
        open_source(DataConfig(), file, bare)


def test_stop_ids_are_those_of_tokenizer_and_model(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "t")
    assert PromptTokenizer(str(folder)).stop_token_ids == (0,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    assert PromptTokenizer(str(folder)).stop_token_ids == (0, 7)
    with pytest.raises(DataError, match="no end-of-sequence token"):
        _ = PromptTokenizer(str(write_tokenizer(tmp_path / "none", eos=None))).stop_token_ids
    with pytest.raises(DataError, match="no such folder"):
        PromptTokenizer(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no usable tokenizer in"):
        PromptTokenizer(str(tmp_path / "empty"))


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def test_rows_that_exhaust_the_stack_are_named(tmp_path: Path) -> None:
    file = tmp_path / "deep.jsonl"
    file.write_text('{"prompt": "a", "extra_info": {"x": ' + "[" * 100_000 + "]" * 100_000 + "}}\n")
    with pytest.raises(DataError, match=r"deep\.jsonl:1: is nested deeper than 64 levels"):
        read_rows([str(file)], prompt_key="prompt")


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pa.array([b"a", b"\xff\xfe", b"b"]).view(pa.string()), "column 'x' (string) cannot be read: 'utf-8'"),
        (pa.array([0, 2**62, 1], pa.timestamp("us")), "column 'x' (timestamp[us]) cannot be read: "),
        (pa.array([{"y": 0}, {"y": 2**62}, None], pa.struct([("y", pa.date64())])), "column 'x' (struct<y"),
    ],
)
def test_values_of_parquet_that_python_cannot_hold_are_named(tmp_path: Path, column: pa.Array, words: str) -> None:
    file = tmp_path / "x.parquet"
    parquet.write_table(pa.table({"prompt": ["a", "b", "c"], "x": column}), file)
    with pytest.raises(DataError) as error:
        read_rows([str(file)], prompt_key="prompt")
    assert "1 malformed rows of 3" in str(error.value)
    assert f"{file}:2: {words}" in str(error.value)


def test_numbers_that_json_has_not_are_named_in_parquet_too(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    rows = [{"prompt": "a", "reward_model": {"ground_truth": math.nan}}]
    parquet.write_table(pa.Table.from_pylist(rows), file)
    with pytest.raises(DataError, match=r"ground_truth is nan, which is no number in JSON"):
        read_rows([str(file)], prompt_key="prompt")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{broken", "Expecting property name"),
        ([1], "must be an object"),
        ({"question": "a"}, "no column 'prompt'; columns: question"),
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "text or a list of messages"),
        ({"prompt": 7}, "text or a list of messages"),
        ({"prompt": [{"role": "user"}]}, "message 0"),
        ({"prompt": [{"role": "user", "content": [{"image": "x"}]}]}, "message 0"),
        ({"prompt": "a", "reward_model": "rule"}, "'reward_model' must be an object"),
        ({"prompt": "a", "extra_info": [1]}, "'extra_info' must be an object"),
        ({"prompt": "a", "data_source": 1}, "'data_source' must be text"),
        ({"prompt": "a\ud800"}, r"the prompt holds a lone surrogate, '\ud800', at character 1"),
        ({"prompt": [{"role": "user", "content": "\udfff"}]}, "message 0 of the prompt holds a lone surrogate"),
        ({"prompt": "a", "extra_info": {"x": ["\ud800"]}}, "extra_info.x holds a lone surrogate"),
        ({"prompt": "a", "reward_model": {"ground_truth": float("nan")}}, "holds NaN, which is no number in JSON"),
        ({"prompt": "a", "extra_info": {"x": float("-inf")}}, "holds -Infinity"),
        ({"prompt": "a", "extra_info": {"x": nested(70)}}, "nested deeper than 64 levels"),
    ],
)
def test_a_malformed_row_is_named_with_its_line(tmp_path: Path, row: object, words: str) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", [{"prompt": "a"}, row])
    with pytest.raises(DataError) as error:
        read_rows([file], prompt_key="prompt")
    assert "data.train_files: 1 malformed rows of 2; correct or remove them" in str(error.value)
    assert f"{file}:2: " in str(error.value)
    assert words in str(error.value)


def test_only_the_first_malformed_rows_are_listed(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", ["{"] * 12)
    with pytest.raises(DataError) as error:
        read_rows([file], prompt_key="prompt")
    assert len(str(error.value).splitlines()) == 7
    assert "and 7 more" in str(error.value)


@pytest.mark.parametrize("name", ["nowhere.jsonl", "nowhere.parquet", "x.csv", "broken.parquet"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "broken.parquet").write_text("not parquet")
    with pytest.raises(DataError, match=name):
        read_rows([str(tmp_path / name)], prompt_key="prompt")


@pytest.mark.parametrize(("length", "usable"), [(2, True), (3, True), (4, False)])
def test_a_prompt_at_the_limit_is_kept_and_above_it_filtered_or_refused(
    tmp_path: Path, tokenizer: PromptTokenizer, length: int, usable: bool, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", [{"prompt": "a"}, {"prompt": " ".join("a" * length)}])
    if not usable:
        with pytest.raises(DataError, match=r"1 of 2 prompts are longer than data\.max_prompt_length=3") as error:
            open_source(DataConfig(max_prompt_length=3), file, tokenizer)
        assert f"{file}:2: 4 tokens" in str(error.value)
    with caplog.at_level(logging.WARNING):
        source = open_source(DataConfig(max_prompt_length=3, filter_overlong_prompts=True), file, tokenizer)
    assert len(source) == source.num_rows == 1 + usable
    assert ("1 of 2 prompts" in caplog.text) == (not usable)


def test_nothing_usable_is_an_error(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    with pytest.raises(DataError, match="no usable row"):
        open_source(DataConfig(), write_jsonl(tmp_path / "x.jsonl", []), tokenizer)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(epoch=0, row=i, prompt_ids=(i,)) for i in range(count)]


def rows_of(source: PromptSource, count: int) -> list[tuple[int, int]]:
    found = []
    for _ in range(count):
        prompt = source.next()
        assert prompt is not None
        found.append((prompt.epoch, prompt.row))
    return found


def test_each_epoch_is_another_order_of_all_rows() -> None:
    source = PromptSource(prompts(20), epochs=2, shuffle=True, seed=1)
    first, second = rows_of(source, 20), rows_of(source, 20)
    assert sorted(first) == [(0, i) for i in range(20)]
    assert sorted(second) == [(1, i) for i in range(20)]
    assert [row for _, row in first] != [row for _, row in second]
    assert source.next() is None
    assert source.next() is None
    assert rows_of(PromptSource(prompts(20), epochs=None, shuffle=True, seed=1), 40) == first + second
    assert rows_of(PromptSource(prompts(20), epochs=1, shuffle=True, seed=2), 20) != first


@pytest.mark.parametrize("at", [0, 1, 4, 5, 6, 9, 10])
def test_a_restored_cursor_goes_on_where_it_was(at: int) -> None:
    straight = PromptSource(prompts(5), epochs=3, shuffle=True, seed=0)
    expected = rows_of(straight, 15)
    saved = PromptSource(prompts(5), epochs=3, shuffle=True, seed=0)
    rows_of(saved, at)
    state: Mapping[str, object] = json.loads(json.dumps(dict(saved.state())))
    resumed = PromptSource(prompts(5), epochs=3, shuffle=True, seed=0)
    resumed.restore(json.loads(json.dumps(state)))
    assert rows_of(resumed, 15 - at) == expected[at:]
    assert resumed.next() is None


@pytest.mark.parametrize(
    "other",
    [
        PromptSource(prompts(6), epochs=1, shuffle=True, seed=0),
        PromptSource(prompts(5), epochs=1, shuffle=True, seed=1),
        PromptSource(prompts(5), epochs=1, shuffle=False, seed=0),
    ],
)
def test_a_cursor_of_other_data_is_refused(other: PromptSource) -> None:
    state = PromptSource(prompts(5), epochs=1, shuffle=True, seed=0).state()
    with pytest.raises(DataError, match="belongs to other data"):
        other.restore(state)


def test_a_broken_cursor_is_refused() -> None:
    source = PromptSource(prompts(5), epochs=1, shuffle=True, seed=0)
    with pytest.raises(DataError, match="not a cursor"):
        source.restore({**source.state(), "position": 9})
