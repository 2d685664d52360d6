"""Where the chip time of a run went, and how much of what was trained is in the model."""
