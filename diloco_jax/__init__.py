"""Decoupled DiLoCo in JAX: learners train, a syncer merges, no learner waits for another."""
