"""A tiny OLMo 2 model with random weights and a character tokenizer, and a scheduler that is driven without a model."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Olmo2Config, Olmo2ForCausalLM, PreTrainedTokenizerFast

from inference.block_allocator import BlockAllocator
from inference.request import Request, Sequence
from inference.scheduler import Scheduler, StepPlan
from olmorl.contract.generation import SamplingParams

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


@pytest.fixture
def copy_of(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The model folder again, with other contents of its JSON files; None leaves the file out."""

    def copy(**changes: dict[str, object] | None) -> str:
        folder = tmp_path_factory.mktemp("copy")
        shutil.copytree(model_folder, folder, dirs_exist_ok=True)
        for name, change in changes.items():
            path = folder / f"{name}.json"
            known = json.loads(path.read_text()) if path.is_file() else {}
            path.unlink(missing_ok=True)
            if change is not None:
                path.write_text(json.dumps(known | change))
        return str(folder)

    return copy


class Policy:
    """A scheduler and its requests; `step` does what the engine does with a plan, without a model."""

    def __init__(self, num_blocks: int = 64, **options: int | None) -> None:
        defaults = {"block_size": 4, "max_num_seqs": 4, "max_tokens_per_step": 8, "prefix_caching": True}
        self.scheduler = Scheduler(num_blocks, **(defaults | options))  # type: ignore[arg-type]
        self.requests: list[Request] = []

    def add(self, prompt: list[int], *, n: int = 1, max_tokens: int = 8, priority: int = 0) -> Request:
        number = len(self.requests)
        request = Request(
            str(number),
            prompt,
            SamplingParams(n=n, max_tokens=max_tokens),
            number,
            0,
            tuple(range(n)),
            stop_ids=frozenset(),
            max_tokens=len(prompt) + max_tokens,
            priority=priority,
        )
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self, token: int = 1) -> list[int]:
        """One step; the sizes of its chunks."""
        plan = self.scheduler.schedule()
        self.advance(plan, token)
        return [count for _, count in plan.chunks]

    def advance(self, plan: StepPlan, token: int = 1) -> list[Sequence]:
        """The sequences that end by this step."""
        for sequence, count in plan.chunks:
            self.scheduler.computed(sequence, count - len(sequence.draft))
        drawing = [s for s, _ in plan.chunks if s.num_computed == s.num_tokens] + [s for s, _ in plan.starts]
        for sequence in drawing:
            right = next((i for i, guess in enumerate(sequence.draft) if guess != token), len(sequence.draft))
            sequence.token_ids += [token] * (right + 1)
            sequence.draft = []
            if right:
                self.scheduler.computed(sequence, right)
        finished = [s for s in drawing if s.num_tokens >= s.request.max_tokens] + plan.outgrown
        for sequence in finished:
            sequence.finish_reason = "length"
        self.scheduler.finish(finished)
        return finished

    def abort(self, request: Request) -> None:
        unfinished = [sequence for sequence in request.sequences if sequence.finish_reason is None]
        for sequence in unfinished:
            sequence.finish_reason = "abort"
        self.scheduler.finish(unfinished)

    def check(self) -> None:
        """Every block is free or held, and its count is the number of tables and kept prompts that hold it."""
        scheduler = self.scheduler
        held: Counter[int] = Counter()
        held_windows: Counter[int] = Counter()
        for request in self.requests:
            for sequence in request.sequences:
                held.update(sequence.blocks)
                held_windows.update(block for block in sequence.window_blocks if block >= 0)
                assert (sequence.row >= 0) == (sequence in scheduler.running)
                assert sequence.row >= 0 or not sequence.blocks
            if request.shared_prompt is not None:
                assert request.waiting
                held.update(request.shared_prompt.blocks)
                held_windows.update(block for block in request.shared_prompt.window_blocks if block >= 0)
        _check_counts(scheduler.allocator, held)
        if scheduler.kv.window_allocator is not None:
            _check_counts(scheduler.kv.window_allocator, held_windows)
        rows = [sequence.row for sequence in scheduler.running]
        assert len(set(rows)) == len(rows) <= scheduler.max_num_seqs
        assert not set(rows) & set(scheduler.free_rows)


def _check_counts(allocator: BlockAllocator, held: Counter[int]) -> None:
    assert allocator.ref_counts == [held[block] for block in range(allocator.num_blocks)]
    assert allocator.num_free + len(held) == allocator.num_blocks


@pytest.fixture(scope="session")
def make_policy() -> Callable[..., Policy]:
    return Policy
