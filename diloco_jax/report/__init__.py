"""The facts that processes record, and their views: lines, summary, picture, page."""
