"""A million random operations on a pool of 100,000 blocks: how long deciding about memory takes.

    PYTHONPATH=src python benchmarks/block_pool.py

Each operation is one of allocate, share, release, publish and match, with the checks off. Contents come from a limited set,
so that publishing sometimes meets a twin, matches sometimes hit, and a full pool evicts. Target: less than 10 seconds.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable

from octavo.memory.block_pool import BlockPool
from octavo.memory.prefix_cache import BlockKey, block_key, root_key

TARGET_S = 10.0
BLOCK_SIZE = 16
ROOT = root_key("benchmark")
Chain = tuple[list[int], list[BlockKey]]


class Load:
    """A pool and what is held of it. Every operation is one call, and counts what came of it."""

    def __init__(self, num_blocks: int, seed: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.held: list[int] = []
        self.chains = [self._chain(8) for _ in range(16_000)]

    def allocate(self) -> None:
        block = self.pool.allocate()
        if block is None:
            self.counts["pool was full"] += 1
            self._release_some(64)
        else:
            self.held.append(block)

    def share(self) -> None:
        if self.held:
            block = self.random.choice(self.held)
            self.pool.share(block)
            self.held.append(block)

    def release(self) -> None:
        self._release_some(1)

    def publish(self) -> None:
        """A whole chain is published up to a random depth, as a sequence does in the course of its prompt."""
        token_ids, keys = self.random.choice(self.chains)
        depth = self.random.randrange(len(keys))
        blocks: list[int] = []
        for i in range(depth + 1):
            block = self.pool.allocate()
            if block is None:
                break
            part = token_ids[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]
            used = self.pool.publish(block, keys[i], keys[i - 1] if i else ROOT, part)
            assert used is not None
            self.counts["published" if used == block else "merged with a twin"] += 1
            blocks.append(used)
        while blocks:
            self.pool.release(blocks.pop())

    def match(self) -> None:
        token_ids, keys = self.random.choice(self.chains)
        found = self.pool.cache.match(ROOT, keys, token_ids, len(token_ids) - 1)
        self.counts["tokens matched"] += len(found.block_ids) * BLOCK_SIZE + found.partial_tokens

    def _release_some(self, count: int) -> None:
        for _ in range(min(count, len(self.held))):
            # The last one takes the place of the one that goes: O(1), and the order is random anyway.
            i = self.random.randrange(len(self.held))
            self.held[i], block = self.held[-1], self.held[i]
            self.held.pop()
            self.pool.release(block)

    def _chain(self, num_blocks: int) -> Chain:
        # The first half is one of few, so that chains share beginnings and the index has siblings to tell apart.
        head = random.Random(self.random.randrange(200))
        half = BLOCK_SIZE * num_blocks // 2
        token_ids = [head.randrange(50_000) for _ in range(half)]
        token_ids += [self.random.randrange(50_000) for _ in range(half)]
        keys: list[BlockKey] = []
        for i in range(num_blocks):
            parent = keys[-1] if keys else ROOT
            keys.append(block_key(parent, token_ids[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]))
        return token_ids, keys


def run(num_operations: int, num_blocks: int, seed: int) -> float:
    """Do the operations, print the report and return the seconds they took."""
    load = Load(num_blocks, seed)
    kinds: dict[Callable[[], None], int] = {
        load.allocate: 32,
        load.share: 12,
        load.release: 44,
        load.publish: 4,
        load.match: 8,
    }
    operations = load.random.choices(list(kinds), weights=list(kinds.values()), k=num_operations)
    # Begin with a pool in use, so that the rest is filled with idle content and the run also evicts.
    for _ in range(num_blocks * 8 // 10):
        load.allocate()
    begin = time.perf_counter()
    for operation in operations:
        operation()
    seconds = time.perf_counter() - begin
    load.pool.check([load.held])
    for operation, count in Counter(operations).items():
        print(f"{operation.__name__:>20} {count:>10,}")
    for name, count in sorted(load.counts.items()):
        print(f"{name:>20} {count:>10,}")
    print(f"{'blocks in use':>20} {load.pool.num_used:>10,} of {num_blocks:,}, {load.pool.num_idle:,} idle")
    each_us = seconds / num_operations * 1e6
    verdict = "within" if seconds < TARGET_S else "over"
    print(
        f"{seconds:.2f} s for {num_operations:,} operations, {each_us:.2f} us each; {verdict} {TARGET_S:g} s"
    )
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    run(options.operations, options.blocks, options.seed)


if __name__ == "__main__":
    main()
