"""The composition root: from a config to an engine. The one place of the loop that knows tensors and concrete classes.

Everything that a config leaves open is decided here, once, against what the machine and the model are; the answers are
`EngineFacts`, printed at start.
"""

from __future__ import annotations

import time

import torch

from octavo.attention.backend import BACKENDS, AttentionBackend
from octavo.config import CacheConfig, EngineConfig, ModelConfig
from octavo.engine.engine import Engine
from octavo.engine.machine import available_memory_bytes, cpu_features, usable_cpus
from octavo.errors import ConfigError
from octavo.memory.block_pool import BlockPool
from octavo.model_spec import KVLayout, ModelSpec, kv_layout
from octavo.models.registry import load_model
from octavo.outputs import EngineFacts
from octavo.runner.kv_storage import KVStorage
from octavo.runner.runner import Runner
from octavo.sampling.sampler import Sampler
from octavo.scheduler.limits import Limits
from octavo.scheduler.policies import POLICIES
from octavo.scheduler.scheduler import Scheduler
from octavo.weights.checkpoint import open_checkpoint

# The pool's size if none is given: this much, or one full-length request if that is more, within the share below.
_DEFAULT_POOL_BYTES = 2**30
_MEMORY_SHARE = 0.6


def build_engine(config: EngineConfig) -> tuple[Engine, EngineFacts]:
    """Load the model and put an engine around it.

    Raises ConfigError, ModelFileError or ModelUnavailableError for what the user can mend.
    """
    began = time.monotonic()
    features = cpu_features()
    num_threads = config.num_threads or usable_cpus()
    torch.set_num_threads(num_threads)
    checkpoint = open_checkpoint(config.model.path)
    spec = checkpoint.spec
    dtype = _dtype(config.model.dtype, features)
    max_model_len = _max_model_len(config.model, spec)
    backend: AttentionBackend = BACKENDS.load(config.attention_backend)()
    policy = POLICIES.load(config.scheduler.policy)()
    layout = kv_layout(spec, config.cache.block_size or backend.default_block_size, dtype.itemsize)
    model = load_model(spec, checkpoint.source, dtype)
    num_blocks = _num_blocks(config.cache, layout, max_model_len)
    swap = config.scheduler.preemption == "swap"
    num_host_blocks = _num_host_blocks(config.cache, layout, num_blocks) if swap else 0

    storage = KVStorage(
        spec,
        block_size=layout.block_size,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        dtype=dtype,
    )
    sampler = Sampler(spec.vocab_size, spec.eos_token_ids)
    pool = BlockPool(num_blocks, layout.block_size)
    limits = Limits(
        max_model_len, num_blocks * layout.block_size, spec.vocab_size, frozenset(spec.eos_token_ids)
    )
    scheduler = Scheduler(
        pool=pool,
        host=BlockPool(num_host_blocks, layout.block_size),
        policy=policy,
        limits=limits,
        max_num_seqs=config.scheduler.max_num_seqs,
        token_budget=config.scheduler.max_num_batched_tokens,
        prefix_caching=config.cache.prefix_caching,
        swap=swap,
    )
    engine = Engine(
        scheduler,
        Runner(model, backend, storage, sampler, layout.block_size),
        weights_digest=spec.digest,
        seed=config.seed,
        check=config.check,
    )
    facts = EngineFacts(
        model=config.model.name or spec.name,
        architecture=spec.architecture,
        dtype=str(dtype).removeprefix("torch."),
        attention_backend=backend.name,
        cpu_features=features,
        num_threads=num_threads,
        weight_bytes=model.weight_bytes,
        block_size=layout.block_size,
        num_blocks=num_blocks,
        block_bytes=layout.block_bytes,
        num_host_blocks=num_host_blocks,
        max_model_len=max_model_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        prefix_caching=config.cache.prefix_caching,
        preemption=config.scheduler.preemption,
        policy=config.scheduler.policy,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        load_s=time.monotonic() - began,
    )
    return engine, facts


def _dtype(asked: str, features: tuple[str, ...]) -> torch.dtype:
    """`auto` is bfloat16 where the CPU multiplies it natively, float32 elsewhere (bfloat16 would be emulated, slowly)."""
    if asked == "auto":
        asked = "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(features) else "float32"
    dtype = getattr(torch, asked)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _max_model_len(config: ModelConfig, spec: ModelSpec) -> int:
    asked = config.max_model_len
    if asked is not None and asked > spec.max_position:
        raise ConfigError(
            f"--max-model-len is {asked:,}; this model was made for at most {spec.max_position:,}; lower it"
        )
    return asked or spec.max_position


def _num_blocks(config: CacheConfig, layout: KVLayout, max_model_len: int) -> int:
    """Blocks of the pool: as asked, or derived from free memory. Refuses what cannot fit, naming what can."""
    available = available_memory_bytes()
    if config.num_blocks is not None:
        wanted = config.num_blocks
    elif config.kv_cache_bytes is not None:
        wanted = config.kv_cache_bytes // layout.block_bytes
    else:
        full_length = -(-max_model_len // layout.block_size) * layout.block_bytes
        target = max(_DEFAULT_POOL_BYTES, full_length)
        wanted = int(min(target, available * _MEMORY_SHARE)) // layout.block_bytes
    most = available // layout.block_bytes
    if wanted > most:
        raise ConfigError(
            f"{wanted:,} KV blocks need {wanted * layout.block_bytes / 2**30:.2f} GiB and only"
            f" {available / 2**30:.2f} GiB are free; ask for at most --num-blocks {most:,}"
            f" ({most * layout.block_size:,} tokens)"
        )
    if wanted < 2:
        raise ConfigError(
            f"the KV pool would have {wanted} blocks; at least 2 are needed, which is"
            f" --kv-cache-gb {2 * layout.block_bytes / 2**30:.4f}"
        )
    return wanted


def _num_host_blocks(config: CacheConfig, layout: KVLayout, num_blocks: int) -> int:
    if config.swap_bytes is None:
        return num_blocks
    return config.swap_bytes // layout.block_bytes
