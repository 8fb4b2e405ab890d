import subprocess
import sys
from pathlib import Path

import pytest

from olmorl.contract.errors import ConfigError, DataError, ModelError
from olmorl.data.tokenizer import PromptEncoder, load_tokenizer

BOS, EOS = 0, 1


def encode(folder: Path, prompt, **options) -> tuple[str, list[int]]:
    encoder = PromptEncoder(load_tokenizer(str(folder)), **options)
    text = encoder.render(prompt, place="f:1")
    [ids] = encoder.encode([text])
    assert ids.dtype == "int32"
    return text, ids.tolist()


def test_chat_template_is_applied_once_with_generation_prompt_and_one_bos(make_tokenizer) -> None:
    text, ids = encode(make_tokenizer(), ({"role": "user", "content": "hi"},))
    assert text == "<s>[user]hi[assistant]"
    assert ids.count(BOS) == 1 and ids[0] == BOS and EOS not in ids
    assert encode(make_tokenizer(), "hi") == (text, ids)


def test_system_prompt_unless_the_row_has_one(make_tokenizer) -> None:
    text, _ = encode(make_tokenizer(), "hi", system_prompt="be brief")
    assert text == "<s>[system]be brief[user]hi[assistant]"
    own = ({"role": "system", "content": "own"}, {"role": "user", "content": "hi"})
    assert encode(make_tokenizer(), own, system_prompt="be brief")[0] == "<s>[system]own[user]hi[assistant]"


@pytest.mark.parametrize("bos", [True, False])
def test_plain_text_gets_bos_iff_the_tokenizer_adds_one_and_never_eos(make_tokenizer, bos: bool) -> None:
    folder = make_tokenizer(template=None, bos=bos)
    text, ids = encode(folder, "7+5=")
    assert text == "7+5="
    assert len(ids) == 4 + bos and (ids[0] == BOS) == bos and EOS not in ids
    assert encode(folder, "<s>7+5=")[1].count(BOS) == 1


def test_template_can_be_switched_off_and_must_exist_to_be_switched_on(make_tokenizer) -> None:
    assert encode(make_tokenizer(), "hi", apply_chat_template=False)[0] == "hi"
    tokenizer = load_tokenizer(str(make_tokenizer(template=None)))
    with pytest.raises(ConfigError, match="no chat template"):
        PromptEncoder(tokenizer, apply_chat_template=True)
    with pytest.raises(ConfigError, match="system_prompt"):
        PromptEncoder(tokenizer, system_prompt="x")
    two = ({"role": "system", "content": "a"}, {"role": "user", "content": "b"})
    with pytest.raises(DataError, match="f:1"):
        PromptEncoder(tokenizer).render(two, place="f:1")


def test_a_template_that_refuses_names_the_row(make_tokenizer) -> None:
    encoder = PromptEncoder(load_tokenizer(str(make_tokenizer(template="{{ raise_exception('no system role') }}"))))
    with pytest.raises(DataError, match=r"f:1.*no system role"):
        encoder.render("hi", place="f:1")


def test_missing_models(tmp_path: Path) -> None:
    for model in (str(tmp_path), str(tmp_path / "nope"), "./nope"):
        with pytest.raises(ModelError, match=model):
            load_tokenizer(model)


def test_no_torch_is_imported(make_tokenizer) -> None:
    code = (
        "import sys, olmorl.data.stream; from olmorl.data.tokenizer import *\n"
        f"e = PromptEncoder(load_tokenizer({str(make_tokenizer())!r})); e.encode([e.render('hi', place='')])\n"
        "sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
