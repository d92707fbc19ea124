"""All options of all commands, once: flag, help text, default, and how they become an EngineConfig.

Defaults come from `config.py`, and so do the checks: a value that the config refuses ends the command with
exit code 2 and the config's own message. Names follow vLLM where it has the same option.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.config import (
    BLOCK_SIZES,
    DTYPES,
    ISA_NAMES,
    KV_CACHE_DTYPES,
    PREEMPTION_MODES,
    QUANTIZATIONS,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    gib_to_bytes,
)
from octavo.errors import ConfigError, ValidationError
from octavo.sampling_params import SamplingParams
from octavo.weights.locate import PACKAGED_MODELS, default_served_name


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def set_up_logging(level: LogLevel) -> LogLevel:
    """Send log records to stderr. Only the command line does this; a library leaves it to its user."""
    logging.basicConfig(
        stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("octavo").setLevel(level.upper())
    return level


def _option(panel: str, help_text: str, *flags: str, default: str | None = None, **more: Any) -> Any:
    """An option in a panel of the help page. `default` describes a default that is found out later."""
    shown: bool | str = True if default is None else default
    return typer.Option(..., *flags, help=help_text, rich_help_panel=panel, show_default=shown, **more)


_MODEL = "Model"
_MEMORY = "KV memory"
_SCHEDULING = "Scheduling"
_SERVER = "Server"
_SAMPLING = "Sampling"
_MACHINE = "Machine and debugging"

_MODEL_HELP = (
    "A folder with config.json and safetensors, a .gguf file, a hub name (org/name or org/name:file.gguf),"
    f" or one of: {', '.join(PACKAGED_MODELS)}."
)
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP)]
ModelOption = Annotated[str, _option(_MODEL, _MODEL_HELP, "--model", "-m")]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of every command that runs an engine. None: found out at start."""

    dtype: Annotated[
        str,
        _option(_MODEL, f"Numbers to compute in: {', '.join(DTYPES)}. auto: what suits model and machine."),
    ] = ModelConfig.dtype
    quantization: Annotated[
        str,
        _option(
            _MODEL,
            f"How weights are kept: {', '.join(QUANTIZATIONS)}. native: the 4 and 8 bits of a GGUF file as they are.",
        ),
    ] = ModelConfig.quantization
    weight_cache: Annotated[
        bool, _option(_MODEL, "Keep packed weights on disk, so that the next start is faster.")
    ] = ModelConfig.weight_cache
    max_model_len: Annotated[
        int | None, _option(_MODEL, "Longest prompt plus answer, in tokens.", default="the model's own limit")
    ] = ModelConfig.max_model_len

    block_size: Annotated[
        int | None,
        _option(
            _MEMORY,
            f"Tokens in a block: {', '.join(map(str, BLOCK_SIZES))}.",
            default="what suits the backend",
        ),
    ] = CacheConfig.block_size
    num_blocks: Annotated[
        int | None,
        _option(_MEMORY, "Blocks in the pool. Give this or --kv-cache-gb.", default="from free memory"),
    ] = CacheConfig.num_blocks
    kv_cache_gb: Annotated[
        float | None, _option(_MEMORY, "Size of the block pool in GiB.", default="from free memory")
    ] = None
    swap_gb: Annotated[
        float | None,
        _option(
            _MEMORY,
            "Host memory for blocks that --preemption swap moves out, in GiB.",
            default="as large as the pool",
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool,
        _option(_MEMORY, "Keep blocks of finished requests and reuse them for prompts that begin alike."),
    ] = CacheConfig.prefix_caching

    kv_cache_dtype: Annotated[
        str,
        _option(_MEMORY, f"Numbers to keep KV in: {', '.join(KV_CACHE_DTYPES)}. auto: those of the model."),
    ] = CacheConfig.kv_cache_dtype

    max_num_seqs: Annotated[int, _option(_SCHEDULING, "Most sequences that run at the same time.")] = (
        SchedulerConfig.max_num_seqs
    )
    max_num_batched_tokens: Annotated[
        int, _option(_SCHEDULING, "Token budget of a step. Longer prompts are computed over several steps.")
    ] = SchedulerConfig.max_num_batched_tokens
    policy: Annotated[
        str, _option(_SCHEDULING, "Who goes first: fcfs, priority, another built-in name, or module:Class.")
    ] = SchedulerConfig.policy
    preemption: Annotated[
        str,
        _option(_SCHEDULING, f"How blocks are taken back when none are left: {', '.join(PREEMPTION_MODES)}."),
    ] = SchedulerConfig.preemption

    attention_backend: Annotated[
        str,
        _option(
            _MACHINE,
            "What computes: auto, cpu (native kernels), reference (plain torch), or attention of your own as module:Class.",
        ),
    ] = EngineConfig.attention_backend
    isa: Annotated[
        str, _option(_MACHINE, f"Instruction set of the native kernels: {', '.join(ISA_NAMES)}.")
    ] = EngineConfig.isa
    batch_invariant: Annotated[
        bool,
        _option(
            _MACHINE,
            "Start only if answers are the same to the bit in any batch. The native kernels always are, at no cost.",
            "--batch-invariant",
        ),
    ] = EngineConfig.batch_invariant
    shared_prefix_attention: Annotated[
        bool, _option(_MACHINE, "Read keys and values that sequences share once per step for all of them.")
    ] = EngineConfig.shared_prefix_attention
    threads: Annotated[
        int | None, _option(_MACHINE, "Threads to compute with.", default="all CPUs this process may use")
    ] = EngineConfig.num_threads
    seed: Annotated[
        int | None,
        _option(
            _SAMPLING,
            "Seed of requests that bring none, so that a run can be repeated.",
            default="new at each start",
        ),
    ] = EngineConfig.seed
    check: Annotated[
        bool,
        _option(
            _MACHINE, "Verify every invariant of memory and scheduler after every step (slow).", "--check"
        ),
    ] = EngineConfig.check
    log_level: Annotated[
        LogLevel,
        _option(_MACHINE, "What to log on stderr. debug also shows tracebacks.", callback=set_up_logging),
    ] = LogLevel.INFO

    def config(self, model: str, path: Path) -> EngineConfig:
        """The engine's config for the model that the user called `model` and that lies at `path`.

        Raises ConfigError for a value that cannot be used.
        """
        return EngineConfig(
            model=ModelConfig(
                path=str(path),
                name=default_served_name(model, path),
                dtype=self.dtype,
                quantization=self.quantization,
                weight_cache=self.weight_cache,
                max_model_len=self.max_model_len,
            ),
            cache=CacheConfig(
                block_size=self.block_size,
                num_blocks=self.num_blocks,
                kv_cache_bytes=gib_to_bytes("--kv-cache-gb", self.kv_cache_gb),
                swap_bytes=gib_to_bytes("--swap-gb", self.swap_gb),
                prefix_caching=self.enable_prefix_caching,
                kv_cache_dtype=self.kv_cache_dtype,
            ),
            scheduler=SchedulerConfig(
                policy=self.policy,
                preemption=self.preemption,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
            ),
            attention_backend=self.attention_backend,
            isa=self.isa,
            batch_invariant=self.batch_invariant,
            shared_prefix_attention=self.shared_prefix_attention,
            num_threads=self.threads,
            seed=self.seed,
            check=self.check,
        )


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of the HTTP server."""

    host: Annotated[str, _option(_SERVER, "Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, _option(_SERVER, "Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000
    served_model_name: Annotated[
        list[str] | None,
        _option(
            _SERVER,
            "Names that requests may use for the model: one or more, or repeat the flag.",
            metavar="NAME...",
            default="the model's own name",
        ),
    ] = None
    api_key: Annotated[
        str | None,
        _option(
            _SERVER,
            "Key that clients must send as a bearer token. The variable keeps it out of process lists.",
            envvar="OCTAVO_API_KEY",
            default="none: anybody may ask",
        ),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        _option(
            _SERVER,
            "Web origins whose pages may call (CORS), such as https://example.org; * for all.",
            metavar="ORIGIN...",
            default="none",
        ),
    ] = None
    drain_timeout_s: Annotated[
        int,
        _option(
            _SERVER,
            "Seconds that running requests get to finish after SIGTERM; a second signal ends at once.",
            min=0,
        ),
    ] = 30
    stall_timeout_s: Annotated[
        float,
        _option(
            _SERVER,
            "Seconds without a finished step, while there is work, after which /health answers 503.",
            min=0.1,
        ),
    ] = 60.0

    def check(self) -> None:
        """Raises ConfigError for values that would silently mean something else than the user thinks."""
        if self.api_key == "":
            raise ConfigError("--api-key is empty, which would let anybody in; give a key or leave it out")
        if self.served_model_name is not None and "" in self.served_model_name:
            raise ConfigError("--served-model-name is empty; give a name or leave it out")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How answers of `generate` and `chat` are chosen. --seed is among the engine's options."""

    max_tokens: Annotated[int, _option(_SAMPLING, "Most new tokens of an answer.")] = 256
    temperature: Annotated[
        float, _option(_SAMPLING, "0 always takes the likeliest token; higher is more varied.")
    ] = 0.0
    top_p: Annotated[
        float, _option(_SAMPLING, "Choose among the likeliest tokens with this probability together.")
    ] = SamplingParams.top_p
    top_k: Annotated[int, _option(_SAMPLING, "Choose among this many likeliest tokens; 0: all.")] = (
        SamplingParams.top_k
    )
    min_p: Annotated[
        float, _option(_SAMPLING, "Leave out tokens less likely than this share of the likeliest.")
    ] = SamplingParams.min_p
    repetition_penalty: Annotated[
        float, _option(_SAMPLING, "Above 1: tokens seen before become less likely.")
    ] = SamplingParams.repetition_penalty
    stop: Annotated[
        list[str] | None, _option(_SAMPLING, "Text that ends an answer; may be repeated.", metavar="TEXT")
    ] = None

    def params(self, *, n: int = 1, seed: int | None = None) -> SamplingParams:
        """The parameters that every prompt starts from. Raises ConfigError for an unusable value."""
        try:
            return SamplingParams(
                n=n,
                seed=seed,
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                stop=self.stop or (),
            )
        except ValidationError as e:
            raise ConfigError(e.message, param=e.param) from e
