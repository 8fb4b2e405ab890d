"""The tokenizer of a model folder, loaded when text is first needed: many runs only ever see token ids."""

from collections.abc import Sequence as Items
from functools import cached_property
from pathlib import Path
from typing import Any

from olmorl.contract.errors import ModelError

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class Tokenizer:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def exists(self) -> bool:
        return any((self.folder / name).is_file() for name in _FILES)

    @cached_property
    def _loaded(self) -> Any:
        if not self.exists:
            raise ModelError(f"{self.folder} has no tokenizer; give prompts as token ids and no stop strings")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder)

    def encode(self, text: str) -> list[int]:
        return list(self._loaded.encode(text))

    def decode(self, token_ids: Items[int]) -> str:
        """Special tokens are left out; nothing is tidied up, so that text follows from the ids alone."""
        text = self._loaded.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)
