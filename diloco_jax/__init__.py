"""Decoupled DiLoCo in JAX: learners train, a syncer merges, nobody waits for anybody."""
