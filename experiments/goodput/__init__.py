"""Goodput at the paper's sizes: the production machines on islands of chips that fail."""
