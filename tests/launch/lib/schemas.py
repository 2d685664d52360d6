"""What is wrong in Kubernetes manifests, by the schemas of Kubernetes and of JobSet.

Both are strict here: a field that a schema does not name is an error, which a cluster would drop
without a word.
"""

import functools
import gzip
import json
import pathlib
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from kubernetes_validate import utils

VERSION = '1.34'  # of Kubernetes
_LOADER = getattr(yaml, 'CSafeLoader', yaml.SafeLoader)
_CRD = pathlib.Path(__file__).resolve().parents[1] / 'data' / 'jobset_crd.json.gz'

# It reads megabytes of JSON for each document.
utils.schema_contents = functools.cache(utils.schema_contents)


def documents(text: str) -> list[dict[str, Any]]:
  return list(yaml.load_all(text, _LOADER))


def errors(text: str) -> list[str]:
  """What is wrong in the documents of a manifest; [] if nothing is."""
  wrong = []
  for document in documents(text):
    wrong += _of_job_set(document) if document['kind'] == 'JobSet' else _of_core(document)
  return wrong


def _of_job_set(document: dict[str, Any]) -> list[str]:
  errors_of_set = _job_set().iter_errors(document)
  wrong = [f'JobSet {list(error.absolute_path)}: {error.message}' for error in errors_of_set]
  for job in document['spec'].get('replicatedJobs', ()):
    spec = job.get('template', {}).get('spec')
    plain = {'apiVersion': 'batch/v1', 'kind': 'Job', 'metadata': {'name': 'job'}, 'spec': spec}
    wrong += _of_core(plain)
  return wrong


def _of_core(document: dict[str, Any]) -> list[str]:
  try:
    kubernetes_validate.validate(document, VERSION, strict=True)
  except kubernetes_validate.ValidationError as error:
    return [f'{document["kind"]}: {error}']
  return []


@functools.cache
def _job_set() -> jsonschema.Draft202012Validator:
  schema = _closed(json.loads(gzip.decompress(_CRD.read_bytes()))['schema'])
  schema['properties']['metadata'] = {'type': 'object'}
  return jsonschema.Draft202012Validator(schema)


def _closed(schema: Any) -> Any:
  """The schema with no fields but those that it names."""
  if isinstance(schema, list):
    return [_closed(part) for part in schema]
  if not isinstance(schema, dict):
    return schema
  closed = {name: _closed(part) for name, part in schema.items()}
  if closed.pop('x-kubernetes-int-or-string', False):
    closed = {**closed, 'anyOf': [{'type': 'integer'}, {'type': 'string'}]}
  if closed.get('type') == 'object' and isinstance(closed.get('properties'), dict):
    closed.setdefault('additionalProperties', False)
  return closed
