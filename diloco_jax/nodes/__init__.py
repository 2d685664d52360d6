"""A process of a run: its start and end, the learner's and the syncer's node, a loop's model."""
