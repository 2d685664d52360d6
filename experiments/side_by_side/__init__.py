"""What experiments/chaos_bench.py compares: systems, their programs, kills, accounts."""
