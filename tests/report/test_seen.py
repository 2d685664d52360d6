"""What one sees of a run, in a browser: axes, words, contrast; and that it stays."""

import math
import pathlib
import re

import pytest

from diloco_jax.config import load
from diloco_jax.configs import stdlib_lm
from diloco_jax.report import beside, page
from diloco_jax.report import folder as folder_lib
from diloco_jax.report import state as state_lib
from diloco_jax.report import summary as summary_lib
from tests.report import browsers, test_matrix
from tests.report.rows import add, add_of, child, evaluation, exited, ledger, row, step, synced

pytestmark = pytest.mark.full
_AXES = """() => [1, 0].map(i => {
  const axis = plots.loss.axes[i], ctx = plots.loss.ctx;
  ctx.font = axis.font[0];
  return axis._splits.map((x, k) => [plots.loss.valToPos(x, 'xy'[i]),
    ctx.measureText(axis._values[k] ?? '').width / devicePixelRatio, axis._values[k]]);
})"""

_CUT_OFF = (
  '#runs .wide',
  """all => all.filter(one => one.scrollWidth > one.clientWidth)
  .map(one => one.innerText)""",
)


@pytest.fixture(name='browser', scope='module')
def _browser():
  with browsers.started() as browser:
    yield browser


def write(workdir: pathlib.Path, first: float, last: float, steps: int = 60) -> pathlib.Path:
  """A run of two learners whose loss falls from `first` to `last`; l1 is killed and comes back, and
  no outer step comes for a minute."""
  workdir.mkdir(exist_ok=True)
  load.write(workdir, stdlib_lm.get_config('tiny'))
  add(workdir, *[child(0, name, 'starting') for name in ('syncer', 'l0', 'l1')])
  for name in ('l0', 'l1'):
    losses = [first * (last / first) ** (i / 59) for i in range(steps)]
    add_of(workdir, name, *[step(10 + i, i + 1, i + 1, loss) for i, loss in enumerate(losses)])
  merges = [11 + i + 60 * (i > 10) for i in range(40)]
  add_of(workdir, 'syncer', *[row(s, synced(i, 'l0', 'l1')) for i, s in enumerate(merges, 1)])
  add_of(workdir, 'syncer', *[evaluation(12 + i, i, first) for i in range(3)])
  add(workdir, ('syncer', row(111, ledger(1, {}))))
  add(workdir, child(115, 'l1', 'down', 'killed'), exited(115, 'l1', -9))
  return workdir


def open_file(browser, workdir: pathlib.Path, said: list[str], **how):
  file = workdir / 'seen.html'
  file.write_text(page.inline([summary_lib.state_of(folder_lib.read(workdir))]))
  shown = browsers.opened(browser, file.as_uri(), said, **how)
  shown.wait_for_selector('#runs td')
  return shown


@pytest.mark.parametrize(
  'losses', [(7.1, 6.7), (5.5, 4.3), (2.5, 0.01), (4.5, 4.5), (4.5, 4.5, 1)], ids=str
)
@pytest.mark.parametrize('view', [browsers.PHONE, browsers.DESK], ids=['phone', 'desk'])
def test_the_loss_has_axes_that_can_be_read(browser, tmp_path, losses, view):
  said = []
  shown = open_file(browser, write(tmp_path / 'run', *losses), said, viewport=view)
  y, x = shown.evaluate(_AXES)
  assert len(y) >= 3 and all(label for *_, label in y) and not said
  places = sorted(place for place, *_ in y)
  assert all(b - a >= 16 for a, b in zip(places, places[1:])), y
  labels = [label for label in x if label[2]]
  assert len(labels) >= 3
  for (place, width, _), (following, other, _) in zip(labels, labels[1:]):
    assert following - place >= (width + other) / 2, labels


@pytest.mark.parametrize('scheme', ['light', 'dark'])
@pytest.mark.parametrize('view', [browsers.PHONE, browsers.DESK], ids=['phone', 'desk'])
def test_a_page_is_readable_and_each_word_explained(browser, tmp_path, scheme, view):
  said, run = [], write(tmp_path / 'run', 5.5, 4.3)
  add(run, child(120, 'syncer', 'failed', 'no such host'))
  shown = open_file(browser, run, said, viewport=view, color_scheme=scheme)
  assert shown.title().endswith(' run') and 'no such host' in shown.inner_text('#notice')
  assert browsers.width(shown) <= view['width'] and not browsers.pale(shown) and not said
  assert not shown.eval_on_selector_all(*_CUT_OFF)
  marked = 'th[scope=col]:not(details *), .cards div, .key > span, .bar:not(.thin) i'
  words = shown.eval_on_selector_all(
    marked, 'some => some.map(one => [one.textContent, one.title])'
  )
  assert len(words) > 15 and all(title and title != text for text, title in words), words
  assert shown.locator('canvas').count() == 2
  assert shown.locator('canvas[role=img][aria-label], svg[role=img][aria-label]').count() == 3
  shown.focus('#explain')
  shown.keyboard.press('Enter')
  assert shown.locator('#words dd').first.is_visible()
  shown.focus('#values summary')
  shown.keyboard.press('Enter')
  assert '5.500' in shown.inner_text('#rows')


def test_a_line_of_counts_ends_where_no_outer_step_comes(browser, tmp_path):
  shown = open_file(browser, write(tmp_path / 'run', 5.5, 4.3), [], viewport=browsers.DESK)
  times, counts, *_ = shown.evaluate('plots.merges0.data')
  before = [count for at_s, count in zip(times, counts) if at_s < 80]
  assert before[-1] is None and before[-2] == 2 and {*counts} == {None, 2}
  left = [shown.evaluate('plots.merges0.bbox.left / devicePixelRatio'), 60]
  assert math.isclose(*left, abs_tol=1), 'the lanes above begin there'


def test_runs_beside_each_other_are_readable(browser, tmp_path):
  runs = [write(tmp_path / name, 5.5, 4.3) for name in ('a', 'b')]
  beside.write(beside.read(runs), tmp_path)
  for view in (browsers.PHONE, browsers.DESK):
    file, said = tmp_path / 'beside.html', []
    shown = browsers.opened(browser, file.as_uri(), said, viewport=view)
    shown.wait_for_selector('#runs td')
    assert browsers.width(shown) <= view['width'] and not browsers.pale(shown) and not said
    assert not shown.eval_on_selector_all(*_CUT_OFF)
    tops = shown.eval_on_selector_all('#runs > div', 'all => all.map(one => one.offsetTop)')
    assert (tops[0] == tops[1]) == (view is browsers.DESK)


@pytest.mark.parametrize('scheme', ['light', 'dark'])
@pytest.mark.parametrize('view', [browsers.PHONE, browsers.DESK], ids=['phone', 'desk'])
@pytest.mark.parametrize('what', test_matrix.SITUATIONS)
def test_the_page_says_what_is_so(browser, tmp_path, what, view, scheme):
  """The matrix, as a person sees it: text and notices, and nothing of the past."""
  so, said = test_matrix.SITUATIONS[what], []
  count = 64 if scheme == 'dark' and what in ('all train', 'its loader blocks') else 3
  read = test_matrix.read(test_matrix.write(tmp_path, what, count), so.now)
  file, state = tmp_path / 'seen.html', state_lib.state(read.run, read.config, 'run')
  file.write_text(page.inline([state]))
  how = {'viewport': view, 'color_scheme': scheme}
  shown = browsers.opened(browser, file.as_uri(), said, **how)
  shown.wait_for_selector('#top h1')
  text = shown.inner_text('body')
  assert not said and browsers.width(shown) <= view['width'] and not browsers.pale(shown)
  assert not re.search(so.never, text) and '1970' not in text and 'as of' in text or not so.program
  for line in state['notices']:
    assert line in shown.inner_text('#notice')
  if so.program.startswith('l'):
    assert state['learners'][so.program]['condition']['text'] in text or count == 64
  shown.close()


def test_of_many_lanes_those_that_were_killed_have_their_names(browser, tmp_path):
  run = test_matrix.write(tmp_path, 'all train', 64)
  add(run, *[exited(test_matrix.BEGAN + 50, name, -9) for name in ('l16', 'l29')])
  shown = open_file(browser, run, [], viewport=browsers.DESK)
  boxes = """all => all.filter(one => one.textContent).map(one => one.getBoundingClientRect())
    .map(box => [box.top, box.bottom])"""
  lanes = shown.eval_on_selector_all('svg text.lane', boxes)
  names = shown.eval_on_selector_all('svg text.lane', 'all => all.map(one => one.textContent)')
  assert {'syncer', 'l16', 'l29'} <= {*names} and len({*names}) > 8
  assert all(bottom <= top + 1 for (_, bottom), (top, _) in zip(lanes, lanes[1:])), names
  shown.close()


def test_what_is_printed_has_its_colours(browser, tmp_path):
  shown = open_file(browser, write(tmp_path / 'run', 5.5, 4.3), [], viewport=browsers.DESK)
  shown.emulate_media(media='print')
  of = lambda what: f"getComputedStyle(document.querySelector('#runs {what}"
  assert shown.evaluate(of(".bar i')).printColorAdjust")) == 'exact'
  assert shown.evaluate(of("h2')).breakAfter")) == 'avoid', 'its chart is on the same page'


def test_a_page_that_is_opened_before_the_first_record_waits_for_it(browser, tmp_path):
  said = []
  load.write(tmp_path, stdlib_lm.get_config('tiny'))
  (tmp_path / 'records').mkdir()
  with browsers.served(tmp_path) as url:
    shown = browsers.opened(browser, url, said, viewport=browsers.DESK)
    shown.wait_for_selector('#notice:not([hidden])')
    text = shown.inner_text('body')
    assert 'Waiting for the first record' in text and '1970' not in text and not said
    shown.close()


def test_a_live_page_leaves_its_reader_in_place(browser, tmp_path):
  run, said = write(tmp_path / 'run', 5.5, 4.3, steps=10), []
  add(run, *[child(116 + i, f'l{i % 2}', 'starting') for i in range(20)])
  with browsers.served(run) as url:
    shown = browsers.opened(browser, url, said, viewport=browsers.DESK)
    shown.wait_for_selector('#events0 li')
    shown.focus('#lives0-head')
    shown.keyboard.press('Enter')
    shown.evaluate("$('events0').scrollTop = 60")
    before = shown.locator('#events0 li').count()
    dotted = 'plots.loss.series.slice(1).map(one => one.points.show())'
    assert shown.evaluate(dotted) == [True, True, True]
    more = [step(137 + i / 10, 10 + i, i, 4.0) for i in range(1, 31)]
    add(run, *[('l0', line) for line in more], child(140, 'l0', 'starting'))
    shown.wait_for_selector(f'#events0 li:nth-child({before + 1})', state='attached')
    assert shown.evaluate("$('events0').scrollTop") >= 60 and not said
    assert shown.evaluate("$('lives0').open && document.activeElement.id") == 'lives0-head'
    assert shown.evaluate(dotted) == [False, True, True], 'of many points there is a line alone'
    shown.close()
