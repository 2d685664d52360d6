"""What a certificate proves: a node's name, until when, and in which run.

TLS has compared signatures and dates when a session begins, but it does not look at names, it lets
a resumed session in after the end of its certificate, and it never ends one. So everything here is
judged again, from the certificate itself (certificates.py).
"""

import dataclasses
import datetime

from diloco_jax.certs import names


class Unproved(ValueError):
  """A certificate does not prove what it must; the text says what is wrong."""


@dataclasses.dataclass(frozen=True, slots=True)
class Proof:
  """The node that a certificate names. `sha256`: of the certificate, in hex."""

  name: names.Name
  sha256: str
  not_before: datetime.datetime
  not_after: datetime.datetime

  def require_valid(self, now: datetime.datetime) -> None:
    """Raises Unproved if the certificate has ended or has not begun."""
    if now >= self.not_after:
      raise Unproved(f'the certificate of {self.name.uri} has ended at {date(self.not_after)}')
    if now < self.not_before:
      raise Unproved(
        f'the certificate of {self.name.uri} begins at {date(self.not_before)}; the clock here '
        f'says {date(now)}'
      )


def utc_now() -> datetime.datetime:
  return datetime.datetime.now(datetime.UTC)


def date(when: datetime.datetime) -> str:
  return f'{when:%Y-%m-%d %H:%M:%S} UTC'
