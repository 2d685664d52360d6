"""Programs and config files. Nothing imports them but tests and notebooks."""
