"""Qwen2.5 on a paged KV cache, in MLX."""
