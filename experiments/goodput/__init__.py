"""Goodput: the paper's tables from simulated machines, from islands alone, from formulas."""
