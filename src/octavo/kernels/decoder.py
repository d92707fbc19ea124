"""A decoder of the llama family that the native kernels compute in one call per step.

Loading has three steps, so that a model packed before is only mapped: which arrays there will be (from shapes alone),
filling them (once; `weights/packed_cache.py` keeps them), and putting matrices together over them.

The family is that of `models/llama.py`, which is the specification of what is computed; here the residual stays float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.errors import ConfigError
from octavo.kernels.library import load
from octavo.kernels.machine import Machine
from octavo.kernels.packed import Kept, MatrixArrays, MatrixPlan, Number, Rows, matrix, pack, plan_matrix
from octavo.model_spec import ModelSpec
from octavo.models.layers import rope_frequencies
from octavo.models.loading import check_decoder
from octavo.weights.packed_cache import Arrays, packed_arrays
from octavo.weights.source import WeightSource

Floats = npt.NDArray[np.float32]
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class _Matrix:
    """A matrix of the model: where it is used, and the tensors that are laid one under the other for it."""

    key: str
    tensors: tuple[str, ...]
    plan: MatrixPlan


def why_not(spec: ModelSpec) -> str | None:
    """Why the native decoder cannot compute a model; None if it can."""
    tile, most = load().TILE, load().MOST_QUERY_ROWS
    if spec.head_size % tile:
        return f"heads of {spec.head_size} numbers are not a multiple of {tile}"
    if spec.num_heads // spec.num_kv_heads > most:
        return f"{spec.num_heads // spec.num_kv_heads} query heads for each kv head are more than {most}"
    return None


class NativeDecoder:
    """The decoder and all its weights. weight_bytes: memory that the weights take.

    quantization: one of QUANTIZATIONS. max_tokens: most tokens of a step. packed_file: where packed weights are kept; None
    keeps them in memory. Raises ModelFileError if `source` does not hold what `spec` asks for, ConfigError if "native" is
    asked for and it holds no weights that can be used as they are.
    """

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        machine: Machine,
        *,
        number: Number,
        quantization: str = "none",
        max_tokens: int = 512,
        packed_file: Callable[[str], Path | None] = lambda _: None,
    ) -> None:
        check_decoder(spec, source)
        self.spec = spec
        self._machine = machine
        matrices = list(_matrices(spec, source, number, quantization))
        sizes = _sizes(spec, number, matrices)
        arrays = packed_arrays(
            packed_file(f"{quantization}-{number.name.lower()}"),
            sizes,
            lambda into: _fill(spec, source, machine, number, matrices, into),
        )
        self.weight_bytes = sum(sizes.values())
        packed = {m.key: matrix(m.plan, _matrix_arrays(m, arrays), _bias(spec, source, m)) for m in matrices}
        layers = [_layer(spec, source, packed, i) for i in range(spec.num_layers)]
        shape = {
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.intermediate_size,
            "num_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_size": spec.head_size,
            "vocab_size": spec.vocab_size,
            "norm_epsilon": spec.rms_norm_eps,
            "attention_scale": spec.head_size**-0.5,
            "soft_cap": spec.attention_soft_cap or 0.0,
            "number": int(number),
            "max_tokens": max_tokens,
        }
        self._handle: Any = load().make_decoder(
            machine.handle,
            shape,
            layers,
            arrays["embedding"],
            _vector(source, "model.norm.weight"),
            packed["head"],
            rope_frequencies(spec).numpy(),
        )

    def forward(self, pool: Any, items: list[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> None:
        """Compute a step: items are (start, token ids, block ids). Keys and values go into `pool`, a native block pool."""
        self._handle.forward(pool, items)

    def logits(self, rows: list[int]) -> torch.Tensor:
        """float32 [n, vocab] of rows of the last step."""
        out = torch.empty(len(rows), self.spec.vocab_size)
        self._handle.logits(rows, out.numpy())
        return out

    def best(self, rows: list[int]) -> tuple[list[float], list[int]]:
        """The greatest logit of each row, and the lowest id that has it. A row with NaN gives NaN."""
        values, ids = self._handle.best(rows)
        return values, ids

    @property
    def shared_reads(self) -> int:
        """Chunks of keys that the last step read once for several sequences, counted as reads that were spared."""
        return int(self._handle.shared_reads)


def _matrices(spec: ModelSpec, source: WeightSource, number: Number, quantization: str) -> Iterator[_Matrix]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    used_natively = False

    def made(key: str, outputs: int, inputs: int, *tensors: str, interleaved: bool = False) -> _Matrix:
        nonlocal used_natively
        kinds = {source.row_type(name) for name in tensors} if quantization == "native" else set()
        plan = plan_matrix(
            quantization,
            number,
            outputs,
            inputs,
            kinds=kinds,
            role=key.rpartition(".")[2],
            interleaved=interleaved,
        )
        used_natively |= quantization == "native" and plan.format > 2
        return _Matrix(key, tensors, plan)

    for i in range(spec.num_layers):
        at = f"model.layers.{i}."
        qkv = tuple(f"{at}self_attn.{name}_proj.weight" for name in "qkv")
        yield made(f"{i}.qkv", q_size + 2 * kv_size, hidden, *qkv)
        yield made(f"{i}.output", hidden, q_size, f"{at}self_attn.o_proj.weight")
        gate_up = (f"{at}mlp.gate_proj.weight", f"{at}mlp.up_proj.weight")
        yield made(f"{i}.gate_up", 2 * inner, hidden, *gate_up, interleaved=True)
        yield made(f"{i}.down", hidden, inner, f"{at}mlp.down_proj.weight")
    yield made("head", spec.vocab_size, hidden, _EMBEDDING if spec.tie_embeddings else "lm_head.weight")
    if quantization == "native" and not used_natively:
        raise ConfigError(
            "--quantization native keeps Q4_0, Q4_1 and Q8_0 weights of a GGUF file as they are, and this model has none;"
            " use none, int8 or int4"
        )


def _sizes(spec: ModelSpec, number: Number, matrices: list[_Matrix]) -> dict[str, int]:
    sizes = {"embedding": spec.vocab_size * spec.hidden_size * number.num_bytes}
    for m in matrices:
        sizes[f"{m.key}.data"] = m.plan.data_bytes
        sizes[f"{m.key}.scales"] = sizes[f"{m.key}.sums"] = m.plan.num_scales * 4
    return sizes


def _matrix_arrays(m: _Matrix, arrays: Arrays) -> MatrixArrays:
    return MatrixArrays(
        arrays[f"{m.key}.data"],
        arrays[f"{m.key}.scales"].view(np.float32),
        arrays[f"{m.key}.sums"].view(np.int32),
    )


def _fill(
    spec: ModelSpec,
    source: WeightSource,
    machine: Machine,
    number: Number,
    matrices: list[_Matrix],
    into: Arrays,
) -> None:
    embedding = _rows(source, (_EMBEDDING,))
    load().convert(
        machine.handle, int(embedding.kept), embedding.raw, embedding.inputs, int(number), into["embedding"]
    )
    for m in matrices:
        pack(machine.handle, m.plan, _rows(source, m.tensors), _matrix_arrays(m, into))


def _rows(source: WeightSource, tensors: tuple[str, ...]) -> Rows:
    """The rows of tensors, one tensor under the other; decoded first if they are of different types."""
    inputs = source.shape(tensors[0])[1]
    parts = [source.rows(name) for name in tensors]
    kinds = {kind for kind, _ in parts}
    if len(kinds) > 1:
        decoded = [source.tensor(name, torch.float32).view(torch.uint8).numpy() for name in tensors]
        return Rows(Kept.FLOAT32, np.concatenate(decoded), inputs)
    raw = parts[0][1] if len(parts) == 1 else np.concatenate([raw for _, raw in parts])
    return Rows(_KEPT[kinds.pop()], raw, inputs)


_KEPT = {
    "F32": Kept.FLOAT32,
    "BF16": Kept.BFLOAT16,
    "F16": Kept.FLOAT16,
    "Q4_0": Kept.Q4_0,
    "Q4_1": Kept.Q4_1,
    "Q8_0": Kept.Q8_0,
}


def _vector(source: WeightSource, name: str) -> Floats:
    values: Floats = source.tensor(name, torch.float32).numpy()
    return values


def _bias(spec: ModelSpec, source: WeightSource, m: _Matrix) -> Floats | None:
    biased = {
        "qkv": spec.attention_bias,
        "output": spec.attention_output_bias,
        "gate_up": spec.mlp_bias,
        "down": spec.mlp_bias,
        "head": False,
    }
    if not biased[m.key.rpartition(".")[2]]:
        return None
    return np.concatenate([_vector(source, name.removesuffix("weight") + "bias") for name in m.tensors])


def _layer(spec: ModelSpec, source: WeightSource, packed: dict[str, Any], index: int) -> dict[str, Any]:
    at = f"model.layers.{index}."
    layer: dict[str, Any] = {key: packed[f"{index}.{key}"] for key in ("qkv", "output", "gate_up", "down")}
    layer["input_norm"] = _vector(source, f"{at}input_layernorm.weight")
    layer["mlp_norm"] = _vector(source, f"{at}post_attention_layernorm.weight")
    for name in ("q_norm", "k_norm"):
        layer[name] = _vector(source, f"{at}self_attn.{name}.weight") if spec.qk_norm else None
    layer["window"] = spec.window_of(index) or 0
    return layer
