"""Makes and checks the certificates of a run, for syncers and learners on several machines.

    diloco certs init --name=tiny --tls=certs        # the authority; certs/syncer for the syncer
    diloco certs issue l0 l1 --tls=certs             # certs/l0 and certs/l1, one for each learner
    diloco certs revoke l1 --tls=certs               # its sessions end within 5 s
    diloco certs list --tls=certs
    diloco certs check certs/l0                      # says what is wrong in a node's folder

    # A learner whose key never leaves its machine: csr there, sign here, copy the two files back.
    diloco certs csr l3
    diloco certs sign l3/request.pem --learner=l3 --tls=certs

    # Before the 30 days are over; processes take the new files without a restart.
    diloco certs issue syncer l0 --renew --tls=certs

Copy certs/syncer to the machine of the syncer (`diloco syncer --tls=certs/syncer`) and certs/l0 to
that of learner l0 (`diloco learner --learner=l0 --tls=certs/l0`). The syncer accepts the
certificates in syncer/allowlist.json: after issue, sign and revoke copy that file again, if the
syncer does not run from this folder. Keep ca.key off the machines of the run. Every error is one
line and exit code 42.
"""

import pathlib

from absl import flags

from diloco_jax.certs import allowlist, authority, names, private, proofs
from diloco_jax.certs import check as check_lib
from diloco_jax.process import exits

POSITIONAL = True
_TLS = flags.DEFINE_string('tls', 'certs', 'The folder of the owner, as for `diloco launch`.')
_NAME = flags.DEFINE_string('name', '', 'With init: the name of the run.')
_LEARNER = flags.DEFINE_string('learner', '', 'With sign: the id of the learner.')
_RENEW = flags.DEFINE_bool('renew', False, 'With issue, sign: replace the present certificate.')


def main(argv: list[str]) -> None:
  words = argv[1:]
  commands = {
    'init': (_init, 0, '--name=NAME'),
    'issue': (_issue, None, 'ID ...'),
    'csr': (_csr, 1, 'FOLDER'),
    'sign': (_sign, 1, 'REQUEST.pem --learner=ID'),
    'revoke': (_revoke, 1, 'ID'),
    'list': (_list, 0, ''),
    'check': (_check, 1, 'FOLDER'),
  }  # and how many words follow each, None: one or more
  if not words or words[0] not in commands:
    raise exits.NeverRetry(f'diloco certs {"|".join(commands)}; diloco certs --help')
  run, count, usage = commands[words[0]]
  with exits.never_retry(ValueError, OSError):
    if len(words) == 1 if count is None else len(words) - 1 != count:
      raise ValueError(f'usage: diloco certs {words[0]} {usage}'.rstrip())
    run(*words[1:])


def _init() -> None:
  if not _NAME.value:
    raise ValueError('init needs the name of the run, --name=NAME')
  owner = authority.init(_folder(), _NAME.value, proofs.utc_now())
  print(
    f'made the authority of run {owner.run} in {owner.folder}, and '
    f'{owner.folder / names.SYNCER} for its syncer; next: diloco certs issue l0'
  )


def _issue(*ids: str) -> None:
  owner = authority.load(_folder())
  for id in ids:
    proof = owner.issue(id, proofs.utc_now(), _RENEW.value)
    print(f'{proof.name.uri}: {owner.folder / id}, until {proofs.date(proof.not_after)}')


def _csr(folder: str) -> None:
  path = authority.request(pathlib.Path(folder))
  print(
    f'made {path}: send it to the owner of the run, and put the ca.pem and cert.pem that come back '
    f'into {path.parent}'
  )


def _sign(path: str) -> None:
  if not _LEARNER.value:
    raise ValueError('sign needs the id of the learner, --learner=ID: the owner gives the name')
  if _LEARNER.value == names.SYNCER:
    raise ValueError("sign is for learners; the syncer's key is made by init")
  owner = authority.load(_folder())
  request = private.read(pathlib.Path(path))
  proof = owner.sign(request, _LEARNER.value, proofs.utc_now(), _RENEW.value)
  authority_file, certificate = (
    owner.folder / _LEARNER.value / name for name in (check_lib.AUTHORITY, check_lib.CERTIFICATE)
  )
  until = proofs.date(proof.not_after)
  print(f'{proof.name.uri}: send {authority_file} and {certificate} back, until {until}')


def _revoke(id: str) -> None:
  owner = authority.load(_folder())
  number = owner.revoke(id)
  print(
    f'{id}: {number} certificates are no longer accepted, once the syncer has '
    f'{owner.folder / names.SYNCER / allowlist.FILE}'
  )


def _list() -> None:
  owner, now = authority.load(_folder()), proofs.utc_now()
  ends = owner.certificate.not_valid_after_utc
  print(f'run {owner.run}; its authority ends at {proofs.date(ends)}')
  listed = owner.allowlist().listed
  for proof in owner.issued():
    name = proof.name
    state = 'accepted'
    if name.role == names.LEARNER and proof.sha256 not in listed.get(name.id, ()):
      state = 'revoked'
    if now >= proof.not_after:
      state = 'ended'
    print(f'{name.id:12} {name.role:8} {state:9} until {proofs.date(proof.not_after)}')


def _check(path: str) -> None:
  folder, now = pathlib.Path(path), proofs.utc_now()
  role = names.SYNCER if (folder / allowlist.FILE).exists() else names.LEARNER
  identity = check_lib.read(folder, role, now)
  if role == names.SYNCER:
    allowlist.read(folder)
  print(f'{identity.proof.name.uri}: in order until {proofs.date(identity.proof.not_after)}')
  if warning := check_lib.warning(identity.proof, now):
    print(warning)


def _folder() -> pathlib.Path:
  return pathlib.Path(_TLS.value).absolute()
