"""What no retry would help is refused before anything is begun."""

import pytest

from diloco_jax.configs import stdlib_lm
from diloco_jax.launch import entrypoints, program


def test_a_learner_id_that_is_no_name_is_refused(tmp_path):
  with pytest.raises(program.NeverRetry, match="--learner_id='L0!'"):
    entrypoints.learner(stdlib_lm.get_config('tiny'), str(tmp_path / 'run'), 'L0!', 'none')
  assert not (tmp_path / 'run').exists()
