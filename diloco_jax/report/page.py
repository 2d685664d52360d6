"""The page of a run (report/web), as files of a server or as one file without any.

Its charts are uPlot 1.6.32 by Leon Sorokin (github.com/leeoniya/uPlot, MIT licence).
"""

import json
import pathlib
import re
from typing import Any

PAGE, _CHART = 'page.html', 'uPlot.iife.min.js'
FILES = (PAGE, 'page.js', 'page.css', _CHART, 'uPlot.min.css')
_WEB = pathlib.Path(__file__).parent / 'web'
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


def text(name: str) -> str:
  return (_WEB / name).read_text('utf-8')


def inline(states: list[dict[str, Any]]) -> str:
  """HTML of one file, which a browser opens from disk and which loads nothing. Several runs, each
  as report/state.py gives it, are drawn into one chart."""
  data = json.dumps(states, separators=(',', ':')).replace('<', '\\u003c')
  page = re.sub(r'<link rel="stylesheet" href="(.*)">', _style, text(PAGE))
  page = re.sub(r'<script src="(.*)"></script>', _script, page)
  page = page.replace(
    '<!-- head -->', f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
  )
  return page.replace('<!-- data -->', f'<script id="data" type="application/json">{data}</script>')


def _style(found: re.Match) -> str:
  return f'<style>{text(found[1])}</style>'


def _script(found: re.Match) -> str:
  """uPlot has its licence in the place of its first line, a link."""
  script = text(found[1])
  if found[1] == _CHART:
    script = f'/* {text("uPlot.LICENSE")} */\n' + script.partition('\n')[2]
  return f'<script>{script}</script>'
