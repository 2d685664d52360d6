"""Decoupled DiLoCo in JAX: learners train, a syncer merges, no learner waits for another."""

__version__ = '0.1.0'
