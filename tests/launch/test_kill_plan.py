"""A chaos plan is a function of its config."""

from diloco_jax.config import run_config
from diloco_jax.launch import kill_plan

_LEARNERS = ['l0', 'l1', 'l2', 'l3']


def plan(seed: int, *kills: run_config.KillConfig, enabled: bool = True) -> list[kill_plan.Kill]:
  config = run_config.ChaosConfig(enabled=enabled, seed=seed, kills=list(kills))
  return kill_plan.plan(config, _LEARNERS)


def test_the_seed_decides_the_victims():
  kills = [run_config.KillConfig(at_fraction=i / 10) for i in range(8)]
  assert plan(3, *kills) == plan(3, *kills)
  victims = {tuple(kill.victim for kill in plan(seed, *kills)) for seed in range(20)}
  assert len(victims) > 10
  assert {name for names in victims for name in names} == set(_LEARNERS)


def test_kills_are_in_order_of_time():
  late, early = (run_config.KillConfig(victim='l1', at_fraction=f) for f in (0.9, 0.1))
  assert [kill.at_fraction for kill in plan(0, late, early)] == [0.1, 0.9]


def test_no_kills_without_chaos():
  assert plan(0, run_config.KillConfig(), enabled=False) == []


def test_due_splits_at_the_progress():
  kills = plan(0, *(run_config.KillConfig(at_fraction=f) for f in (0.1, 0.5, 0.9)))
  due, later = kill_plan.due(kills, 0.5)
  assert [kill.at_fraction for kill in due] == [0.1, 0.5]
  assert [kill.at_fraction for kill in later] == [0.9]
