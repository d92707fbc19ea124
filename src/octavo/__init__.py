"""Octavo: an LLM serving engine built on block-paged KV memory.

    from octavo import LLM, SamplingParams

Names are imported on first use, so that `import octavo` is quick and needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "LLM": "octavo.llm:LLM",
    "SamplingParams": "octavo.sampling_params:SamplingParams",
    "RequestOutput": "octavo.outputs:RequestOutput",
    "CompletionOutput": "octavo.outputs:CompletionOutput",
    "RequestDelta": "octavo.outputs:RequestDelta",
    "OctavoError": "octavo.errors:OctavoError",
}
__all__ = [
    "LLM",
    "CompletionOutput",
    "OctavoError",
    "RequestDelta",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

if TYPE_CHECKING:
    from octavo.errors import OctavoError
    from octavo.llm import LLM
    from octavo.outputs import CompletionOutput, RequestDelta, RequestOutput
    from octavo.sampling_params import SamplingParams


def __getattr__(name: str) -> Any:
    target = _PUBLIC.get(name)
    if target is None:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    from octavo.registry import Registry

    return Registry("public name", _PUBLIC).load(name)
