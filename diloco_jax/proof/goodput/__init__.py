"""Goodput: the paper's tables from machines, islands or formulas; real runs, and predicted ones."""
