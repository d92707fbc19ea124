"""The native decoder against the torch models that specify it, and against itself in other steps."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from native_machines import ISAS
from native_steps import NativeSteps, distance, native_decoder, torch_logits
from octavo.kernels.packed import Number
from packed_weights import packed
from tiny_models import KINDS, VOCAB_SIZE, tiny_gguf, tiny_model

Folders = Callable[..., Path]
# More than one chunk of 128 keys, with a rest; one that joins later; one of a single token.
LENGTHS = (170, 23, 1)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of a tiny model of a kind, written at most once per module."""
    root = tmp_path_factory.mktemp("native")

    def folder(kind: str, **overrides: Any) -> Path:
        path = root / "-".join([kind, *(f"{k}{v}" for k, v in overrides.items())])
        return path if path.exists() else tiny_model(kind, path, **overrides)

    return folder


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def changed(
    origin: Path, to: Path, change: Callable[[str, torch.Tensor], torch.Tensor], **config: Any
) -> Path:
    """A model folder with other weights, and other fields of its config."""
    to.mkdir()
    weights = load_file(origin / "model.safetensors")
    made = {name: change(name, tensor).contiguous() for name, tensor in weights.items()}
    save_file(made, to / "model.safetensors", {"format": "pt"})
    fields = json.loads((origin / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**fields, **config}))
    return to


def assert_same_logits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-4 of the greatest logit, everywhere."""
    assert got.dtype == torch.float32 and got.shape == expected.shape
    assert float((got - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_the_torch_model(kind: str, folder_of: Folders) -> None:
    folder = folder_of(kind)
    steps = NativeSteps(native_decoder(folder), prompts())
    for got, prompt in zip(steps.run(), prompts(), strict=True):
        assert_same_logits(got, torch_logits(folder, prompt))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 3])
def test_every_instruction_set_computes_the_same_model(isa: str, threads: int, folder_of: Folders) -> None:
    for kind in ("llama", "qwen3"):
        decoder = native_decoder(folder_of(kind), isa=isa, threads=threads)
        for got, prompt in zip(NativeSteps(decoder, prompts()).run(), prompts(), strict=True):
            assert_same_logits(got, torch_logits(folder_of(kind), prompt))


VARIANTS: dict[str, tuple[Number, str, bool]] = {
    "float32": (Number.FLOAT32, "none", False),
    "bfloat16": (Number.BFLOAT16, "none", False),
    "int8": (Number.FLOAT32, "int8", False),
    "int8 bfloat16": (Number.BFLOAT16, "int8", False),
    "int4": (Number.FLOAT32, "int4", False),
    "int4 bfloat16": (Number.BFLOAT16, "int4", False),
    "int8 cache": (Number.FLOAT32, "none", True),
    "int8 cache bfloat16": (Number.BFLOAT16, "none", True),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_to_the_bit_however_tokens_are_cut_into_steps_and_blocks(
    isa: str, variant: str, folder_of: Folders
) -> None:
    number, quantization, int8 = VARIANTS[variant]
    for kind in ("llama", "mistral"):
        decoder = native_decoder(folder_of(kind), number, isa=isa, quantization=quantization)
        alone = [NativeSteps(decoder, [p], number, int8=int8).run()[0] for p in prompts()]
        for size, chunk in ((1, 1000), (4, 7), (16, 33), (32, 1), (256, 5)):
            steps = NativeSteps(decoder, prompts(), number, block_size=size, int8=int8)
            assert equal(steps.run(chunk), alone), (kind, size, chunk)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_to_the_bit_on_any_threads(variant: str, folder_of: Folders) -> None:
    number, quantization, int8 = VARIANTS[variant]
    results = []
    for threads in (1, 2, 4):
        decoder = native_decoder(folder_of("qwen2"), number, threads=threads, quantization=quantization)
        results.append(NativeSteps(decoder, prompts(), number, int8=int8).run(50))
    assert equal(results[0], results[1]) and equal(results[0], results[2])


# How far logits may be from those of the float32 torch model, as norms. Random weights forgive little: measured is up
# to nine tenths of this, nearly all of it what rounded weights lose.
FURTHEST = {
    "bfloat16": 0.022,
    "int8": 0.075,
    "int8 bfloat16": 0.075,
    "int4": 0.5,
    "int4 bfloat16": 0.5,
    "int8 cache": 0.02,
    "int8 cache bfloat16": 0.03,
}


@pytest.mark.parametrize("variant", FURTHEST)
@pytest.mark.parametrize("kind", ["llama", "llama_biased", "mistral", "qwen2", "qwen3"])
def test_rounded_variants_stay_close(kind: str, variant: str, folder_of: Folders) -> None:
    number, quantization, int8 = VARIANTS[variant]
    folder, prompt = folder_of(kind), prompts()[0]
    for isa in (ISAS[0], "portable"):
        decoder = native_decoder(folder, number, isa=isa, quantization=quantization)
        got = NativeSteps(decoder, [prompt], number, int8=int8).run()[0]
        assert distance(got, torch_logits(folder, prompt)) <= FURTHEST[variant]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("isa", ISAS)
def test_blocks_of_gguf_files_are_used_as_they_are(
    isa: str, kind: str, folder_of: Folders, tmp_path: Path
) -> None:
    file = tiny_gguf(folder_of("llama"), tmp_path / "tiny.gguf", kind)
    prompt = prompts()[0]
    expected = torch_logits(file, prompt)
    plain = NativeSteps(native_decoder(file, isa=isa), [prompt]).run()[0]
    assert_same_logits(plain, expected)
    native = NativeSteps(native_decoder(file, isa=isa, quantization="native"), [prompt]).run()[0]
    # The weights are exact; what is lost is the rounding of activations to bytes.
    assert 0 < distance(native, expected) <= 0.04


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_decoders_compute_the_model_of_their_rounded_weights(
    isa: str, quantization: str, folder_of: Folders, tmp_path: Path
) -> None:
    origin, prompt = folder_of("llama_untied"), prompts()[0]

    def rounded(name: str, weights: torch.Tensor) -> torch.Tensor:
        if weights.dim() == 1 or "embed" in name:
            return weights
        if quantization == "int8":
            form = "int8" if ".o_proj." in name else "even8"
        else:
            form = "group8" if name == "lm_head.weight" else "group4"
        return torch.from_numpy(packed(form, weights.numpy()).values).float()

    expected = torch_logits(changed(origin, tmp_path / "rounded", rounded), prompt)
    decoder = native_decoder(origin, isa=isa, quantization=quantization)
    # Again only activations are rounded besides.
    assert 0 < distance(NativeSteps(decoder, [prompt]).run()[0], expected) <= 0.04


def _has_odd_rows(overrides: dict[str, int], variant: str) -> bool:
    """bfloat16 matrices with an odd number of inputs, beside matrices that take bytes."""
    return overrides.get("hidden_size", 64) % 2 == 1 and variant == "int4 bfloat16"


@pytest.mark.parametrize(
    "overrides",
    [
        {"intermediate_size": 161},
        {"intermediate_size": 33},
        {"intermediate_size": 1},
        {"vocab_size": 509},
        {"vocab_size": 33, "bos_token_id": 1},
        {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16},
        {"num_attention_heads": 12, "num_key_value_heads": 1, "head_dim": 48},
        {"hidden_size": 65, "head_dim": 16},
        {"hidden_size": 71, "intermediate_size": 96, "head_dim": 32},
    ],
)
def test_sizes_that_fill_no_whole_panels(overrides: dict[str, int], folder_of: Folders) -> None:
    kind = "qwen3" if "head_dim" in overrides else "llama"
    folder = folder_of(kind, **overrides)
    prompt = [token % overrides.get("vocab_size", VOCAB_SIZE) for token in prompts((140,))[0]]
    expected = torch_logits(folder, prompt)
    for variant, (number, quantization, int8) in VARIANTS.items():
        for isa in () if _has_odd_rows(overrides, variant) else (ISAS[0], "portable"):
            decoder = native_decoder(folder, number, isa=isa, quantization=quantization)
            got = NativeSteps(decoder, [prompt], number, int8=int8).run(50)[0]
            again = NativeSteps(decoder, [prompt], number, int8=int8).run()[0]
            assert torch.equal(got, again), (variant, isa)
            if variant == "float32":
                assert_same_logits(got, expected)
            else:
                assert distance(got, expected) <= FURTHEST[variant], (variant, isa)


def test_odd_rows_of_bfloat16_beside_rows_of_bytes(folder_of: Folders) -> None:
    folder = folder_of("qwen3", hidden_size=65, head_dim=16)
    prompt, number = prompts((140,))[0], Number.BFLOAT16
    steps = NativeSteps(native_decoder(folder, number, quantization="int4"), [prompt], number)
    assert distance(steps.run()[0], torch_logits(folder, prompt)) <= FURTHEST["int4 bfloat16"]


def test_positions_far_into_the_context_are_rotated_alike(folder_of: Folders) -> None:
    prompt = [(7 * i * i + 3) % VOCAB_SIZE for i in range(1500)]
    for kind in ("llama31", "llama_linear_rope", "mistral"):
        decoder = native_decoder(folder_of(kind), max_tokens=1500)
        got = NativeSteps(decoder, [prompt]).run()[0]
        assert_same_logits(got, torch_logits(folder_of(kind), prompt))


def test_weights_that_are_mapped_compute_the_same(folder_of: Folders, tmp_path: Path) -> None:
    for variant, (number, quantization, int8) in VARIANTS.items():
        results = []
        for packed_file in (lambda _: None, lambda kind: tmp_path / kind, lambda kind: tmp_path / kind):
            decoder = native_decoder(
                folder_of("qwen2"), number, quantization=quantization, packed_file=packed_file
            )
            results.append(NativeSteps(decoder, prompts(), number, int8=int8).run())
        assert equal(results[0], results[1]) and equal(results[0], results[2]), variant


def test_sequences_that_begin_alike_read_that_once(folder_of: Folders) -> None:
    shared = prompts((280,))[0]
    own = prompts((5, 40, 1, 9))
    decoder = native_decoder(folder_of("llama"))
    together = NativeSteps(decoder, [shared + p for p in own], shared_blocks=17)
    together.step({0: 272})
    together.done = [272] * 4
    logits = []
    while any(d < len(p) for d, p in zip(together.done, together.prompts, strict=True)):
        counts = {i: 1 for i, p in enumerate(together.prompts) if together.done[i] < len(p)}
        logits.append((list(counts), together.step(counts)))
        # Two whole chunks of 128 lie before all of them.
        assert decoder.shared_reads == 2 * (len(counts) - 1)
    for i, p in enumerate(together.prompts):
        alone = NativeSteps(decoder, [p]).run()[0][272:]
        assert torch.equal(torch.stack([part[who.index(i)] for who, part in logits if i in who]), alone)


# ---- the greatest logit


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("variant", ["float32", "bfloat16", "int8", "int4"])
def test_best_is_the_greatest_logit_and_the_lowest_id_that_has_it(
    isa: str, threads: int, variant: str, folder_of: Folders, tmp_path: Path
) -> None:
    def with_twins(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[:256], tensor[:256]]) if "embed" in name else tensor

    folder = changed(folder_of("llama"), tmp_path / "twins", with_twins)
    number, quantization, _ = VARIANTS[variant]
    decoder = native_decoder(folder, number, isa=isa, threads=threads, quantization=quantization)
    steps = NativeSteps(decoder, prompts((60, 30)), number)
    logits = steps.step({0: 60, 1: 30})
    for rows in ([0], [89, 3, 3, 40], list(range(90))):
        values, ids = decoder.best(rows)
        assert torch.equal(torch.tensor(values), logits[rows].max(-1).values)
        assert ids == [int((logits[r] == logits[r].max()).nonzero()[0]) for r in rows]
    assert max(ids) < 256  # each has a twin above


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sequence_that_is_not_a_number_says_so_and_hurts_no_other(
    isa: str, variant: str, folder_of: Folders, tmp_path: Path
) -> None:
    def poisoned(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.index_fill(0, torch.tensor([5]), torch.nan) if "embed" in name else tensor

    folder = changed(folder_of("llama_untied"), tmp_path / "poisoned", poisoned)
    number, quantization, int8 = VARIANTS[variant]
    decoder = native_decoder(folder, number, isa=isa, quantization=quantization)
    healthy = [[token + 6 for token in p if token < 500] for p in prompts((40, 20))]
    alone = [NativeSteps(decoder, [p], number, int8=int8).run()[0] for p in healthy]
    # Computed together, tokens before the odd one may be lost too, as with the reference: 0 times a value is no number.
    steps = NativeSteps(decoder, [healthy[0], [7, 8, 9, 5, 10, 11, 12], healthy[1]], number, int8=int8)
    assert steps.step({1: 3}).isfinite().all()
    counts = {0: len(healthy[0]), 1: 4, 2: len(healthy[1])}
    logits = steps.step(counts)
    mine = slice(counts[0], counts[0] + 4)
    assert torch.equal(logits[: counts[0]], alone[0]) and torch.equal(logits[mine.stop :], alone[1])
    values, _ = decoder.best(list(range(len(logits))))
    assert np.isnan(values[mine]).all()
    assert np.isfinite(values[: mine.start] + values[mine.stop :]).all()


# ---- what is refused before memory is touched


def test_steps_that_do_not_fit_are_refused(folder_of: Folders) -> None:
    decoder = native_decoder(folder_of("llama"), max_tokens=8)
    pool = NativeSteps(decoder, prompts((40,))).pool
    for items, words in (
        ([], "too many tokens"),
        ([(0, (1,) * 9, (0,))], "too many tokens"),
        ([(0, (1,), ())], "block table is too short"),
        ([(15, (1, 2), (0,))], "block table is too short"),
        ([(-1, (1,), (0,))], "block table is too short"),
        ([(0, (), (0,))], "block table is too short"),
        ([(0, (1,), (99,))], "not in the pool"),
        ([(0, (1,), (-1,))], "not in the pool"),
        ([(0, (VOCAB_SIZE,), (0,))], "token id is out of range"),
        ([(0, (-1,), (0,))], "token id is out of range"),
        ([(0, [1], (0,))], "are tuples"),
    ):
        with pytest.raises(ValueError, match=words):
            decoder.forward(pool, items)
    decoder.forward(pool, [(0, (1, 2), (0,))])
    for rows in ([], [2], [-1], [0] * 9):
        with pytest.raises(ValueError, match="row"):
            decoder.logits(rows)
        with pytest.raises(ValueError, match="row"):
            decoder.best(rows)
