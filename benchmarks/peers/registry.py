"""All peers, by the name that `--peers` uses."""

from __future__ import annotations

from llama_cpp import LlamaCpp
from octavo_peer import Octavo
from peer import OfflinePeer, ServerPeer
from transformers_peer import Transformers
from vllm_cpu import VllmCpu

PEERS: dict[str, ServerPeer | OfflinePeer] = {
    peer.name: peer
    for peer in (
        Octavo(),
        Octavo("int8"),
        Octavo("native"),
        VllmCpu(),
        LlamaCpp(),
        LlamaCpp(same_gguf=True),
        Transformers(),
    )
}
