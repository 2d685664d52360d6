"""What experiments/bandwidth_bench.py measures: shaped links, programs, cells, figures."""
