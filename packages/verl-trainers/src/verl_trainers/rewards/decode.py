"""From response ids to the text that a reward function reads: by the same tokenizer that prompts are made with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from verl_contracts.errors import DataError
from verl_trainers.data.tokenizer import load_tokenizer, read_json, tokenizer_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

__all__ = ["load_decoder"]


def load_decoder(path: str, *, trust_remote_code: bool = False) -> Callable[[Sequence[int]], str]:
    """Return a function that decodes ids without special tokens.

    A ``tokenizer.json`` is read without transformers, which an agent-loop worker then need not import. Raises
    `DataError` when there is no tokenizer in `path`.
    """
    file = tokenizer_file(path, trust_remote_code=trust_remote_code)
    if file is None:
        heavy = load_tokenizer(path, trust_remote_code=trust_remote_code)
        return lambda ids: str(heavy.decode(list(ids), skip_special_tokens=True))
    from tokenizers import Tokenizer

    try:
        light = Tokenizer.from_file(str(file))
    except Exception as exc:  # the library raises plain Exception
        raise DataError(f"actor_rollout_ref.model.path: {file} cannot be read: {exc}; copy it again") from exc
    light.add_special_tokens(list(_special_tokens(file.parent)))
    return lambda ids: str(light.decode(list(ids), skip_special_tokens=True))


def _special_tokens(folder: Path) -> Iterator[str]:
    """Yield what ``tokenizer_config.json`` calls special; the file itself need not say so of all of them."""
    config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    for name, value in config.items():
        if name.endswith("_token"):
            content = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(content, str):
                yield content
    added = config.get("added_tokens_decoder")
    for token in added.values() if isinstance(added, Mapping) else ():
        if isinstance(token, Mapping) and token.get("special") and isinstance(token.get("content"), str):
            yield str(token["content"])
