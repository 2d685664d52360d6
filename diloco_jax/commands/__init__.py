"""The commands of `diloco`, one module each: its flags and its `main` (diloco_jax/__main__.py)."""
