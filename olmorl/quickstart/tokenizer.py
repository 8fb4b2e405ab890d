"""A character-level tokenizer as an ordinary Hugging Face folder."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
SYMBOLS = (PAD, BOS, EOS, *"0123456789", "+", "=", ";")


def build_tokenizer() -> PreTrainedTokenizerFast:
    ids = {symbol: i for i, symbol in enumerate(SYMBOLS)}
    backend = Tokenizer(models.WordLevel(ids, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, ids[BOS])])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )
