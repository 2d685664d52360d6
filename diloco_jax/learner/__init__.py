"""The shell around the learner's machine: its process, threads, island and payloads."""
