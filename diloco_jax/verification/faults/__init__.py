"""Faults for real processes: by signals and a faulty proxy, and the report of such a run.

Where is ...?
  who kills real processes: inject_faults.py, conductor.py
  who cuts the links of real processes: proxy.py
"""
