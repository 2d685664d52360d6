"""Faults for real processes: by signals and a faulty proxy, and the report of such a run."""
