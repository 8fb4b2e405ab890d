"""Small random models, and learner ranks in processes of their own."""

import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.managers import BaseManager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, Olmo2Config, Olmo3Config

from learner.pack import pack
from learner.store import open_store
from learner.trainer import join_ranks
from learner.worker import LearnerWorker
from olmorl.contract.training import LearnerConfig, RankBatch, TrainSample
from olmorl.contract.weights import Manifest, SyncGroup

VOCABULARY = 23
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # far from uniform, so that mistakes show
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEEPSEEK = SHAPE | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
CONFIGS = {
    "olmo2": lambda: Olmo2Config(**SHAPE),
    "llama_tied": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "olmo3": lambda: Olmo3Config(**SHAPE, sliding_window=7, layer_types=["sliding_attention", "full_attention"]),
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Folder of a small random model of the family, with companion files to be copied by an export."""

    def make(family: str) -> str:
        folder = tmp_path_factory.getbasetemp() / f"model-{family}"
        if not folder.exists():
            torch.manual_seed(1)
            AutoModelForCausalLM.from_config(CONFIGS[family]()).save_pretrained(folder)
            (folder / "tokenizer.json").write_text(json.dumps({"a tokenizer": family}))
            (folder / "chat_template.jinja").write_text("{{ messages }}")
        return str(folder)

    return make


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """The default process group, with this process alone in it. Of a module, so that others can have their own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def config(model_folder: Callable[[str], str]) -> LearnerConfig:
    """eps = 1 keeps AdamW's step sensitive to the scale of the gradient."""
    return LearnerConfig(
        model=model_folder("olmo2"), threads=1, lr=0.05, eps=1.0, max_grad_norm=0.5, logprob_chunk_tokens=13
    )


@pytest.fixture
def samples() -> list[TrainSample]:
    return make_samples(11, seed=3)


def make_samples(count: int, *, seed: int, version: int = 0) -> list[TrainSample]:
    """Ragged samples, three of a prompt, with some masked tokens and tokens of two versions."""
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        if index % 3 == 0:
            prompt = rng.integers(3, VOCABULARY, int(rng.integers(1, 12))).astype(np.int32)
        response = int(rng.integers(1, 30))
        samples.append(
            TrainSample(
                prompt_token_ids=prompt,
                token_ids=rng.integers(3, VOCABULARY, response).astype(np.int32),
                logprobs=rng.normal(-3.5, 1.5, response).astype(np.float32),
                token_versions=np.sort(rng.integers(version - 1, version + 1, response)).astype(np.int32),
                loss_mask=rng.random(response) < (0.0 if index == 4 else 0.8),
                advantage=float(rng.normal()),
            )
        )
    return samples


def batch_of(samples: list[TrainSample], version: int) -> RankBatch:
    return pack(samples, version=version, num_ranks=1, tokens_per_micro_batch=64)[0]


def transformers_scores(folder: str, sequences: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    scores = []
    for sequence in sequences:
        tokens = torch.from_numpy(sequence.astype(np.int64))
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        scores.append(logprobs.gather(-1, tokens[1:, None])[:, 0].numpy())
    return scores


class Ranks:
    """Learner workers in processes of their own, called together."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers
        self._threads = ThreadPoolExecutor(len(workers))

    def call(self, method: str, *args: Any, each: list[Any] | None = None) -> list[Any]:
        """The same call on every rank; `each` gives each rank its own argument."""
        arguments = [(one,) for one in each] if each is not None else [args] * len(self.workers)
        calls = [
            self._threads.submit(getattr(worker, method), *mine)
            for worker, mine in zip(self.workers, arguments, strict=True)
        ]
        return [call.result() for call in calls]

    def close(self) -> None:
        self._threads.shutdown(wait=False)


def in_ranks(world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """`work(*args)` of each rank, in processes of their own."""
    store = open_store("127.0.0.1")
    with multiprocessing.get_context("spawn").Pool(world_size) as pool:
        ranks = [(work, rank, world_size, store.port, *args) for rank in range(world_size)]
        calls = [pool.apply_async(_join_and, arguments) for arguments in ranks]
        return [call.get(timeout=300) for call in calls]


def _join_and(work: Callable[..., Any], rank: int, world_size: int, port: int, *args: Any) -> Any:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    join_ranks(store, rank=rank, world_size=world_size, device=torch.device("cpu"))
    return work(*args)


@pytest.fixture
def start_ranks() -> Iterator[Callable[[LearnerConfig, int], Ranks]]:
    managers: list[BaseManager] = []
    started: list[Ranks] = []

    def start(config: LearnerConfig, world_size: int) -> Ranks:
        BaseManager.register("LearnerWorker", LearnerWorker)
        mine = [BaseManager(ctx=multiprocessing.get_context("spawn")) for _ in range(world_size)]
        managers.extend(mine)
        for manager in mine:
            manager.start()
        workers = [manager.LearnerWorker(config, rank=rank, world_size=world_size) for rank, manager in enumerate(mine)]
        ranks = Ranks(workers)
        started.append(ranks)
        host, port = workers[0].host_rendezvous()
        ranks.call("start", host, port)
        return ranks

    yield start
    for manager in managers:
        manager.shutdown()
    for ranks in started:
        ranks.close()


class Receiver:
    """An engine's side of the wire, plain: a bucket for each broadcast."""

    def __init__(self, group: SyncGroup) -> None:
        timeout = timedelta(seconds=group.timeout_seconds)
        store = dist.PrefixStore(f"sync/{group.epoch}", dist.TCPStore(group.host, group.port, is_master=False))
        self._group = dist.ProcessGroupGloo(store, group.rank, group.size, timeout)

    def receive(self, manifest: Manifest) -> dict[str, np.ndarray]:
        """The bytes of each tensor."""
        received = {}
        for bucket in manifest.buckets:
            data = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
            options = dist.BroadcastOptions()
            options.rootRank = 0
            self._group.broadcast([data], options).wait()
            for spec, offset in zip(bucket.tensors, bucket.offsets, strict=True):
                received[spec.name] = data.numpy()[offset : offset + spec.num_bytes]
        return received


@pytest.fixture(scope="session")
def join_as_engine() -> Callable[[SyncGroup], Receiver]:
    """Returns when all members of the group are there."""
    return Receiver
