"""The composition root: from a config to an engine. The one place of the loop that knows tensors and concrete classes.

Everything that a config leaves open is decided here, once, against what the machine and the model are; the answers are
`EngineFacts`, printed at start.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from octavo.config import CacheConfig, EngineConfig, ModelConfig
from octavo.engine.backends import BackendFacts, choose_backend
from octavo.engine.engine import Engine
from octavo.engine.machine import available_memory_bytes, cpu_features, usable_cpus
from octavo.errors import ConfigError
from octavo.memory.block_pool import BlockPool
from octavo.model_spec import KVLayout, ModelSpec
from octavo.outputs import EngineFacts
from octavo.runner.runner import Runner
from octavo.sampling.sampler import Sampler
from octavo.scheduler.limits import Limits
from octavo.scheduler.policies import POLICIES, Policy
from octavo.scheduler.scheduler import Scheduler
from octavo.weights.checkpoint import open_checkpoint

# The pool's size if none is given: this much, or one full-length request if that is more, within the share below.
_DEFAULT_POOL_BYTES = 2**30
_MEMORY_SHARE = 0.6


@dataclass(frozen=True)
class _Shape:
    """What a config left open, decided: how KV memory is cut, and how much of it there is."""

    layout: KVLayout
    max_model_len: int
    num_blocks: int
    num_host_blocks: int


def build_engine(config: EngineConfig) -> tuple[Engine, EngineFacts]:
    """Load the model and put an engine around it.

    Raises ConfigError, ModelFileError or ModelUnavailableError for what the user can mend.
    """
    began = time.monotonic()
    num_threads = config.num_threads or usable_cpus()
    torch.set_num_threads(num_threads)
    # Names are looked up before the model is loaded: a typing error is known at once.
    policy: Policy = POLICIES.make(config.scheduler.policy, Policy)
    checkpoint = open_checkpoint(config.model.path)
    spec = checkpoint.spec
    backend = choose_backend(config, spec, num_threads)
    max_model_len = _max_model_len(config.model, spec)
    weight_bytes = backend.load(checkpoint)
    # After the weights: what is free now is what KV may have.
    shape = _shape(config, backend.layout(spec, config.cache.block_size), max_model_len)
    compute = backend.compute(shape.layout, shape.num_blocks, shape.num_host_blocks)
    sampler = Sampler(spec.vocab_size, spec.eos_token_ids, backend.row_math())
    runner = Runner(compute, sampler, shape.layout.block_size)
    runner.warm_up()
    scheduler = _scheduler(config, spec, shape, policy)
    engine = Engine(scheduler, runner, weights_digest=spec.digest, seed=config.seed, check=config.check)
    return engine, _facts(
        config, spec, backend.facts, shape, weight_bytes, num_threads, time.monotonic() - began
    )


def _shape(config: EngineConfig, layout: KVLayout, max_model_len: int) -> _Shape:
    num_blocks = _num_blocks(config.cache, layout, max_model_len)
    swap = config.scheduler.preemption == "swap"
    num_host_blocks = _num_host_blocks(config.cache, layout, num_blocks) if swap else 0
    return _Shape(layout, max_model_len, num_blocks, num_host_blocks)


def _scheduler(config: EngineConfig, spec: ModelSpec, shape: _Shape, policy: Policy) -> Scheduler:
    block_size = shape.layout.block_size
    return Scheduler(
        pool=BlockPool(shape.num_blocks, block_size),
        host=BlockPool(shape.num_host_blocks, block_size),
        policy=policy,
        limits=Limits(
            shape.max_model_len,
            shape.num_blocks * block_size,
            spec.vocab_size,
            frozenset(spec.eos_token_ids),
        ),
        max_num_seqs=config.scheduler.max_num_seqs,
        token_budget=config.scheduler.max_num_batched_tokens,
        prefix_caching=config.cache.prefix_caching,
        swap=config.scheduler.preemption == "swap",
    )


def _facts(
    config: EngineConfig,
    spec: ModelSpec,
    backend: BackendFacts,
    shape: _Shape,
    weight_bytes: int,
    num_threads: int,
    load_s: float,
) -> EngineFacts:
    return EngineFacts(
        model=config.model.name or spec.name,
        architecture=spec.architecture,
        dtype=backend.dtype,
        quantization=config.model.quantization,
        kv_cache_dtype=backend.kv_cache_dtype,
        attention_backend=backend.name,
        isa=backend.isa,
        batch_invariant=backend.batch_invariant,
        note=backend.note,
        cpu_features=cpu_features(),
        num_threads=num_threads,
        weight_bytes=weight_bytes,
        block_size=shape.layout.block_size,
        num_blocks=shape.num_blocks,
        block_bytes=shape.layout.block_bytes,
        num_host_blocks=shape.num_host_blocks,
        max_model_len=shape.max_model_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        prefix_caching=config.cache.prefix_caching,
        preemption=config.scheduler.preemption,
        policy=config.scheduler.policy,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        load_s=load_s,
    )


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
            f"the KV pool would have {wanted} blocks; at least 2 are needed, which is --num-blocks 2 and takes"
            f" {2 * layout.block_bytes / 2**20:.2f} MiB of {available / 2**20:,.0f} that are free"
        )
    return wanted


def _num_host_blocks(config: CacheConfig, layout: KVLayout, num_blocks: int) -> int:
    """Blocks of the host store: as asked, or as many as the pool has, as far as memory is left besides the pool."""
    most = max(0, available_memory_bytes() // layout.block_bytes - num_blocks)
    wanted = min(num_blocks, most) if config.swap_bytes is None else config.swap_bytes // layout.block_bytes
    if wanted > most or (wanted == 0 and config.swap_bytes is None):
        raise ConfigError(
            f"the host store of --preemption swap would have {wanted:,} blocks, and memory is left for {most:,}; ask for"
            f" at most --swap-gb {most * layout.block_bytes / 2**30:.2f}, or for a smaller pool"
        )
    return wanted
