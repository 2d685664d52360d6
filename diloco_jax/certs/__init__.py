"""Certificates of a run: names, the owner's authority, the allowlist, and checks of all of them.

Where is ...?
  who may connect: names.py, allowlist.py, transport/credentials.py
  what makes and checks certificates: authority.py, mint.py, check.py
"""
