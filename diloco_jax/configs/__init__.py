"""Configs that are part of the package: `--config=NAME:VARIANT` means NAME.py in this folder."""
