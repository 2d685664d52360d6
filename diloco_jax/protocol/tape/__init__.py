"""Tapes: every turn of a machine as a line of JSON, chained by hashes, for replay and judges."""
