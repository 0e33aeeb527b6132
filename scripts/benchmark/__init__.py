"""The benchmark against mlx-lm's contiguous cache; scripts.bench is its command line."""
