"""How many tokens of KV there is room for: as configured, or what a GPU has left beside the model and the largest step.

Suffixes: none; sizes are bytes, unless they are said to be blocks or tokens.
"""

import numpy as np
import torch

from inference.gpu_sampling import new_gpu_sampler
from inference.kv_blocks import window_pool_blocks
from inference.model.architecture import Architecture
from inference.model.decoder import Decoder
from inference.model.kv_pools import KVPools
from inference.request import Request
from inference.sampler import SamplingTable, sample
from inference.scheduler import Scheduler
from inference.speculative.step_limit import LARGEST
from inference.step_batch import dense_batch
from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import EngineConfig, SamplingParams


def new_scheduler(decoder: Decoder, config: EngineConfig, *, max_model_len: int) -> Scheduler:
    """One over so many blocks of KV as the config says or the GPU has room for."""
    # The widest window decides for all sliding layers; one that nothing outgrows is no window.
    window: int | None = max((layer.window or 0 for layer in decoder.arch.layers), default=0)
    window = window if window and window < max_model_len else None
    tokens = config.kv_cache_tokens
    if tokens is None:
        tokens = measured_kv_tokens(decoder, config, window=window)
    return Scheduler(
        -(-tokens // config.block_size),
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_tokens_per_step=config.max_tokens_per_step,
        prefix_caching=config.prefix_caching,
        static=config.batching == "static",
        window=window,
        max_draft=config.max_draft,
    )


def measured_kv_tokens(decoder: Decoder, config: EngineConfig, *, window: int | None) -> int:
    """For `kv_cache_tokens = None`. Runs the largest step and fills `gpu_memory_utilization` of the GPU with KV."""
    device = decoder.device
    if device.type != "cuda":
        raise ConfigError(
            f"kv_cache_tokens is None on device {str(device)!r}; only a GPU's memory is measured: give it"
        )
    if decoder.ranks.size > 1:
        raise ConfigError(
            f"kv_cache_tokens is None with tensor_parallel_size = {decoder.ranks.size}; give it: memory is measured on "
            "a single GPU only"
        )
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    largest_step(decoder, config)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    room = kv_room(config, total=total, others=others, peak=peak)
    blocks = blocks_that_fit(room, decoder.local, head_bytes=decoder.kv_head_bytes, config=config, window=window)
    if blocks < 1:
        raise ConfigError(
            f"no room for KV on {device}: {total >> 20} MiB x gpu_memory_utilization {config.gpu_memory_utilization} x "
            f"gpu_share {config.gpu_share}, of which the model and its largest step take {peak >> 20} and others "
            f"{others >> 20}; lower max_tokens_per_step or max_num_seqs, or raise one of the two"
        )
    return blocks * config.block_size


def kv_room(config: EngineConfig, *, total: int, others: int, peak: int) -> int:
    """Of a GPU of `total` bytes, what neither `others` have nor the `peak` of the model and its largest step takes."""
    filled = int(total * config.gpu_memory_utilization)
    return min(filled - others, int(filled * config.gpu_share)) - peak


def blocks_that_fit(room: int, arch: Architecture, *, head_bytes: int, config: EngineConfig, window: int | None) -> int:
    """The most blocks whose pools take no more than `room`, and no more than all slots at full length can use.
    `head_bytes`: of one token's key or value of one head."""
    block_bytes = 2 * arch.num_kv_heads * config.block_size * head_bytes
    sliding = sum(layer.window is not None for layer in arch.layers) if window is not None else 0

    def pool_bytes(blocks: int) -> int:
        window_blocks = 0
        if window is not None:
            window_blocks = window_pool_blocks(
                window,
                block_size=config.block_size,
                num_blocks=blocks,
                max_num_seqs=config.max_num_seqs,
                max_tokens_per_step=config.max_tokens_per_step,
                max_draft=config.max_draft,
            )
        return block_bytes * ((len(arch.layers) - sliding) * blocks + sliding * window_blocks)

    length = config.max_model_len or arch.max_positions
    low, high = 0, config.max_num_seqs * -(-length // config.block_size)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if pool_bytes(middle) <= room else (low, middle - 1)
    return low


@torch.inference_mode()
def largest_step(decoder: Decoder, config: EngineConfig) -> None:
    """`max_tokens_per_step` tokens of prompts and a draw for every slot, over a pool of their own.

    Every slot has a penalty, whose counts stay once they are there, and a truncation, for which the sampler may have to
    write the logits out once more.
    """
    rows = config.max_num_seqs
    if config.max_draft:
        rows = max(rows, config.speculative_step_tokens or LARGEST)
    params = SamplingParams(n=rows, top_k=1, repetition_penalty=1.5)
    request = Request("", [0], params, 0, 0, tuple(range(rows)), stop_ids=frozenset(), max_tokens=2)
    sampling, gpu_sampler = SamplingTable(rows), new_gpu_sampler(decoder)
    for row, sequence in enumerate(request.sequences):
        sequence.row = row
        sampling.set(sequence)

    def draw(hidden_M: torch.Tensor) -> None:
        logits_RV = decoder.logits(hidden_M.expand(rows, -1).contiguous())
        sample(logits_RV, sampling.batch(request.sequences), decoder.team, gpu_sampler)

    draw(decoder.norm)  # as good as any: from here on the counts are there
    length = min(config.max_model_len or decoder.arch.max_positions, config.max_tokens_per_step)
    whole, rest = divmod(config.max_tokens_per_step, length)
    sequences = [np.zeros(length, np.int64)] * whole + [np.zeros(rest, np.int64)] * (rest > 0)
    batch, blocks = dense_batch(sequences, block_size=config.block_size)
    pools = KVPools(
        decoder.local, blocks, None, block_size=config.block_size, dtype=decoder.kv_dtype, device=decoder.device
    )
    draw(decoder.forward(batch, pools)[0])
