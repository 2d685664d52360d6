'use strict';
const COLOURS = '#0072B2 #E69F00 #009E73 #CC79A7 #56B4E9 #D55E00 #B8A800 #999999'.split(' '), BAD = '#D55E00', GREY = '#888888';
const STATES = {training: '#009E73', merging: '#009E73', alone: '#E69F00', starting: '#56B4E9', waiting: GREY,
  done: '#2A8FD0', trained: '#2A8FD0', stopped: GREY};  // any other one is bad
const SPENT = {merged_progress: '#009E73', wasted_progress: '#D55E00', slow_step: '#E69F00', data_wait: '#B8A800',
  comm_exposed: '#CC79A7', checkpoint_save_blocking: '#882255', wait_quorum: '#56B4E9', wait_straggler: '#88CCEE',
  syncer_down: '#5533AA', init: '#BBBBBB', prep: '#999999', startup_compile: '#777777', checkpoint_restore: '#117733',
  infra_recovery: '#AA2211', after_end: '#8886', other: '#DDCC77'};
const PAUSE_S = 30;  // a longer time without a process is drawn as so much
const $ = id => document.getElementById(id), colour = i => COLOURS[i % COLOURS.length];
const wide = id => Math.max(300, $(id).clientWidth), isKill = how => ['killed', 'failed', 'lost'].includes(how);
const el = (tag, values, ...children) => {
  const space = ['svg', 'rect', 'text', 'path'].includes(tag) ? $('mark').namespaceURI : document.body.namespaceURI;
  const made = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(values))
    if (name == 'style') made.style.cssText = value; else made.setAttribute(name, value);
  made.append(...children);
  return made;
};
const dot = (fill, text) => el('span', {}, el('span', {class: 'dot', style: `background:${fill}`}), text);
const head = (text, hint = '') => el('h2', {}, text + ' ', el('small', {}, hint));
const table = (titles, rows) => el('div', {class: 'wide'}, el('table', {}, ...[titles.map(one => one[0]), ...rows].map(
  (cells, i) => el('tr', {}, ...cells.map((cell, k) => el(i ? 'td' : 'th', {class: titles[k][1] ?? ''}, cell))))));
const num = (x, digits = 0) => x?.toLocaleString('en', {maximumFractionDigits: digits, minimumFractionDigits: digits}) ?? '–';
const percent = x => x == null ? '–' : num(100 * x, 1) + ' %';
const si = (x, step = Math.max(1, 10 ** Math.floor(Math.log10(x)) / 100)) => {  // with the digits of such steps
  const power = Math.max(0, Math.min(5, Math.floor(Math.log10(Math.max(x, 1)) / 3 + 1e-9))), unit = 1000 ** power;
  const digits = [0, 1, 2].find(d => Number.isInteger(+(step / unit * 10 ** d).toFixed(6))) ?? 3;
  return num(x / unit, x && digits) + ['', ' k', ' M', ' G', ' T', ' P'][power];
};
const time = s => s == null ? '–' : s < 120 ? num(s) + ' s'
  : s < 7200 ? num(s / 60, 1).replace('.0', '') + ' min' : num(s / 3600, 1).replace('.0', '') + ' h';
const clock = (s, how) => new Date(1000 * s).toLocaleString(undefined, how);
const lives = run => [run.syncer_lives, ...Object.values(run.learners).map(one => one.lives)];

const shorten = pauses => s => pauses.reduce((t, [at, long]) => t - Math.max(0, Math.min(long, s - at) - PAUSE_S), s);

const plots = {};
function plot(id, tables, series, options) {  // a new chart only if its lines, its width or its ink change
  const ink = getComputedStyle(document.body).color, width = wide(id);
  const data = uPlot.join(tables, tables.map(one => one.map(() => 2)));  // 2: a null ends a line, whatever others have beside it
  const key = JSON.stringify([series.map(one => one.label), ink, width, options.scales]);
  if (plots[id]?.key == key && $(id).firstChild) return plots[id].setData(data);
  const nearest = (u, s, i) => u.data[s].reduce((best, y, k) => y != null && Math.abs(k - i) < Math.abs(best - i) ? k : best, 1e9);
  $(id).replaceChildren();
  plots[id] = new uPlot({width, cursor: {dataIdx: nearest}, ...options,
    axes: options.axes.map(one => ({stroke: ink, grid: {stroke: '#8883', width: 1}, ticks: {stroke: '#8883'}, ...one})),
    series: series.map(one => ({points: {show: false}, ...one, stroke: one.stroke ?? ink}))}, data, $(id));
  plots[id].key = key;
}

function drawLoss(runs) {
  const many = runs.length > 1, tables = [], kills = [], series = [{label: 'tokens', value: (_, x) => x == null ? '' : si(x)}];
  const add = (label, columns, stroke, more) => {
    tables.push(columns);
    series.push({label, stroke, width: 1, value: (_, y) => num(y, 3), ...more});
  };
  runs.forEach((run, r) => {
    const prefix = many ? run.name + ' ' : '', held = {width: 2.5, points: {show: true, size: 6}};
    Object.entries(run.learners).forEach(([name, {curve: [tokens, losses, ended]}], i) => {
      if (tokens.length) add(prefix + name, [tokens, losses], many ? colour(r) + '66' : colour(i));
      ended.forEach((how, k) => isKill(how) && kills.push([tokens[k], losses[k]]));
    });
    if (run.held_out[0].length) add(prefix + 'held-out', run.held_out, many ? colour(r) : null, held);
  });
  kills.sort((a, b) => a[0] - b[0]);
  const marks = {paths: () => null, points: {show: true, size: 13, width: 3, fill: '#0000'}};
  if (kills.length) add('killed or lost', [0, 1].map(k => kills.map(one => one[k])), BAD, marks);
  const values = (_, ticks, axis, space, step) => ticks.map(x => si(x, step)), log = tables.flatMap(one => one[1]).every(y => y == null || y > 0);
  const splits = (u, axis, low, high) => [...Array(16).keys()].flatMap(e => [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8].map(x => x * 10 ** (e - 9)))
    .filter(x => low <= x && x <= high);
  const y = {splits, filter: (_, ticks) => ticks, values: (_, ticks) => ticks.map(x => `${+x.toPrecision(2)}`)};
  const scale = {distr: 3, range: (_, low, high) => [low / 1.04, high * 1.04]};
  if (tables.length) plot('loss', tables, series, {height: 320, axes: [{values}, log ? y : {}], scales: {x: {time: false}, y: log ? scale : {}}});
}

function drawLanes(run) {
  const {pauses} = run, short = shorten(pauses), width = wide('runs') - 84, end_s = Math.max(.001, short(run.end_s)), x = s => 60 + width * short(s) / end_s;
  const names = ['syncer', ...Object.keys(run.learners)], bottom = 28 * names.length;
  const rect = (from, to, y, fill, opacity) => el('rect', {x: from, y, width: Math.max(0, to - from), height: 14, fill, opacity});
  const text = (x, y, words, more) => el('text', {x, y, ...more}, words);
  const step_s = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400].find(s => end_s / s < width / 80) ?? 604800;
  return el('svg', {height: bottom + 26}, ...names.flatMap((name, i) => [text(0, 28 * i + 19, name),
    ...lives(run)[i].flatMap(([began, first, end, how]) => [rect(x(began), x(first ?? end), 28 * i + 8, i ? colour(i - 1) : GREY, .3),
      rect(x(first ?? end), x(end), 28 * i + 8, i ? colour(i - 1) : GREY, 1), text(x(end), 28 * i + 20, isKill(how) ? '✖' : '', {'text-anchor': 'middle'})]),
    el('path', {d: 'M0 0' + (run.learners[name]?.merges_s ?? []).map(s => `M${x(s).toFixed(1)} ${28 * i + 2}v5`).join('')})]),
  ...pauses.map(([s, long]) => text(x(s), bottom + 8, `┆ ${time(long)} pause`)),
  ...[...Array(Math.floor(end_s / step_s) + 1).keys()].map(i => text(60 + width * i * step_s / end_s, bottom + 20, time(i * step_s), {opacity: .7})));
}

function drawRun(run, r, many) {
  const learners = Object.entries(run.learners), sum = {};
  for (const [category, s] of learners.flatMap(([, one]) => Object.entries(one.spent_s))) sum[category] = (sum[category] ?? 0) + s;
  const all = Object.values(sum).reduce((a, b) => a + b, 0), part = ([category, s]) =>
    el('i', {style: `flex:${s};background:${SPENT[category]}`, title: `${category} ${time(s)}`});
  return el('div', {}, ...many ? [el('h1', {style: `color:${colour(r)};margin-top:30px`}, run.name)] : [],
    head('Learners'), table([['learner'], ['state', 'text'], ['step'], ['tokens/s'], ['loss'], ['goodput'], ['merged', 'more'],
      ['staleness', 'more'], ['incarnation', 'more']], learners.map(([name, one], i) => [dot(colour(i), name),
      el('span', {style: `color:${STATES[one.state] ?? BAD}`}, one.phase || one.state), num(one.step), num(one.tokens_per_second),
      num(one.loss, 3), percent(one.goodput), num(one.merged), num(one.staleness), num(one.incarnation)])),
    head('Processes against time', `light: starting; ticks: merged; ✖ killed or lost; began ${clock(run.began_s, {timeZoneName: 'short'})}`),
    drawLanes(run),
    head('Where the time went'), table([[''], ['', 'rest']], learners.map(([name, one]) =>
      [name, el('div', {class: 'bar'}, ...Object.entries(one.spent_s).map(part))])),
    el('div', {class: 'key'}, ...Object.entries(sum).filter(one => one[1] > all / 2000).sort((a, b) => b[1] - a[1]).map(([category, s]) =>
      dot(SPENT[category], `${category} ${percent(s / all)}`))),
    head('Outer steps against seconds'), el('div', {id: `merges${r}`}),
    head('Events'), el('ol', {}, ...run.events.map(([s, who, what]) => el('li', {},
      el('time', {}, `${time(s)} · ${clock(run.began_s + s, {timeStyle: 'medium'})}`), el('b', {}, who + ' '), what))));
}

function draw(runs) {
  const many = runs.length > 1, [first] = runs, done = run => run.progress == null ? '–' : Math.floor(100 * run.progress) + ' %', unit = first.loss_unit && ` in ${first.loss_unit}`;
  const figures = ({figures, wire, ...run}) => [['held-out loss', num(run.held_out[1].at(-1), 3)], ['tokens', si(run.tokens)],
    ['tokens/s', num(run.tokens_per_second)], ['outer steps', num(run.outer_steps)], ['goodput', percent(figures.training_since_joined), 'since joined'],
    ['token goodput', percent(figures.token)], ['on the wire', si(wire.up + wire.down) + 'B', wire.parallel && `data-parallel: ${si(wire.parallel)}B`]];
  const now = `${first.progress == null ? 'length not recorded' : `${done(first)} of ${num(first.total_steps)} steps`}, ${time(first.end_s)}` + (first.syncer == 'down' ? ', the syncer is down' : '')
    + (live && first.seconds_left ? `, about ${time(first.seconds_left)} left` : '');
  document.title = many ? runs.map(run => run.name).join(' | ') : `${done(first)} ${first.name}`;
  $('top').replaceChildren(...many ? [el('h1', {}, 'Runs'), table([['run'], ['done'], ...figures(first)].map(one => [one[0]]),
    runs.map((run, r) => [dot(colour(r), run.name), done(run), ...figures(run).map(one => one[1])]))]
    : [el('h1', {}, first.name), el('small', {}, first.about), el('div', {class: 'bar thin'}, el('i', {style: `width:${100 * first.progress}%;background:#0072B2`})),
      el('p', {}, now), el('div', {class: 'cards'}, ...figures(first).map(([name, value, more]) =>
        el('div', {}, el('small', {}, name), el('b', {}, value), el('small', {}, more || ''))))],
    head(`Loss${unit} against tokens of all learners`, 'thin: training; thick: held-out'));
  drawLoss(runs);
  $('runs').replaceChildren(...runs.map((run, r) => drawRun(run, r, many)));
  runs.forEach(({merges: [at_s, ...columns]}, r) => at_s.length && plot(`merges${r}`, columns.map(column => [at_s, column]), [{label: 'seconds'},
    {label: 'participants', stroke: colour(0)}, {label: 'connected', stroke: GREY, dash: [4, 3]}, {label: 'staleness', stroke: BAD}],
    {height: 150, scales: {x: {time: false}}, axes: [{}, {size: 30}]}));
}

let shown = $('data') && JSON.parse($('data').textContent);
const live = !shown, again = () => shown && draw(shown);
const notice = text => { $('notice').hidden = !text; $('notice').textContent = text; };
addEventListener('resize', again);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', again);
again();
if (shown?.length == 1 && (shown[0].progress ?? 1) < 1)
  notice(`The records end ${clock(shown[0].began_s + shown[0].end_s)}, before the last step.`);
if (live) {
  const source = new EventSource('events');
  source.onerror = () => notice('The page has lost its server: what is below is old.');
  source.onmessage = event => {
    draw(shown = JSON.parse(event.data));
    const [run] = shown, silent = Date.now() / 1000 - run.began_s - run.end_s;
    notice(run.behind ? 'The records are still being read: what is below is an earlier moment of the run.'
      : silent > 10 && (run.progress ?? 0) < 1 ? `No process has recorded anything for ${time(silent)}.` : '');
  };
}
