"""The config of a run, and the objects that learner and syncer must build from it alike."""
