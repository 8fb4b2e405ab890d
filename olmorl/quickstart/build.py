"""Makes the quickstart's model folder and data: deterministic on one thread, under a minute on one core.

The policy first learns to add from clean examples, then to give up early from flawed ones. So it has the skill and
does not use it: what RL can mend in a few minutes. (Random slips of arithmetic in the examples were tried and cap what
RL can reach; see docs/LOG.md.)
"""

import json
import random
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from transformers import Olmo2Config, PreTrainedTokenizerFast

from learner.warm_up import Example, warm_up
from olmorl.quickstart.chain_sums import Problem, distinct_problems, problem, worked_answer
from olmorl.quickstart.tokenizer import BOS, EOS, PAD, SYMBOLS, build_tokenizer

STEPS, CLEAN_STEPS, BATCH = 600, 400, 32
GIVE_UP = 0.15
LR = 1e-2
WIDTH, LAYERS, HEADS, KV_HEADS, MLP_WIDTH = 64, 3, 4, 2, 192
TRAIN_SEED, HELD_OUT_SEED = 0, 12345
NUM_TRAIN, NUM_HELD_OUT = 4000, 200


def build(folder: Path, *, seed: int = 0) -> None:
    """Write `folder`/model, `folder`/train.jsonl and `folder`/held_out.jsonl."""
    tokenizer = build_tokenizer()
    model = warm_up(model_config(), lambda step: _batch(tokenizer, seed, step), steps=STEPS, lr=LR, seed=seed)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_problems(folder / "train.jsonl", islice(distinct_problems(TRAIN_SEED, "train"), NUM_TRAIN))
    write_problems(folder / "held_out.jsonl", islice(distinct_problems(HELD_OUT_SEED, "held_out"), NUM_HELD_OUT))


def model_config() -> Olmo2Config:
    return Olmo2Config(
        vocab_size=len(SYMBOLS),
        hidden_size=WIDTH,
        intermediate_size=MLP_WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        rms_norm_eps=1e-6,
        initializer_range=WIDTH**-0.5,
        tie_word_embeddings=False,
        pad_token_id=SYMBOLS.index(PAD),
        bos_token_id=SYMBOLS.index(BOS),
        eos_token_id=SYMBOLS.index(EOS),
    )


def write_problems(path: Path, problems: Iterable[Problem]) -> None:
    rows = [json.dumps({"prompt": p.prompt, "answer": p.ground_truth, "data_source": "chain_sums"}) for p in problems]
    path.write_text("\n".join(rows) + "\n")


def _batch(tokenizer: PreTrainedTokenizerFast, seed: int, step: int) -> list[Example]:
    rng = random.Random(f"warm-up/{seed}/{step}")
    give_up = 0.0 if step < CLEAN_STEPS else GIVE_UP
    problems = [problem(seed, "train", step * BATCH + row) for row in range(BATCH)]
    prompts = [tokenizer.encode(p.prompt) for p in problems]
    answers = [tokenizer.encode(worked_answer(p.terms, rng, give_up=give_up) + EOS)[1:] for p in problems]  # no BOS
    return list(zip(prompts, answers, strict=True))
