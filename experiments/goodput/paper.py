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

# Gbit/s between sites, data-parallel and Decoupled: of eight data centres, where neither the model,
# its step time, the compute utilisation nor the codec is stated; and with steps of 1 s, where the
# number of sites, the model, the utilisation and the codec are not. In all 60 to 242 times less.
BANDWIDTH = ((198.0, 0.84), (104.0, 1.7))
# 12 billion parameters, four sites, links of 2 to 5 Gbit/s: more than so many times as fast as
# conventional synchronisation. Not stated: the step time, the utilisation.
FASTER, FASTER_GBIT = 20.0, (2.0, 5.0)

# Gbit/s by compute utilisation from the simulation of its predecessor (arXiv 2501.18512, table 4):
# 10 billion parameters, 48 layers, steps of 0.8 s, H = 100, fragments of 3 layers. Not stated: the
# sites and the steps of overlap, 2 and 1 in its experiments; the bits, 16 as its table 1 implies
# (400 times fewer bytes with H = 100 and 4 bits). Nearly all figures are of the grid
# 10 ** (-1 + 4 k / 49): seemingly the first of its points that was enough.
SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)
PREDECESSOR = {
  'data-parallel': (104.8, 222.3, 222.3, 268.3, 471.5),
  'DiLoCo': (1.7, 7.5, 16.0, 33.9, 104.8),
  'Streaming': (1.7, 5.2, 9.1, 13.3, 19.3),
  'Streaming, overlapped': (1.7, 3.6, 5.2, 6.2, 7.5),
  'Streaming, overlapped, 4 bits': (0.4, 0.9, 1.4, 1.4, 1.7),
}
