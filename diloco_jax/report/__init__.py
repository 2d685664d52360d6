"""The facts that processes record, and their views: live table, summary, picture."""
