"""What a vocabulary says of the bytes of a token, however it writes them."""

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from inference.server.answers import TokenTexts
from inference.tokenizer import Tokenizer


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2 and its kin."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2 and its kin."""
    entries = [*(f"<0x{byte:02X}>" for byte in range(256)), *"abc "]
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(entries)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.mark.parametrize("made", [byte_level, byte_fallback])
def test_bytes_of_tokens_are_the_text(made: object, tmp_path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=made()).save_pretrained(tmp_path)  # type: ignore[operator]
    tokenizer = Tokenizer(tmp_path)
    text = "ab 🥰日本 é\n\x00"
    ids = tokenizer.encode(text)
    assert len(ids) > len(text)
    texts = TokenTexts(tokenizer)
    assert bytes(byte for token in ids for byte in texts.bytes_of(token)).decode() == text
