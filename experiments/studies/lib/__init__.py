"""What the studies share: arms, the book of finished ones, reports."""
