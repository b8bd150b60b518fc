"""The model's tokenizer: text and chats to ids, and the ids that end an answer.

Owns which tokenizer a folder means, for prompts here and for the text that rewards read (`rewards.decode`):
``tokenizer.json`` as it is, where there is one. `AutoTokenizer` would rebuild some kinds from their vocabulary alone,
and then prompts and answers would differ in their spaces.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from verl_contracts.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from verl_contracts.samples import Message

__all__ = ["PromptTokenizer", "load_tokenizer", "read_json", "tokenizer_file"]

_KEY = "actor_rollout_ref.model.path"


def read_json(file: Path) -> dict[str, object]:
    """Return the object in a JSON file of a model folder. Raises `DataError` when it holds none."""
    try:
        found: object = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise DataError(f"{_KEY}: {file} cannot be read as JSON: {exc}; copy it again") from exc
    if not isinstance(found, dict):
        raise DataError(f"{_KEY}: {file} must hold an object, and holds {type(found).__name__}; copy it again")
    return found


def tokenizer_file(path: str, *, trust_remote_code: bool) -> Path | None:
    """Return the folder's ``tokenizer.json``; None when it has none, or code of its own that is trusted."""
    config = Path(path) / "tokenizer_config.json"
    if trust_remote_code and config.is_file() and "auto_map" in read_json(config):
        return None
    file = Path(path) / "tokenizer.json"
    return file if file.is_file() else None


def load_tokenizer(path: str, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder. Raises `DataError` when there is none that can be read."""
    import transformers  # here, because it pulls torch in

    plain = tokenizer_file(path, trust_remote_code=trust_remote_code) is not None
    load: Callable[..., PreTrainedTokenizerBase] = (
        transformers.PreTrainedTokenizerFast.from_pretrained if plain else transformers.AutoTokenizer.from_pretrained
    )
    options = {} if plain else {"trust_remote_code": trust_remote_code}
    try:
        tokenizer = load(path, local_files_only=True, **options)
        if len(tokenizer) <= len(tokenizer.get_added_vocab()):  # some are made of nothing when their files are missing
            raise ValueError("it has no vocabulary")
    except Exception as exc:  # the libraries below raise what they like, plain Exception included
        text = str(exc).strip().partition("\n")[0]
        raise DataError(
            f"{_KEY}: no usable tokenizer in {path}: {text}; copy tokenizer.json and tokenizer_config.json of the "
            "model into it"
        ) from exc
    return tokenizer


class PromptTokenizer:
    """A Hugging Face tokenizer from a folder. Prompts only: answers are ids and are never tokenized again."""

    def __init__(self, path: str, *, trust_remote_code: bool = False) -> None:
        """Load from `path`. Raises `DataError` when there is no tokenizer in it."""
        self._path = path
        if not Path(path).is_dir():
            raise DataError(f"{_KEY}: no such folder: {path}")
        self._tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: the tokenizer's and the model's own. Raises `DataError` when there is none."""
        found: set[object] = {self._tokenizer.eos_token_id}
        for name in ("generation_config.json", "config.json"):
            file = Path(self._path) / name
            if file.is_file():
                declared = read_json(file).get("eos_token_id")
                values = declared if isinstance(declared, list) else [declared]
                wrong = [value for value in values if not (value is None or type(value) is int)]
                if wrong:
                    raise DataError(f"{_KEY}: eos_token_id in {file} must be a token id or a list of them, got {wrong}")
                found |= set(values)
        ids = tuple(sorted(token for token in found if isinstance(token, int)))
        if not ids:
            raise DataError(
                f"{_KEY}: the model in {self._path} names no end-of-sequence token, so every answer would run to "
                "data.max_response_length; set eos_token in its tokenizer_config.json, or eos_token_id in its "
                "generation_config.json"
            )
        return ids

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return self._tokenizer.chat_template is not None

    def render(self, messages: Sequence[Message], options: Mapping[str, object]) -> str:
        """Return the chat as text that ends where the assistant begins. Raises `DataError` without a template."""
        if not self.has_chat_template:
            raise DataError(
                f"{_KEY}: prompts are chats, and the tokenizer in {self._path} has no chat template: put a "
                "chat_template.jinja into that folder, or make the prompts plain text"
            )
        rows = [{"role": message.role, "content": message.content} for message in messages]
        apply: Callable[..., object] = self._tokenizer.apply_chat_template
        try:
            return str(apply(rows, tokenize=False, add_generation_prompt=True, **options))
        except Exception as exc:  # a template is a program of the model's author, and raises what it likes
            raise DataError(
                f"data.chat_template_kwargs: the chat template in {self._path} refuses a chat: "
                f"{type(exc).__name__}: {exc}; change the rows, the options or the template"
            ) from exc

    def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the ids of each text, with no special tokens added: a template has written its own."""
        if not texts:
            return []
        ids = self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return [tuple(row) for row in ids]

    def fingerprint(self) -> str:
        """Return a digest of vocabulary and template: equal for folders that tokenize alike."""
        vocabulary = sorted(self._tokenizer.get_vocab().items())
        return hashlib.sha256(repr((vocabulary, self._tokenizer.chat_template)).encode()).hexdigest()[:16]
