"""Certificates of a run: names, the owner's authority, the allowlist, and checks of all of them."""
