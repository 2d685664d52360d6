"""The facts that processes record, and their views: lines, summary, picture, page.

Where is ...?
  the report of a run, from its folder alone: folder.py, summary.py; of several: beside.py
  what is so of a process and of the run, for all views: condition.py, run_facts.py, programs.py
  where the time of every learner went: book.py
  the page of a run in a browser: state.py, page.py, serve.py, web/
  /metrics of one process: serve.py `serve_metrics`
"""
