"""The page of a run (report/web): served while it trains, or one file without a server.

The chart is uPlot 1.6.32 by Leon Sorokin (https://github.com/leeoniya/uPlot), MIT licence.
"""

import json
import pathlib
import re
from typing import Any

WEB = pathlib.Path(__file__).parent / 'web'
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


def inline(states: list[dict[str, Any]]) -> str:
  """HTML of one file, which a browser opens from disk and which loads nothing. Several runs, each
  as report/state.py gives it, are drawn into one chart."""
  data = json.dumps(states, separators=(',', ':')).replace('<', '\\u003c')
  head = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
  page = re.sub(r'<link rel="stylesheet" href="(.*)">', _style, _text('page.html'))
  page = re.sub(r'<script src="(.*)"></script>', _script, page)
  data = f'<script id="data" type="application/json">{data}</script>'
  return page.replace('<!-- head -->', head).replace('<!-- runs -->', data)


def _text(name: str) -> str:
  return (WEB / name).read_text('utf-8')


def _style(found: re.Match) -> str:
  return f'<style>{_text(found[1])}</style>'


def _script(found: re.Match) -> str:
  """The script; that of a library with its licence instead of its first comment, a link."""
  text, licence = _text(found[1]).replace('</script', '<\\/script'), ''
  if (WEB / f'{found[1].split(".")[0]}.LICENSE').is_file():
    licence = f'/* {_text("uPlot.LICENSE")} */\n'
    text = text.partition('\n')[2]
  return f'<script>{licence}{text}</script>'
