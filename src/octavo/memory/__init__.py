"""Block memory: the pool, the block tables of sequences, and the prefix cache. Integers only."""
