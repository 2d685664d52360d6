"""Starts a Ray cluster of several machines on this one: RAY_PYTHON ray_machines.py FOLDER MACHINES.

MACHINES is JSON, the resources of each machine by its name. Each is a raylet whose environment says
where its disk is, MACHINE=FOLDER/NAME, so that the programs on it have folders of their own. The
head of the cluster runs no program. Writes the address of the cluster, and ends with its input.
"""

import json
import os
import pathlib
import sys

os.environ.update(RAY_USAGE_STATS_ENABLED='0', RAY_worker_niceness='0')

from ray import cluster_utils


def main(folder: str, machines: str) -> None:
  common = {'object_store_memory': 80_000_000}
  cluster = cluster_utils.Cluster(
    initialize_head=True, head_node_args={'num_cpus': 0, 'include_dashboard': False, **common}
  )
  for name, resources in json.loads(machines).items():
    os.environ['MACHINE'] = str(pathlib.Path(folder, name))
    cluster.add_node(wait=False, num_cpus=8, resources=resources, **common)
  cluster.wait_for_nodes(600)
  print(cluster.address, flush=True)
  sys.stdin.read()
  cluster.shutdown()


if __name__ == '__main__':
  main(*sys.argv[1:])
