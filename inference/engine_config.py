"""What an engine cannot be built from, said before anything is loaded."""

from typing import get_args

import torch

from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import EngineConfig, Kernels, KvCacheDtype, Quantization, Speculative


def check_config(config: EngineConfig) -> None:
    """Raises ConfigError naming option, value and range."""
    counts = ("max_num_seqs", "kv_cache_tokens", "block_size", "max_tokens_per_step", "tensor_parallel_size")
    others = {"speculative_tokens": 1, "speculative_step_tokens": 0, "max_model_len": 2, "threads": 1}
    for name, least in (dict.fromkeys(counts, 1) | others).items():
        value = getattr(config, name)
        if value is None and name in ("max_model_len", "kv_cache_tokens", "threads"):
            continue
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} is {value!r}; it must be an integer >= {least}")
    if not isinstance(config.seed, int):
        raise ConfigError(f"seed is {config.seed!r}; it must be an integer")
    if not 0 < config.gpu_memory_utilization <= 1:
        raise ConfigError(f"gpu_memory_utilization is {config.gpu_memory_utilization!r}; it must be in (0, 1]")
    if config.batching not in ("continuous", "static"):
        raise ConfigError(f"batching is {config.batching!r}; it must be 'continuous' or 'static'")
    if config.kernels not in get_args(Kernels):
        raise ConfigError(f"kernels is {config.kernels!r}; it must be one of {', '.join(get_args(Kernels))}")
    if config.speculative not in (None, *get_args(Speculative)):
        offered = ", ".join(map(repr, get_args(Speculative)))
        raise ConfigError(f"speculative is {config.speculative!r}; it must be None or one of {offered}")
    _check_draft_model(config)
    _check_quantization(config)
    _check_kv_cache(config)
    if config.deterministic and config.tensor_parallel_size > 1:
        raise ConfigError(
            f"deterministic needs the compiled kernels, which compute on one rank; tensor_parallel_size is "
            f"{config.tensor_parallel_size}"
        )
    if config.device not in ("cpu", "cuda"):
        raise ConfigError(
            f"device is {config.device!r}; it must be 'cpu' or 'cuda'; of several GPUs, CUDA_VISIBLE_DEVICES says which"
        )
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but this machine or this build of torch has none")
    if config.device == "cuda" and config.tensor_parallel_size > torch.cuda.device_count():
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, but this process sees "
            f"{torch.cuda.device_count()} GPUs"
        )


def _check_draft_model(config: EngineConfig) -> None:
    if config.speculative != "model":
        if config.draft_model is not None:
            raise ConfigError(f"draft_model is set, but speculative is {config.speculative!r}; set it to 'model'")
        return
    if config.draft_model is None:
        raise ConfigError("speculative is 'model', but draft_model is None; give the folder or hub id of one")
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"a draft model computes on one device; tensor_parallel_size is {config.tensor_parallel_size}, set it to "
            "1, or speculative = 'suffix'"
        )
    if config.kv_cache_tokens is None:
        raise ConfigError("kv_cache_tokens is None, which leaves no room for the KV of a draft model; give it")


def _check_kv_cache(config: EngineConfig) -> None:
    dtype = config.kv_cache_dtype
    if dtype not in get_args(KvCacheDtype):
        raise ConfigError(f"kv_cache_dtype is {dtype!r}; it must be one of {', '.join(get_args(KvCacheDtype))}")
    if dtype == "auto":
        return
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"kv_cache_dtype {dtype!r} is kept on one device; tensor_parallel_size is {config.tensor_parallel_size}, "
            "set it to 1"
        )
    if config.kernels == "triton" or (config.kernels == "auto" and config.device == "cuda"):
        raise ConfigError(
            f"kv_cache_dtype is {dtype!r}, which Triton's attention does not read; use 'auto', or kernels = 'torch'"
        )


def _check_quantization(config: EngineConfig) -> None:
    quantization = config.quantization
    if quantization is None:
        if config.quantize_head:
            raise ConfigError("quantize_head is True, but quantization is None; set quantization = 'int8' too")
        return
    if quantization not in get_args(Quantization):
        offered = ", ".join(map(repr, get_args(Quantization)))
        raise ConfigError(f"quantization is {quantization!r}; it must be None or one of {offered}")
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"quantization {quantization!r} computes on one device; tensor_parallel_size is "
            f"{config.tensor_parallel_size}, set it to 1"
        )
    if config.schedule_dir is not None:
        raise ConfigError(
            f"schedule_dir is set, but a schedule keeps whole weights, and quantization {quantization!r} leaves none"
        )
