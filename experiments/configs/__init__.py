"""Each file is one experiment: at its top what it shows and how to run it, then `get_config`."""
