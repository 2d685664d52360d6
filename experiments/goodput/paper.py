"""The figures that the paper publishes (arXiv 2604.21428, sections 7 and 8), and its settings."""

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
RIGID, ELASTIC = 'DP, rigid', 'DP, elastic'

# Goodput in percent, by number of chips.
GOODPUT = {
  RIGID: (72, 57, 38, 27, 18),
  ELASTIC: (88, 80, 69, 58, 40),
  'M=2': (94, 88, 80, 70, 54),
  'M=4': (96, 93, 89, 82, 73),
  'M=8': (98, 96, 94, 88, 80),
  'M=16': (99, 98, 96, 93, 86),
}

# Eight learners, four of them 18 % slower, with 10 % noise: goodput in percent.
SLOWER, NOISE = 1.18, 0.1
HETEROGENEOUS = {'K=8': 84, 'K=1': 100, 'K=1 with grace': 100}

# Time to the same tokens by extra compute: elastic data-parallel, Decoupled.
SCAVENGING = {
  0.0: (1.00, 1.00),
  0.25: (1.07, 0.90),
  0.5: (1.09, 0.83),
  1.0: (1.02, 0.75),
  3.0: (0.80, 0.62),
}

# Gbit/s between sites at 80 % compute utilisation: data-parallel, Decoupled with int4.
BANDWIDTH = (198.0, 0.84)
