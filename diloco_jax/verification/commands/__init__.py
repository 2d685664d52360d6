"""The commands `simulate`, `chaos` and `replay`, one module each: flags and `main`."""
