"""Our models against transformers: the same logits, however the tokens are cut into steps and spread over blocks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo.attention.backend import attention_step
from octavo.attention.reference import ReferenceAttention
from octavo.errors import ModelFileError
from octavo.models.linear import can_pack
from octavo.models.registry import MODELS, Model, load_model
from octavo.weights.architectures import ARCHITECTURES
from octavo.weights.checkpoint import open_checkpoint
from served_model import real_model, reference_smollm2
from tiny_models import KINDS, VOCAB_SIZE, reference_logits, tiny_gguf, tiny_model

BACKEND = ReferenceAttention()
TOLERANCE = 1e-4
LENGTHS = (41, 6, 23)
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of a tiny model of a kind, written at most once per module."""
    root = tmp_path_factory.mktemp("tiny")

    def folder(kind: str) -> Path:
        return root / kind if (root / kind).exists() else tiny_model(kind, root / kind)

    return folder


class Paged:
    """Sequences of tokens computed step by step over a small pool whose blocks are handed out in random order."""

    def __init__(self, model: Model, prompts: list[list[int]], block_size: int, dtype: torch.dtype) -> None:
        spec = model.spec
        self.model, self.prompts, self.block_size = model, prompts, block_size
        needed = [-(-len(prompt) // block_size) for prompt in prompts]
        ids = list(range(sum(needed) + 1))
        random.Random(block_size).shuffle(ids)
        self.tables = [[ids.pop() for _ in range(n)] for n in needed]
        shape = (2, sum(needed) + 1, block_size, spec.num_kv_heads, spec.head_size)
        # Whatever is read without having been written shows.
        self.caches = [torch.full(shape, math.nan, dtype=dtype) for _ in range(spec.num_layers)]
        self.done = [0] * len(prompts)
        self.logits: list[list[torch.Tensor]] = [[] for _ in prompts]

    def step(self, counts: dict[int, int]) -> None:
        """Compute so many more tokens of each sequence named."""
        starts = [self.done[i] for i in counts]
        step = attention_step(
            starts, list(counts.values()), [self.tables[i] for i in counts], self.block_size
        )
        spans = [range(start, start + count) for start, count in zip(starts, counts.values(), strict=True)]
        positions = [p for span in spans for p in span]
        tokens = [self.prompts[i][p] for i, span in zip(counts, spans, strict=True) for p in span]
        with torch.inference_mode():
            hidden = self.model.forward(
                torch.tensor(tokens), torch.tensor(positions), self.caches, step, BACKEND
            )
            rows = self.model.logits(hidden).split(list(counts.values()))
        for (i, count), part in zip(counts.items(), rows, strict=True):
            self.done[i] += count
            self.logits[i].append(part)

    def run(self, chunk: int) -> list[torch.Tensor]:
        """Everything, in chunks of up to `chunk` tokens; sequence i joins at step i; logits [T, vocab] of each."""
        turn = 0
        while any(done < len(prompt) for done, prompt in zip(self.done, self.prompts, strict=True)):
            left = {i: len(p) - self.done[i] for i, p in enumerate(self.prompts[: turn + 1])}
            # The first step of a sequence takes a whole chunk, then single tokens and chunks alternate.
            self.step({i: min(n, chunk if (turn - i) % 2 == 0 else 1) for i, n in left.items() if n})
            turn += 1
        return [torch.cat(parts) for parts in self.logits]


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def load(path: Path, dtype: torch.dtype = torch.float32) -> Model:
    checkpoint = open_checkpoint(path)
    return load_model(checkpoint.spec, checkpoint.source, dtype)


def assert_same_logits(got: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert got.dtype == torch.float32 and got.shape == expected.shape
    assert float((got - expected).abs().max()) <= tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers_in_one_step_and_in_mixed_chunks(kind: str, folder_of: Folders) -> None:
    folder = folder_of(kind)
    model = load(folder)
    expected = [reference_logits(folder, prompt) for prompt in prompts()]
    for block_size in (1, 4, 16):
        for chunk in (max(LENGTHS), 7):
            got = Paged(model, prompts(), block_size, torch.float32).run(chunk)
            for ours, theirs in zip(got, expected, strict=True):
                assert_same_logits(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_stays_close_to_float32(kind: str, folder_of: Folders) -> None:
    folder = folder_of(kind)
    got = Paged(load(folder, torch.bfloat16), prompts()[:1], 4, torch.bfloat16).run(9)[0]
    expected = reference_logits(folder, prompts()[0])
    assert got.dtype == torch.float32
    assert float((got - expected).norm() / expected.norm()) < 0.03


@pytest.mark.parametrize(
    "kind", ["llama", "llama31", "llama_linear_rope", "llama_untied", "mistral", "qwen2", "qwen3"]
)
def test_a_gguf_file_gives_the_logits_of_its_origin(kind: str, folder_of: Folders, tmp_path: Path) -> None:
    folder = folder_of(kind)
    model = load(tiny_gguf(folder, tmp_path / "tiny.gguf"))
    prompt = prompts()[0]
    got = Paged(model, [prompt], 16, torch.float32).run(len(prompt))[0]
    assert_same_logits(got, reference_logits(folder, prompt))


def test_positions_far_into_the_context_are_rotated_alike(folder_of: Folders) -> None:
    prompt = [(7 * i * i + 3) % VOCAB_SIZE for i in range(600)]
    for kind in ("llama31", "mistral"):
        folder = folder_of(kind)
        got = Paged(load(folder), [prompt], 16, torch.float32).run(len(prompt))[0]
        assert_same_logits(got, reference_logits(folder, prompt))


def test_weight_bytes_counts_all_weights_and_a_packed_copy_of_tied_embeddings(folder_of: Folders) -> None:
    for kind in ("llama", "llama_untied"):
        theirs = AutoModelForCausalLM.from_pretrained(folder_of(kind), dtype=torch.float32)
        again = (
            theirs.lm_head.weight.numel()
            if theirs.config.tie_word_embeddings and can_pack(torch.float32)
            else 0
        )
        assert load(folder_of(kind)).weight_bytes == 4 * (again + sum(p.numel() for p in theirs.parameters()))


def test_a_tensor_that_is_missing_or_misshapen_is_named_before_anything_is_read(folder_of: Folders) -> None:
    checkpoint = open_checkpoint(folder_of("llama"))

    class Broken:
        """The checkpoint's source without one tensor, or with one in another shape."""

        def __init__(self, missing: str = "", reshaped: str = "") -> None:
            self.missing, self.reshaped = missing, reshaped
            self.file_of = checkpoint.source.file_of

        def names(self) -> set[str]:
            return set(checkpoint.source.names()) - {self.missing}

        def shape(self, name: str) -> tuple[int, ...]:
            return (3, 5) if name == self.reshaped else checkpoint.source.shape(name)

        def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
            raise AssertionError("read before everything was checked")

        def fill(self, name: str, target: torch.Tensor) -> None:
            raise AssertionError("read before everything was checked")

    name = "model.layers.2.mlp.down_proj.weight"
    with pytest.raises(
        ModelFileError, match=r"model\.safetensors: tensor model\.layers\.2.*missing.*\[64, 160\]"
    ):
        load_model(checkpoint.spec, Broken(missing=name), torch.float32)
    with pytest.raises(
        ModelFileError, match=r"down_proj\.weight: has shape \[3, 5\].*config asks for \[64, 160\]"
    ):
        load_model(checkpoint.spec, Broken(reshaped=name), torch.float32)


def test_every_family_that_can_be_read_can_be_built() -> None:
    assert MODELS.names() == sorted(ARCHITECTURES)
    for name in MODELS.names():
        assert callable(MODELS.load(name))


@pytest.mark.slow
def test_smollm2_equals_transformers() -> None:
    # A conversation of 40 tokens, of which the second half is arbitrary.
    tokens = [
        1,
        4093,
        198,
        1780,
        314,
        260,
        3575,
        282,
        4649,
        47,
        2,
        198,
        1,
        520,
        9531,
        198,
        *range(100, 4900, 200),
    ]
    theirs = reference_smollm2()
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    del theirs
    model = load(real_model())
    for block_size, chunk in ((16, len(tokens)), (4, 7)):
        got = Paged(model, [tokens], block_size, torch.float32).run(chunk)[0]
        assert torch.equal(got.argmax(-1), expected.argmax(-1))
        # Logits reach 36 here, so this is some 5e-6 of them.
        assert_same_logits(got, expected, tolerance=2e-4)
