"""A real browser, and what one sees in it."""

import contextlib
import pathlib
import shutil
import threading
from collections.abc import Iterator

import pytest

from diloco_jax.report import serve

PHONE, DESK = {'width': 390, 'height': 800}, {'width': 1280, 'height': 900}
# Each text that is shown with less contrast than 4.5:1, and its contrast.
_PALE = r"""() => {
  const rgb = text => (text.match(/[\d.]+/g) ?? []).map(Number), weights = [.2126, .7152, .0722];
  const linear = x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4;
  const light = colour => weights.reduce((sum, part, i) => sum + part * linear(colour[i] / 255), 0);
  const behind = one => {
    for (; one; one = one.parentElement) {
      const found = rgb(getComputedStyle(one).backgroundColor);
      if (found.length == 3 || found[3] > .9) return found;
    }
    return matchMedia('(prefers-color-scheme: dark)').matches ? [0, 0, 0] : [255, 255, 255];
  };
  const ratio = one => {
    const style = getComputedStyle(one), ink = one instanceof SVGElement ? style.fill : style.color;
    const [dark, bright] = [light(rgb(ink)), light(behind(one))].sort((a, b) => a - b);
    return (bright + .05) / (dark + .05);
  };
  const says = one => [...one.childNodes].some(node => node.nodeType == 3 && node.data.trim());
  return [...document.querySelectorAll('body *:not(script, style)')]
    .filter(one => one.checkVisibility() && says(one))
    .map(one => [one.textContent.trim().slice(0, 40), ratio(one)]).filter(one => one[1] < 4.5);
}"""


@contextlib.contextmanager
def served(workdir: pathlib.Path) -> Iterator[str]:
  """The URL of the page of a run."""
  server, url = serve.make(workdir)
  thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.01})
  thread.start()
  try:
    yield url
  finally:
    server.shutdown()
    server.server_close()
    thread.join()


@contextlib.contextmanager
def started() -> Iterator:
  sync_api = pytest.importorskip('playwright.sync_api', reason='pip install playwright')
  chromium = shutil.which('chromium') or shutil.which('google-chrome')
  if chromium is None:
    pytest.skip('no browser: apt install chromium')
  with sync_api.sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=chromium, args=['--no-sandbox'])
    yield browser
    browser.close()


def opened(browser, url: str, said: list[str], **how):
  """A page of the browser; errors on its console are appended to `said`."""
  shown = browser.new_page(**how)
  shown.on('console', lambda message: message.type == 'error' and said.append(message.text))
  shown.on('pageerror', lambda error: said.append(str(error)))
  shown.goto(url)
  return shown


def pale(shown) -> list[tuple[str, float]]:
  """Texts whose contrast is below 4.5:1."""
  return shown.evaluate(_PALE)


def width(shown) -> int:
  return shown.evaluate('document.documentElement.scrollWidth')
