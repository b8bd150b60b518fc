"""The model's tokenizer, as the driver needs it: text and chats to ids, and the ids that end an answer."""

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

__all__ = ["PromptTokenizer"]


class PromptTokenizer:
    """A Hugging Face tokenizer from a folder. Prompts only: answers are ids and are never tokenized again."""

    def __init__(self, path: str, *, trust_remote_code: bool = False) -> None:
        """Load from `path`. Raises `DataError` when there is no tokenizer in it."""
        from transformers import AutoTokenizer  # here, because it pulls torch in

        self._path = path
        if not Path(path).is_dir():
            raise DataError(f"actor_rollout_ref.model.path: no such folder: {path}")
        try:
            self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                path, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except (OSError, ValueError) as exc:
            raise DataError(f"actor_rollout_ref.model.path: no tokenizer in {path}: {exc}") from exc

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: the tokenizer's and the model's own. Raises `DataError` when there is none."""
        found = {self._tokenizer.eos_token_id}
        for name in ("generation_config.json", "config.json"):
            file = Path(self._path) / name
            if file.is_file():
                declared = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
                found |= set(declared) if isinstance(declared, list) else {declared}
        ids = tuple(sorted(int(token) for token in found if token is not None))
        if not ids:
            raise DataError(f"{self._path}: no end-of-sequence token; set eos_token in tokenizer_config.json")
        return ids

    def render(self, messages: Sequence[Message], options: Mapping[str, object]) -> str:
        """Return the chat as text that ends where the assistant begins. Raises `DataError` without a template."""
        if self._tokenizer.chat_template is None:
            raise DataError(
                f"prompts are chats, and the tokenizer in {self._path} has no chat template: put a chat_template.jinja "
                "into that folder, or make the prompts plain text"
            )
        rows = [{"role": message.role, "content": message.content} for message in messages]
        apply: Callable[..., object] = self._tokenizer.apply_chat_template
        try:
            return str(apply(rows, tokenize=False, add_generation_prompt=True, **options))
        except Exception as exc:  # a template is a program of the model's author, and raises what it likes
            raise DataError(f"the chat template in {self._path} refuses a chat: {type(exc).__name__}: {exc}") from exc

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
