"""Carrying out plans with tensors: KV storage, block moves, step inputs, one forward pass, sampling."""
