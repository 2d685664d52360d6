'use strict';
const COLOURS = ['#0072B2', '#E69F00', '#009E73', '#CC79A7', '#56B4E9', '#D55E00', '#B8A800', '#999999'];
const STATES = {training: '#009E73', merging: '#009E73', alone: '#E69F00', starting: '#56B4E9',
  waiting: '#888888', done: '#0072B2', trained: '#0072B2'};  // any other one is bad
const SPENT = {merged_progress: '#009E73', wasted_progress: '#D55E00', slow_step: '#E69F00', data_wait: '#B8A800',
  comm_exposed: '#CC79A7', checkpoint_save_blocking: '#882255', wait_quorum: '#56B4E9',
  wait_straggler: '#88CCEE', syncer_down: '#5533AA', init: '#BBBBBB', prep: '#999999', startup_compile:
  '#777777', checkpoint_restore: '#117733', infra_recovery: '#AA2211', after_end: '#8886', other: '#DDCC77'};
const PAUSE_S = 30;  // a longer time without a process is drawn as so much
const $ = id => document.getElementById(id), colour = i => COLOURS[i % COLOURS.length];
const el = (tag, values, ...children) => {
  const made = tag in {svg: 1, rect: 1, text: 1, path: 1}
    ? document.createElementNS($('mark').namespaceURI, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(values))
    if (name == 'style') made.style.cssText = value; else made.setAttribute(name, value);
  made.append(...children);
  return made;
};
const dot = (fill, text) => el('span', {}, el('span', {class: 'dot', style: `background:${fill}`}), text);
const num = (x, digits = 0) => x == null ? '–'
  : x.toLocaleString('en', {maximumFractionDigits: digits, minimumFractionDigits: digits});
const percent = x => x == null ? '–' : num(100 * x, 1) + ' %';
const si = (x, step = x / 100) => {  // with the digits that tell ticks of this distance apart
  const power = Math.max(0, Math.min(5, Math.floor(Math.log10(Math.max(x, 1)) / 3 + 1e-9)));
  const digits = Math.ceil(-Math.log10(step / 1000 ** power) - 1e-9);
  return num(x / 1000 ** power, Math.max(0, Math.min(3, digits)) || 0) + ['', ' k', ' M', ' G', ' T', ' P'][power];
};
const time = s => s == null ? '–' : s < 120 ? num(s) + ' s' : s < 7200
  ? num(Math.floor(s / 60)) + ' min' + (s % 60 >= 1 ? ` ${num(s % 60)} s` : '')
  : num(Math.floor(s / 3600)) + ' h' + (s % 3600 >= 60 ? ` ${num(s % 3600 / 60)} min` : '');
const table = (head, rows) => el('div', {class: 'wide'}, el('table', {}, ...[head.map(one => one[0]), ...rows].map(
  (cells, i) => el('tr', {}, ...cells.map((cell, k) => el(i ? 'td' : 'th', {class: head[k][1] ?? ''}, cell))))));
const clock = (s, how) => new Date(1000 * s).toLocaleString(undefined, how);
const lives = run => [run.syncer_lives, ...Object.values(run.learners).map(one => one.lives)];

function shorten(run) {  // times without the long part of each pause
  const pauses = [];
  let until = 0;
  for (const [began, , end] of lives(run).flat().sort((a, b) => a[0] - b[0])) {
    if (began - until > PAUSE_S) pauses.push([until, began - until]);
    until = Math.max(until, end);
  }
  const short = s => pauses.reduce((t, [at, long]) => t - Math.max(0, Math.min(long, s - at) - PAUSE_S), s);
  return [short, pauses];
}

const plots = {};
function plot(id, tables, series, options) {  // a new chart only if its lines or its page change
  const ink = getComputedStyle(document.body).color, width = $(id).clientWidth;
  const key = JSON.stringify([series.map(one => one.label), ink, width]), data = uPlot.join(tables);
  if (plots[id]?.key == key && $(id).firstChild) return plots[id].setData(data);
  const axis = {stroke: ink, grid: {stroke: '#8883', width: 1}, ticks: {stroke: '#8883'}};
  const near = (u, s, i) => {  // the nearest point of each line
    for (let d = 0, y = u.data[s]; d < y.length; d++)
      for (const k of [i - d, i + d]) if (y[k] != null) return k;
    return i;
  };
  $(id).replaceChildren();
  plots[id] = new uPlot({width, cursor: {dataIdx: near}, ...options, axes: options.axes.map(one => ({...axis, ...one})),
    series: series.map(one => ({points: {show: false}, ...one, stroke: one.stroke ?? ink}))}, data, $(id));
  plots[id].key = key;
}

function drawLoss(runs) {
  const tables = [], marks = [], series = [{label: 'tokens', value: (_, x) => x == null ? '' : si(x)}];
  const add = (label, table, stroke, more) => {
    tables.push(table);
    series.push({label, stroke, width: 1, value: (_, y) => num(y, 3), ...more});
  };
  const many = runs.length > 1, thick = {width: 2.5, points: {show: true, size: 6}};
  runs.forEach((run, r) => {
    Object.entries(run.learners).forEach(([name, one], i) => {
      const [tokens, losses, ended] = one.curve, stroke = colour(many ? r : i);
      if (tokens.length) add(many ? `${run.name} ${name}` : name, [tokens, losses], stroke + (many ? '66' : ''));
      ended.forEach((how, k) => ['killed', 'failed'].includes(how) && marks.push([tokens[k], losses[k], stroke]));
    });
    if (run.held_out[0].length) add(many ? `${run.name} held-out` : 'held-out', run.held_out, many ? colour(r) : undefined, thick);
  });
  if (!tables.length) return;
  const losses = tables.flatMap(one => one[1]).filter(y => y != null), log = Math.min(...losses) > 0;
  const nice = (u, _, low, high) => [-3, -2, -1, 0, 1, 2, 3].flatMap(e => [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8]
    .map(x => x * 10 ** e)).filter(x => low <= x && x <= high);
  drawLoss.marks = marks;
  plot('loss', tables, series, {height: 320,
    scales: {x: {time: false}, y: log ? {distr: 3, range: (_, low, high) => [low / 1.04, high * 1.04]} : {}},
    axes: [{values: (_, ticks, a, b, step) => ticks.map(x => si(x, step))},
      log ? {splits: nice, filter: (_, ticks) => ticks, values: (_, ticks) => ticks.map(x => String(+x.toPrecision(2)))} : {}],
    hooks: {draw: [u => drawLoss.marks.forEach(([x, y, stroke]) => {
      Object.assign(u.ctx, {fillStyle: stroke, font: `${16 * devicePixelRatio}px sans-serif`, textAlign: 'center', textBaseline: 'middle'});
      u.ctx.fillText('✖', u.valToPos(x, 'x', true), u.valToPos(y, 'y', true));
    })]}});
}

function drawLanes(run, short, pauses) {
  const names = Object.keys(run.learners), rows = ['syncer', ...names], width = $('runs').clientWidth;
  const left = 60, high = 28, end_s = short(run.end_s), x = s => left + (width - left - 24) * short(s) / Math.max(1e-3, end_s);
  const lane = ([began, first, end, how], fill, y) => [el('rect', {x: x(began), y, width: x(first ?? end) - x(began), height: 14, fill, opacity: .3}),
    el('rect', {x: x(first ?? end), y, width: x(end) - x(first ?? end), height: 14, fill}),
    ...['killed', 'failed'].includes(how) ? [el('text', {x: x(end), y: y + 12, 'text-anchor': 'middle', 'font-size': 16}, '✖')] : []];
  const step_s = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400, 604800].find(s => end_s / s < width / 80) ?? 2e6;
  const ticks = Array.from({length: Math.floor(end_s / step_s) + 1}, (_, i) => i * step_s);
  return el('svg', {height: rows.length * high + 26},
    ...rows.flatMap((name, i) => [el('text', {x: 0, y: i * high + 19}, name),
      ...lives(run)[i].flatMap(one => lane(one, i ? colour(i - 1) : '#777777', i * high + 8)),
      ...i ? [el('path', {d: run.learners[name].merges_s.map(s => `M${x(s).toFixed(1)} ${i * high + 2}v5`).join('') || 'M0 0'})] : []]),
    ...pauses.map(([s, long]) => el('text', {x: x(s), y: rows.length * high + 8}, `┆ ${time(long)} pause`)),
    ...ticks.map(s => el('text', {x: left + (width - left - 24) * s / end_s, y: rows.length * high + 20, opacity: .7}, time(s))));
}

function drawRun(run, r, many) {
  const names = Object.keys(run.learners), [short, pauses] = shorten(run), title = (text, hint) => el('h2', {}, text + ' ', el('small', {}, hint));
  const rows = names.map((name, i) => { const one = run.learners[name]; return [dot(colour(i), name),
    el('span', {style: `color:${STATES[one.state] ?? '#D55E00'}`}, one.state), num(one.step), num(one.tokens_per_second),
    num(one.loss, 3), percent(one.goodput), num(one.merged), num(one.staleness), num(one.incarnation)]; });
  const spent = names.map((name, i) => [name, Object.entries(run.learners[name].spent_s)]), sum = {};
  for (const [category, s] of spent.flatMap(one => one[1])) sum[category] = (sum[category] ?? 0) + s;
  const all = Object.values(sum).reduce((a, b) => a + b, 0);
  return el('div', {}, ...many ? [el('h1', {style: `color:${colour(r)};margin-top:30px`}, run.name)] : [],
    title('Learners', ''), table([['learner'], ['state', 'text'], ['step'], ['tokens/s'], ['loss'], ['goodput'], ['merged', 'more'], ['staleness', 'more'], ['incarnation', 'more']], rows),
    title('Processes against time', `light: starting, ticks: merged, ✖ killed; began ${clock(run.began_s, {timeZoneName: 'short'})}`), drawLanes(run, short, pauses),
    title('Where the time went', ''), table([['learner'], ['', 'rest']], spent.map(([name, parts]) => [name, el('div', {class: 'bar'},
      ...parts.map(([category, s]) => el('i', {style: `flex:${s};background:${SPENT[category]}`, title: `${category} ${time(s)}`})))])),
    el('div', {class: 'key'}, ...Object.entries(sum).sort((a, b) => b[1] - a[1]).map(([category, s]) => dot(SPENT[category], `${category} ${percent(s / all)}`))),
    title('Outer steps against seconds', ''), el('div', {id: `merges${r}`}),
    title('Events', ''), el('ol', {}, ...run.events.map(([s, who, what]) => el('li', {},
      el('time', {}, `${time(s)} · ${clock(run.began_s + s, {timeStyle: 'medium'})}`), el('b', {}, who + ' '), what))));
}

function draw(runs) {
  const many = runs.length > 1, [first] = runs, part = run => Math.floor(100 * run.progress) + ' %';
  document.title = many ? runs.map(run => run.name).join(' | ') : `${part(first)} ${first.name}`;
  const figures = run => { const f = run.figures, w = run.wire, held = run.held_out[1]; return [
    ['held-out loss', num(held[held.length - 1], 3)], ['tokens', si(run.tokens)], ['tokens/s', num(run.tokens_per_second)], ['outer steps', num(run.outer_steps)],
    ['goodput', percent(f.training)], ['token goodput', percent(f.token)], ['on the wire', si(w.up + w.down) + 'B', w.parallel ? `data-parallel: ${si(w.parallel)}B` : '']]; };
  $('top').replaceChildren(...many ? [el('h1', {}, 'Runs'), table([['run'], ['done'], ...figures(first).map(one => [one[0]])],
    runs.map((run, r) => [dot(colour(r), `${run.name} (${run.about})`), part(run), ...figures(run).map(one => one[1])]))]
    : [el('h1', {}, first.name, ' ', el('small', {}, first.about)), el('span', {}, `${part(first)} of ${num(first.total_steps)} steps, ${time(first.end_s)}`
      + (first.seconds_left ? `, about ${time(first.seconds_left)} left` : '')),
      el('div', {class: 'bar thin'}, el('i', {style: `width:${100 * first.progress}%;background:#0072B2`})),
      el('div', {class: 'cards'}, ...figures(first).map(([name, value, more]) => el('div', {}, el('small', {}, name), el('b', {}, value), el('small', {}, more ?? ''))))]);
  drawLoss(runs);
  $('runs').replaceChildren(...runs.map((run, r) => drawRun(run, r, many)));
  runs.forEach((run, r) => run.merges[0].length && plot(`merges${r}`, run.merges.slice(1).map(column => [run.merges[0], column]), [{label: 'seconds'},
    {label: 'participants', stroke: colour(0)}, {label: 'connected', stroke: '#888888', dash: [4, 3]}, {label: 'staleness', stroke: colour(5)}],
    {height: 150, scales: {x: {time: false}}, axes: [{}, {size: 30}]}));
}

let shown = $('data') && JSON.parse($('data').textContent);
addEventListener('resize', () => shown && draw(shown));
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => shown && draw(shown));
if (shown) draw(shown);
else {
  const source = new EventSource('events'), notice = text => { $('notice').hidden = !text; $('notice').textContent = text; };
  source.onerror = () => notice('The page has lost its server: what is below is old.');
  source.onmessage = event => {
    draw(shown = JSON.parse(event.data));
    const silent = Date.now() / 1000 - shown[0].began_s - shown[0].end_s;
    notice(silent > 10 && shown[0].progress < 1 ? `No process has recorded anything for ${time(silent)}.` : '');
  };
}
