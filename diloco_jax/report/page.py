"""The page of a run (report/web), as files of a server or as one file without any. Its charts are
uPlot 1.6.32 of Leon Sorokin, MIT licence."""

import json
import pathlib
import re
from typing import Any

PAGE = 'page.html'
FILES = (PAGE, 'page.js', 'page.css', 'uPlot.iife.min.js', 'uPlot.min.css')
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


def text(name: str) -> str:
  return (pathlib.Path(__file__).parent / 'web' / name).read_text('utf-8')


def inline(states: list[dict[str, Any]]) -> str:
  """HTML of one file, which a browser opens from disk and which loads nothing. Several runs, each
  as report/state.py gives it, are drawn into one chart."""
  data = json.dumps(states, separators=(',', ':')).replace('<', '\\u003c')
  policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
  page = text(PAGE).replace('<!-- head -->', policy)
  style, script = '<link rel="stylesheet" href="(.*)">', '<script src="(.*)"></script>'
  page = re.sub(style, lambda match: f'<style>{text(match[1])}</style>', page)
  page = re.sub(script, lambda match: f'<script>{text(match[1])}</script>', page)
  data = f'<script id="data" type="application/json">{data}</script>'
  return page.replace('<!-- data -->', data)
