"""A hierarchical KV cache for top-k sparse attention: full history on the host, a small pool on the GPU."""
