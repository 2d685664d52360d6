"""The commands `simulate`, `chaos`, `replay` and `plan`, one module each: flags and `main`."""
