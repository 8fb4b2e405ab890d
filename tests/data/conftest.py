from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def make_tokenizer(tmp_path: Path):
    """A character tokenizer folder; it puts BOS in front and EOS behind, so that doubling them would show."""

    def make(*, template: str | None = TEMPLATE, bos: bool = True) -> Path:
        vocab = {token: i for i, token in enumerate(["<s>", "</s>", "<unk>", *map(chr, range(32, 127))])}
        core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        if bos:
            core.post_processor = processors.TemplateProcessing(
                single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
            )
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
        )
        folder = tmp_path / f"tokenizer-{bos}-{template is not None}"
        tokenizer.save_pretrained(folder)
        return folder

    return make
