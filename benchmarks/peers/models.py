"""The packaged model in the forms that peers read: the same weights, dequantised once and rounded to bfloat16.

packaged GGUF (Q4_1) --transformers--> folder with safetensors, for vLLM and transformers
                     --llama-quantize--> GGUF in bfloat16, for llama.cpp
"""

from __future__ import annotations

from pathlib import Path

from peer import PeerError, Place, run

_MAKE_HF = """
import pathlib, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
gguf, folder = map(pathlib.Path, sys.argv[1:])
model = AutoModelForCausalLM.from_pretrained(
    gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
)
model.save_pretrained(folder)
AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
"""


def make_hf_folder(place: Place) -> Path:
    """The folder, made if it is not there; needs the environment of the peer `transformers`."""
    folder = place.hf_folder
    if not folder.exists():
        print(f"making {folder}", flush=True)
        unfinished = folder.with_suffix(".part")
        unfinished.mkdir(parents=True, exist_ok=True)
        run([str(place.python("transformers")), "-c", _MAKE_HF, str(place.gguf), str(unfinished)])
        unfinished.rename(folder)
    return folder


def make_bf16_gguf(place: Place, quantize: Path) -> Path:
    """The file, made if it is not there, with llama.cpp's own tool."""
    file = place.bf16_gguf
    if not file.exists():
        print(f"making {file}", flush=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".part")
        run([str(quantize), "--allow-requantize", str(place.gguf), str(unfinished), "BF16"])
        unfinished.rename(file)
    return file


def packaged_gguf(model: str) -> Path:
    """The file of a model that Octavo knows by name or path. Raises PeerError for what is no GGUF file."""
    from octavo.weights.locate import locate_model

    path = Path(locate_model(model))
    if path.suffix != ".gguf":
        raise PeerError(f"--model {model} leads to {path}; give a .gguf file or the name of a packaged one")
    return path
