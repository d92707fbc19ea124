"""A tokenizer out of the metadata of a GGUF file.

What this is: the translation of the `tokenizer.ggml.*` keys into an object of the `tokenizers` library.
Numpy, torch and transformers take no part.

Two kinds of vocabulary are known. `gpt2` is byte-level BPE: tokens and merges are in the file, but how text
is cut into words before merging is only *named* (`tokenizer.ggml.pre`), so the names are a table here; a name
that is not in it is an error, because a wrong cut gives plausible but wrong ids. `llama` is SentencePiece
BPE: no merges are in the file, they follow from the scores (a pair may merge if its concatenation is a token,
best score first).

Source: the cutting patterns are those in the models' published tokenizer files.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from octavo.errors import ModelFileError
from octavo.weights.gguf_metadata import GgufMetadata

# Token types of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_SPACE_MARK = "▁"


@dataclass(frozen=True)
class ConvertedTokenizer:
    """A tokenizer in the form of the `tokenizers` library, and what that form has no place for.

    names: the spelling of "bos", "eos", "unk" and "pad", where there is one. eos_token_ids: every token that
    ends a reply. tool_template: the chat template to use when tools are given, if the model has a separate
    one.
    """

    backend: Tokenizer
    chat_template: str | None = None
    tool_template: str | None = None
    names: dict[str, str] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Cut:
    """How text is cut into words before merging. pattern None: the GPT-2 pattern that ByteLevel has built in.

    whole_words: a word that is a token is taken as it is, without merging. add_bos: prompts begin with BOS
    unless the file says otherwise.
    """

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"

_GPT2 = _Cut()
_DIGITS = _Cut(single_digits=True)
_LLAMA3 = _Cut(_CONTRACTIONS + _LEAD + r"\p{L}+|\p{N}{1,3}|" + _REST, whole_words=True, add_bos=True)
_QWEN2 = _Cut(_CONTRACTIONS + _LEAD + r"\p{L}+|\p{N}|" + _REST, nfc=True)
_TEKKEN = _Cut(
    f"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|"
    + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    whole_words=True,
    add_bos=True,
)

_CUTS: dict[str, _Cut] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}

_KINDS = ("gpt2", "llama")


def convert_gguf_tokenizer(metadata: GgufMetadata) -> ConvertedTokenizer:
    """Build the tokenizer that a GGUF file describes.

    Raises ModelFileError if the file has none, or one of a kind or with a pre-tokenizer that is not known here.
    """
    try:
        return _convert(metadata)
    except ModelFileError:
        raise
    except (
        Exception
    ) as e:  # values of wrong types; and the library raises bare Exceptions for odd vocabularies
        raise ModelFileError(
            metadata.path, f"its tokenizer data do not fit together ({e}); download it again"
        ) from e


def _convert(metadata: GgufMetadata) -> ConvertedTokenizer:
    kind = metadata.need("tokenizer.ggml.model")
    if kind not in _KINDS:
        raise ModelFileError(
            metadata.path,
            f"its tokenizer is of kind {kind!r}; known kinds: {', '.join(_KINDS)}; use the model's Hugging Face folder",
        )
    tokens: list[str] = metadata.need("tokenizer.ggml.tokens")
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelFileError(
            metadata.path, f"has {len(tokens)} tokens but {len(types)} token types; download it again"
        )
    # Later copies of a spelling keep their id but get no text: the first is the one that text is encoded to.
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocab.setdefault(token, token_id)
    if kind == "gpt2":
        backend, adds_bos = _byte_level(metadata, vocab)
    else:
        backend, adds_bos = _sentencepiece(metadata, tokens, types, vocab)
    _add_tokens(backend, tokens, types)
    names = _names(metadata, tokens)
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and "bos" in names:
        backend.post_processor = bos_post_processor(names["bos"], vocab[names["bos"]])
    template = metadata.get("tokenizer.chat_template")
    return ConvertedTokenizer(backend, template, None, names, _eos_token_ids(metadata, len(tokens)))


def _add_tokens(backend: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Make the control tokens, and those that are found before text is cut into words, known to the tokenizer."""
    for token, token_type in zip(tokens, types, strict=True):
        if token and token_type in (_CONTROL, _UNKNOWN):
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif token and token_type == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False)])


def bos_post_processor(bos_token: str, bos_token_id: int) -> processors.TemplateProcessing:
    """The step that puts BOS before a prompt that is encoded with special tokens."""
    return processors.TemplateProcessing(
        single=f"{bos_token} $A",
        pair=f"{bos_token} $A {bos_token}:1 $B:1",
        special_tokens=[(bos_token, bos_token_id)],
    )


def _byte_level(metadata: GgufMetadata, vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    pre = metadata.need("tokenizer.ggml.pre")
    cut = _CUTS.get(pre)
    if cut is None:
        raise ModelFileError(
            metadata.path,
            f"its pre-tokenizer (tokenizer.ggml.pre) is {pre!r}; known: {', '.join(sorted(_CUTS))}; "
            "use the model's Hugging Face folder",
        )
    # A merge is two tokens with a space between; a token may itself begin with a space, never hold one
    # further in.
    merges = []
    for merge in metadata.need("tokenizer.ggml.merges"):
        at = merge.find(" ", 1)
        merges.append((merge[:at], merge[at + 1 :]))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=cut.whole_words))
    if cut.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if cut.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if cut.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(cut.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, cut.add_bos


def _sentencepiece(
    metadata: GgufMetadata, tokens: list[str], types: list[int], vocab: dict[str, int]
) -> tuple[Tokenizer, bool]:
    scores: list[float] = metadata.need("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ModelFileError(
            metadata.path, f"has {len(tokens)} tokens but {len(scores)} scores; download it again"
        )
    unk_id = metadata.get("tokenizer.ggml.unknown_token_id")
    unk = tokens[unk_id] if unk_id is not None and unk_id < len(tokens) else None
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(tokens, types, scores),
            unk_token=unk,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    replace = normalizers.Replace(" ", _SPACE_MARK)
    after: list[decoders.Decoder] = [
        decoders.Replace(_SPACE_MARK, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), replace])
        after.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = replace
    backend.decoder = decoders.Sequence(after)
    return backend, True


def _merges_from_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a normal token out of two, best score first. O(total length of all tokens).

    Control tokens take no part, neither as a result nor as a half: plain text must never merge into one.
    """
    # User-defined tokens are cut out of the text before merging, so they need no merges either.
    normal = {token for token, token_type in zip(tokens, types, strict=True) if token_type == _NORMAL}
    found: list[tuple[float, int, str, str]] = []
    for token_id, token in enumerate(tokens):
        if types[token_id] != _NORMAL:
            continue
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in normal and right in normal:
                found.append((-scores[token_id], token_id, left, right))
    found.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in found]


def _names(metadata: GgufMetadata, tokens: list[str]) -> dict[str, str]:
    names = {}
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for name, key in keys.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and 0 <= token_id < len(tokens):
            names[name] = tokens[token_id]
    return names


def _eos_token_ids(metadata: GgufMetadata, num_tokens: int) -> tuple[int, ...]:
    """End of text, of turn and of message, as far as the file names them; its own order, without repeats."""
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(i for i in ids if i is not None and 0 <= i < num_tokens))
