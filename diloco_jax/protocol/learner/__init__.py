"""The learner's half of the protocol: `machine.LearnerMachine` and its parts."""
