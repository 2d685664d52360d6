"""The page of a run (report/web): served while it trains, or one file without a server.

The chart is uPlot 1.6.32 by Leon Sorokin (https://github.com/leeoniya/uPlot), MIT licence.
"""

import json
import pathlib
import re
from typing import Any

CHART = 'uPlot.iife.min.js'
FILES = ('page.js', 'page.css', CHART, 'uPlot.min.css')  # that page.html loads
_WEB = pathlib.Path(__file__).parent / 'web'
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


def inline(states: list[dict[str, Any]]) -> str:
  """HTML of one file, which a browser opens from disk and which loads nothing. Several runs, each
  as report/state.py gives it, are drawn into one chart."""
  data = json.dumps(states, separators=(',', ':')).replace('<', '\\u003c')
  head = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
  page = re.sub(r'<link rel="stylesheet" href="(.*)">', _style, text('page.html'))
  page = re.sub(r'<script src="(.*)"></script>', _script, page)
  data = f'<script id="data" type="application/json">{data}</script>'
  return page.replace('<!-- head -->', head).replace('<!-- runs -->', data)


def text(name: str) -> str:
  return (_WEB / name).read_text('utf-8')


def _style(found: re.Match) -> str:
  return f'<style>{text(found[1])}</style>'


def _script(found: re.Match) -> str:
  """A script; uPlot's with its licence instead of its first line, a link."""
  script = text(found[1]).replace('</script', '<\\/script')
  if found[1] == CHART:
    script = f'/* {text("uPlot.LICENSE")} */\n' + script.partition('\n')[2]
  return f'<script>{script}</script>'
