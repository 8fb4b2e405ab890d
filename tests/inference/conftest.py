"""A tiny OLMo 2 model with random weights and a character tokenizer, as a Hugging Face folder."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Olmo2Config, Olmo2ForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "0123456789+=-abcdefgh"
EOS = len(CHARACTERS)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("tiny_olmo2")
    torch.manual_seed(0)
    config = Olmo2Config(
        vocab_size=EOS + 1,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=None,
    )
    Olmo2ForCausalLM(config).save_pretrained(folder)
    vocabulary = {character: index for index, character in enumerate(CHARACTERS)} | {"<eos>": EOS}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    return str(folder)
