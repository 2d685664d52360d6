"""Facts that processes record, and what people see of them: live table, summary, picture."""
