'use strict';
function spoken(name) { return name.replaceAll('_', ' '); }
const COLOURS = '#0072B2 #E69F00 #009E73 #CC79A7 #56B4E9 #D55E00 #B8A800 #999999'.split(' ');  // of learners, or of runs
const SPENT = {  // no colour of a learner; related ones differ in lightness
  merged_progress: ['#24408E', 'inner steps at the usual pace whose tokens are in the model'],
  wasted_progress: ['#8C1D18', 'inner steps that were not merged'],
  slow_step: ['#DCCBA5', 'what slow steps take above the usual pace'],
  data_wait: ['#BFA46F', 'waits for its next batch'],
  comm_exposed: ['#8A6D3B', 'encodes and adopts fragments while no step runs'],
  checkpoint_save_blocking: ['#5C4A24', 'no step runs because a checkpoint is saved'],
  wait_quorum: ['#A9A6DC', 'waits: fewer learners take part than the quorum'],
  wait_straggler: ['#CFCDF0', 'waits for slower learners'],
  syncer_down: ['#6F6AB8', 'waits for a syncer that is down'],
  init: ['#CFE3DF', 'the process starts: imports'],
  prep: ['#A7C7C0', 'builds the model and its devices'],
  startup_compile: ['#5F8A80', 'compiles its functions'],
  checkpoint_restore: ['#2F5A50', 'reads its checkpoint and fetches fragments'],
  infra_recovery: ['#E3A79F', 'there is no process: after a death, before the restart'],
  after_end: ['#ECECEC', 'has trained to the end, or left'],
  other: ['#4A4A4A', 'none of these']};
const WORDS = {
  'learner': 'a program that trains the whole model on its own data',
  'syncer': 'the program that merges what the learners send into the global model',
  'run': 'the folder of a run',
  'done': 'share of the run that is over',
  'state': 'what the learner does, or did when it was heard of last; before its first step, which part of its start',
  'no step': 'the learner is alive and makes no step: it reads, steps, saves, or its loop is busy; its log has the calls',
  'in quarantine': 'three updates of the learner in a row were wrong, as NaN: the syncer takes nothing more from it',
  'clock': 'the count of inner steps that all learners share; a learner that is late jumps ahead, so it makes fewer steps. The run is over at clock T; the syncs that close it count on beyond it',
  'tokens': 'trained by all learners together',
  'tokens/s': 'of the last steps, or the mean from the first step to the last one once nobody trains',
  'loss': 'mean training loss of the last ten steps',
  'held-out loss': 'loss of the global model on data that nobody trains on; points far apart are not joined',
  'outer steps': 'merges of one fragment of the model that the syncer has published',
  'goodput': 'share of the time since they joined that learners spent in inner steps at their usual pace, merged or not',
  'token goodput': 'tokens in the model, as a share of those that learners without a pause would have trained',
  'on the wire': 'bytes that the syncer received and sent; data-parallel: what training with an all-reduce in each step would have moved',
  'followers': 'processes that receive the newest global model and do not train',
  'merged': 'updates of one fragment from this learner that are in the model',
  'staleness': 'versions of a fragment that were skipped before the newest one was adopted; 0 is usual',
  'incarnation': 'how many processes of this name have joined the run: 1 plus the restarts',
  'participants': 'learners whose updates are in an outer step',
  'connected': 'learners that the syncer had among its members then',
  'T, M, K, P, H, tau': 'clock at the end, learners, the quorum, fragments, the period in inner steps, steps until a merged fragment is adopted',
  ...Object.fromEntries(Object.entries(SPENT).map(([name, [, words]]) => [spoken(name), 'time: ' + words]))};
const PAUSE_S = 30;  // a longer time without a process is drawn as so much
const LEFT = 60, RIGHT = 24;  // of the plots, in pixels: all that share a clock lie above each other
const $ = id => document.getElementById(id), colour = i => COLOURS[i] ?? `hsl(${137.5 * i % 360} 60% 45%)`;
const MANY = 12;  // learners, from which on only the unusual ones are shown one by one
const isUnusual = ({condition}) => ['fault', 'silent'].includes(condition.kind);
const isKill = how => ['killed', 'failed', 'lost'].includes(how);
const el = (tag, values, ...children) => {
  const space = ['svg', 'rect', 'text', 'path'].includes(tag) ? $('mark').namespaceURI : document.body.namespaceURI;
  const made = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(values))
    if (name == 'style') made.style.cssText = value; else made.setAttribute(name, value);
  made.append(...children);
  return made;
};
const dot = (fill, text) => el('span', {title: WORDS[text.split(':')[0]] ?? text}, el('span', {class: 'dot', style: `background:${fill}`}), text);
const head = (text, hint = '') => el('h2', {}, text + ' ', el('small', {}, hint));
const title = name => ({title: WORDS[name] ?? name});
const table = (titles, rows) => el('div', {class: 'wide', tabindex: 0}, el('table', {}, ...[titles.map(one => one[0]), ...rows].map((cells, i) =>
  el('tr', {}, ...cells.map((cell, k) => el(!i || !k ? 'th' : 'td', {class: titles[k][1] ?? '', scope: i ? 'row' : 'col', ...i ? {} : title(cell)}, cell))))));
const details = (id, words, ...children) => el('details', {id}, el('summary', {id: id + '-head'}, words), ...children);
const num = (x, digits = 0) => x?.toLocaleString('en', {maximumFractionDigits: digits, minimumFractionDigits: digits}) ?? '–';
const percent = x => x == null ? '–' : num(100 * x, 1) + '\u00a0%';
const si = (x, step = Math.max(1, 10 ** Math.floor(Math.log10(x)) / 100)) => {  // with the digits of such steps
  const power = Math.max(0, Math.min(5, Math.floor(Math.log10(Math.max(x, 1)) / 3 + 1e-9))), unit = 1000 ** power;
  const digits = [0, 1, 2].find(d => Number.isInteger(+(step / unit * 10 ** d).toFixed(6))) ?? 3;
  return num(x / unit, x && digits) + ['', '\u00a0k', '\u00a0M', '\u00a0G', '\u00a0T', '\u00a0P'][power];
};
const bytes = x => x < 1000 ? num(x) + '\u00a0B' : si(x) + 'B';
const time = s => s == null ? '–' : s < 120 ? num(s) + ' s'
  : s < 7200 ? num(s / 60, 1).replace('.0', '') + ' min' : num(s / 3600, 1).replace('.0', '') + ' h';
const date = (s, how) => new Date(1000 * s).toLocaleString(undefined, how);
const lives = run => [run.syncer_lives, ...Object.values(run.learners).map(one => one.lives)];
const called = run => run.folder || run.name;

const shorten = pauses => s => pauses.reduce((t, [at, long]) => t - Math.max(0, Math.min(long, s - at) - PAUSE_S), s);

function ticks(low, high, log) {  // the most numbers, at most 8, that lie a 13th of the axis or more apart; report/picture.py has the same
  const place = x => log ? Math.log(x) : x, apart = (place(high) - place(low)) / 13, size = 10 ** Math.floor(Math.log10(high - low));
  const sets = [];
  for (const digits of log ? [[1, 1.5, 2, 3, 5, 7], [1, 2, 3, 5], [1, 2, 5], [1, 3], [1]] : [])
    for (const stride of [1, 2, 3, 5])
      sets.push([...Array(61).keys()].map(e => e - 30).filter(e => e % stride == 0).flatMap(e => digits.map(x => +`${x}e${e}`)));
  for (const step of [.1, .2, .25, .5, 1, 2, 2.5, 5].map(x => x * size))
    sets.push([...Array(Math.max(0, Math.min(99, Math.floor(high / step) - Math.ceil(low / step) + 1))).keys()].map(i => (Math.ceil(low / step) + i) * step));
  const fits = some => some.length < 9 && some.every((x, i) => !i || place(x) - place(some[i - 1]) >= apart);
  return sets.map(some => some.map(x => +x.toPrecision(9)).filter(x => low <= x && x <= high)).filter(fits)
    .reduce((best, some) => some.length > best.length ? some : best, []);
}

const plots = {};
let kills = [];  // [tokens, loss, learner]
function plot(id, words, tables, series, options) {  // a new chart only if its lines, its width or its ink change
  const ink = getComputedStyle(document.body).color, width = Math.max(300, $(id).clientWidth);
  const data = uPlot.join(tables, tables.map(one => one.map(() => 2)));  // 2: a null ends a line, whatever others have beside it
  const key = JSON.stringify([series.map(one => [one.label, one.points]), ink, width, options.scales, options.axes]);
  if (plots[id]?.key == key && $(id).firstChild) return plots[id].setData(data);
  const nearest = (u, s, i) => u.data[s].reduce((best, y, k) => y != null && Math.abs(k - i) < Math.abs(best - i) ? k : best, 1e9);
  $(id).replaceChildren();
  plots[id] = new uPlot({width, cursor: {dataIdx: nearest}, padding: [12, RIGHT, 0, 0], ...options,
    axes: options.axes.map((one, i) => ({stroke: ink, grid: {stroke: '#8883', width: 1}, ticks: {stroke: '#8883'}, ...i ? {size: LEFT} : {}, ...one})),
    series: series.map(one => ({points: {show: false}, ...one, stroke: one.stroke ?? ink}))}, data, $(id));
  plots[id].key = key;
  for (const [name, value] of Object.entries({role: 'img', 'aria-label': words})) $(id).querySelector('canvas').setAttribute(name, value);
}

function drawLoss(runs) {
  const many = runs.length > 1, tables = [], series = [{label: 'tokens', value: (_, x) => x == null ? '' : si(x)}];
  const add = (label, columns, stroke, more) => {
    tables.push(columns);
    series.push({label, stroke, width: 1, value: (_, y) => num(y, 3), ...more});
  };
  kills = [];
  const crowd = runs.some(run => Object.keys(run.learners).length > MANY);
  runs.forEach((run, r) => {
    const prefix = many ? called(run) + ' ' : '', held = {width: 2.5, points: {show: true, size: 7}};
    Object.entries(run.learners).forEach(([name, {curve: [tokens, losses, ended], held_out}], i) => {
      if (tokens.length) add(prefix + name, [tokens, losses], many ? colour(r) + '88' : crowd ? '#8886' : colour(i), {points: {show: tokens.length < 20, size: 5}});
      if (held_out[0].length) add(prefix + name + ' held-out', held_out, many ? colour(r) : colour(i), held);
      ended.forEach((how, k) => isKill(how) && losses[k] != null && kills.push([tokens[k], losses[k], name]));
    });
    if (run.held_out[0].length) add(prefix + 'held-out', run.held_out, many ? colour(r) : null, held);
  });
  const losses = tables.flatMap(one => one[1]).filter(y => y != null), log = losses.every(y => y > 0), unit = runs[0].loss_unit && ` in ${runs[0].loss_unit}`;
  const values = (_, some, axis, space, step) => some.map(x => si(x, step));
  const y = {splits: (u, axis, low, high) => ticks(low, high, log), filter: (_, some) => some, values: (_, some) => some.map(x => `${x}`)};
  const pad = (low, high) => log ? [low / 1.04, high * 1.04] : [low - (high - low || 1) / 20, high + (high - low || 1) / 20];
  const cross = u => kills.forEach(([tokens, loss, name]) => {
    const {color, backgroundColor} = getComputedStyle(document.body), {ctx} = u, pixel = devicePixelRatio;
    Object.assign(ctx, {textAlign: 'center', textBaseline: 'middle', fillStyle: color, strokeStyle: backgroundColor, lineWidth: 4 * pixel, lineJoin: 'round'});
    for (const [text, size, above] of [['✖', 15, 0], [kills.length < 9 ? name : '', 12, 15]]) {  // with a rim, as it lies upon curves
      ctx.font = `${size * pixel}px sans-serif`;
      const x = Math.min(u.valToPos(tokens, 'x', true), ctx.canvas.width - ctx.measureText(text).width / 2), y = u.valToPos(loss, 'y', true) - above * pixel;
      ctx.strokeText(text, x, y);
      ctx.fillText(text, x, y);
    }
  });
  $('values').hidden = !losses.length;
  if (!losses.length) return $('loss').replaceChildren(el('p', {class: 'dim'}, 'There is a curve after the first step that tells a loss.'));
  plot('loss', `Loss${unit} against tokens: ${num(Math.max(...losses), 3)} at most, ${num(Math.min(...losses), 3)} at least. The table below has the values.`,
    tables, series, {height: 320, legend: {show: !crowd}, axes: [{values}, y], hooks: {draw: [cross]},
      scales: {x: {time: false}, y: {distr: log ? 3 : 1, range: (_, low, high) => low == null ? [1, 2] : pad(low, high)}}});
  const end = Math.max(...tables.flatMap(one => one[0])), near = ([xs, ys], x) => xs.reduce((best, at, i) =>
    ys[i] != null && Math.abs(at - x) < Math.abs(best[0] - x) && Math.abs(at - x) < end / 20 ? [at, ys[i]] : best, [1e99, null])[1];
  $('rows').replaceChildren(table(series.map(one => [one.label]), [...Array(11).keys()].map(i =>
    [si(end * i / 10), ...tables.map(one => num(near(one, end * i / 10), 3))])));
}

function times(run, width) {  // the clock of the lanes and of the outer steps: where a moment lies, and the numbers below
  const short = shorten(run.pauses), end_s = Math.max(.001, short(run.end_s));
  const step_s = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400].find(s =>
    end_s / s < width / 62 && s >= (end_s > 7200 ? 1800 : end_s > 120 ? 30 : 0)) ?? 604800;
  return {short, end_s, x: s => LEFT + width * short(s) / end_s, marks: [...Array(Math.floor(end_s / step_s) + 1).keys()].map(i => i * step_s)};
}

function drawLanes(run, width) {
  const {end_s, x, marks} = times(run, width), {pauses} = run, all = Object.keys(run.learners), few = all.length <= MANY;
  const names = ['syncer', ...all], step = few ? 28 : 9, bottom = step * names.length;
  const rect = (from, to, y, fill, opacity) => el('rect', {x: from, y, width: Math.max(0, to - from), height: few ? 14 : 7, fill, opacity});
  const text = (x, y, words, more) => el('text', {x, y, ...more}, words);
  const rows = [...names.keys()], fell = rows.filter(i => lives(run)[i].some(one => isKill(one[3]))), named = new Set();
  for (const i of [0, ...fell, ...rows.filter(i => i % 8 == 0)])  // thin lanes have names where there is room
    if (few || ![i - 1, i + 1].some(k => named.has(k))) named.add(i);
  return el('svg', {height: bottom + 26, role: 'img', 'aria-label': 'When each process ran. The table below has the times.'}, ...names.flatMap((name, i) => [text(0, step * i + (few ? 19 : 16), few || named.has(i) ? name.slice(0, 9) : '', {class: 'lane'}),
    ...lives(run)[i].flatMap(([began, first, end, how]) => [rect(x(began), x(first ?? end), step * i + 8, i ? colour(i - 1) : 'var(--dim)', .3),
      rect(x(first ?? end), x(end), step * i + 8, i ? colour(i - 1) : 'var(--dim)', 1), text(x(end), step * i + (few ? 20 : 16), isKill(how) ? '✖' : '', {'text-anchor': 'middle'})]),
    el('path', {d: few ? 'M0 0' + (run.learners[name]?.merges_s ?? []).map(s => `M${x(s).toFixed(1)} ${28 * i + 2}v5`).join('') : ''})]),
  ...pauses.map(([s, long]) => text(x(s), bottom + 8, `┆ ${time(long)} pause`)),
  ...marks.map(s => text(LEFT + width * s / end_s, bottom + 20, time(s), {class: 'tick', 'text-anchor': 'middle'})));
}

function drawMerges(run, r, width) {
  const {short, end_s, marks} = times(run, width), [at_s, ...counts] = run.merges, usual_s = at_s.map((s, i) => s - at_s[i - 1]).slice(1).sort((a, b) => a - b)[at_s.length >> 1] ?? 1;
  const rows = [];  // a count holds until the next outer step; where none comes for long, the line ends
  at_s.forEach((s, i) => {
    rows.push([short(s), ...counts.map(count => count[i])]);
    if ((at_s[i + 1] ?? run.end_s) - s > Math.max(5, 8 * usual_s)) rows.push([short(s + Math.max(1, usual_s)), null, null, null]);
  });
  const [none, last] = [[null, null, null], rows.at(-1)[0]];
  const all = [...rows[0][0] > 0 ? [[0, ...none]] : [], ...rows, ...last < end_s ? [[end_s, ...none]] : []], at = all.map(row => row[0]);
  const most = Math.max(...counts.flat()), paths = uPlot.paths.stepped({align: 1}), line = (label, k, more) => ({label, paths, width: 1.5, ...more});
  plot(`merges${r}`, `Of each outer step: participants, at most ${Math.max(...counts[0])}; connected learners, at most ${Math.max(...counts[1])}; staleness, at most ${Math.max(...counts[2])}.`,
    counts.map((_, k) => [at, all.map(row => row[k + 1])]), [{label: 'time', value: (_, s) => time(s)}, line('participants', 0), line('connected', 1, {dash: [6, 4]}), line('staleness', 2, {dash: [2, 3]})],
    {height: 160, legend: {markers: {dash: (u, i) => ['', 'solid', 'dashed', 'dotted'][i]}}, scales: {x: {time: false}, y: {range: [0, Math.max(1, most) * 1.08]}}, axes: [{splits: () => marks, values: (_, some) => some.map(time)},
      {splits: (u, axis, low, high) => ticks(low, high, false).filter(Number.isInteger), values: (_, some) => some}]});
}

function drawRun(run, r, many, width) {
  const learners = Object.entries(run.learners), sum = {}, over = !run.tokens_per_second, few = learners.length <= MANY;
  const shown = few ? learners : learners.filter(one => isUnusual(one[1])), whole = few ? [] : [['all', {spent_s: sum}]];
  const place = Object.fromEntries(learners.map(([name], i) => [name, i])), middle = (all, pick) => {  // least, median and most
    const some = all.map(one => pick(one[1])).filter(x => x != null).sort((a, b) => a - b);
    return some.length ? [some[0], some[some.length >> 1], some.at(-1)] : [];
  };
  const rate = one => over ? one.mean_tokens_per_second : one.tokens_per_second, three = (pick, how = num) => middle(learners, pick).map(x => how(x)).join(' / ') || '–';
  const row = ([name, one]) => [dot(colour(place[name]), name), el('span', {class: isUnusual(one) ? 'bad' : '', title: one.condition.meaning}, one.condition.text),
    num(one.step), num(rate(one)), num(one.loss, 3), percent(one.goodput), num(one.merged), num(one.staleness), num(one.incarnation)];
  const heads = [['learner'], ['state', 'text'], ['clock'], ['tokens/s'], ['loss'], ['goodput'], ['merged', 'more'], ['staleness', 'more'], ['incarnation', 'more']];
  const summary = [`all ${learners.length}`, 'least / median / most', three(one => one.step), three(rate), three(one => one.loss, x => num(x, 3)), three(one => one.goodput, percent),
    three(one => one.merged), three(one => one.staleness), three(one => one.incarnation)];
  for (const [category, s] of learners.flatMap(([, one]) => Object.entries(one.spent_s))) sum[category] = (sum[category] ?? 0) + s;
  const total = spent => Object.values(spent).reduce((a, b) => a + b, 0), all = total(sum), bar = spent => Object.entries(spent).map(([category, s]) => {
    const [fill, words] = SPENT[category], pixels = width * s / total(spent), dark = [.2126, .7152, .0722].reduce((sum, part, i) =>
      sum + part * (parseInt(fill.slice(2 * i + 1, 2 * i + 3), 16) / 255) ** 2.2, 0) < .179;
    return el('i', {style: `flex:${s};background:${fill};color:${dark ? '#fff' : '#000'}`, title: `${spoken(category)} ${time(s)}: ${words}`},
      pixels < 60 ? '' : (pixels < 160 ? '' : spoken(category) + ' ') + percent(s / total(spent)));
  });
  const sorted = Object.entries(sum).filter(one => one[1] > all / 2000).sort((a, b) => b[1] - a[1]);
  return el('div', {}, ...many ? [el('h1', {style: 'margin-top:30px'}, dot(colour(r), called(run)))] : [],
    head('Learners'), table(heads, [...few ? [] : [summary], ...shown.map(row)]),
    ...few ? [] : [details(`learners${r}`, `All ${learners.length} learners`, table(heads, learners.map(row)))],
    head('Processes against time', 'light: starting; ticks: merged; ✖ killed or lost' + (run.began_s == null ? '' : `; from ${date(run.began_s, {timeZoneName: 'short'})} on`)),
    drawLanes(run, width), details(`lives${r}`, 'These times as a table', table([['process'], ['from'], ['first step'], ['to'], ['end', 'text']],
      lives(run).flatMap((some, i) => some.map(([began, first, end, how]) => [i ? learners[i - 1][0] : 'syncer', time(began), time(first), time(end), how || 'runs'])))),
    head('Outer steps against time', 'solid: participants; dashed: connected learners; dotted: staleness'), 
      el('div', {id: `merges${r}`}, ...run.merges[0].length ? [] : [el('p', {class: 'dim'}, 'There is a line after the first outer step.')]),
    head('Where the time went', run.spent_note), el('div', {class: 'wide'}, el('table', {}, ...[...whole, ...shown].filter(one => total(one[1].spent_s)).map(([name, one]) =>
      el('tr', {}, el('th', {scope: 'row'}, name), el('td', {class: 'rest'}, el('div', {class: 'bar'}, ...bar(one.spent_s))))))),
    el('div', {class: 'key'}, ...sorted.map(([category, s]) => dot(SPENT[category][0], `${spoken(category)}: ${percent(s / all)}`))),
    details(`spent${r}`, 'These shares as a table', table([['time'], ...learners.map(([name]) => [name])], sorted.map(([category]) =>
      [spoken(category), ...learners.map(([, one]) => percent((one.spent_s[category] ?? 0) / total(one.spent_s)))]))),
    head('Events'), el('ol', {id: `events${r}`, tabindex: 0}, ...run.events.map(([s, who, what]) => el('li', {},
      el('time', {}, `${time(s)} · ${date(run.began_s + s, {...run.end_s > 72000 ? {dateStyle: 'short'} : {}, timeStyle: 'medium'})}`), el('b', {}, who + ' '), what))));
}

function draw(runs) {
  const many = runs.length > 1, [first] = runs, done = run => run.progress == null ? '–' : Math.floor(100 * run.progress) + ' %', unit = first.loss_unit && ` in ${first.loss_unit}`;
  const figures = ({figures, wire, ...run}) => [['held-out loss', num(run.held_out[1].at(-1), 3)], ['tokens', si(run.tokens)],
    ['tokens/s', num(run.tokens_per_second || run.mean_tokens_per_second), run.tokens_per_second ? ago(run) : run.mean_tokens_per_second && 'mean'], ['outer steps', num(run.outer_steps)], ['goodput', percent(figures.training_since_joined), 'since joined'],
    ['token goodput', percent(figures.token)], ['on the wire', bytes(wire.up + wire.down), wire.parallel && `data-parallel: ${bytes(wire.parallel)}`],
    ...runs.some(one => one.followers) ? [['followers', num(run.followers), run.followers && `the last one is ${num(run.versions_behind)} versions behind`]] : []];
  const now = `${first.progress == null ? 'length not recorded' : `${done(first)} of the way to clock ${num(first.total_steps)}`} after ${time(first.end_s)}: ${first.condition.text}`
    + (live && first.seconds_left ? `, about ${time(first.seconds_left)} left` : '') + (live ? '' : `, as of ${date(first.began_s + first.looked_s, {dateStyle: 'medium', timeStyle: 'medium'})}`);
  const ago = run => live ? `${time(run.rate_s)} ago` : 'as the file was written';
  document.title = many ? runs.map(called).join(' | ') : `${done(first)} ${called(first)}`;
  $('top').replaceChildren(...many ? [el('h1', {}, 'Runs'), table([['run'], ['done'], ...figures(first)].map(one => [one[0]]),
    runs.map((run, r) => [dot(colour(r), called(run)), done(run), ...figures(run).map(one => one[1])]))]
    : [el('h1', {}, called(first)), el('p', {class: 'dim'}, first.began_s == null ? first.name : `${first.name}, began ${date(first.began_s, {dateStyle: 'medium', timeStyle: 'short'})}`), el('small', title('T, M, K, P, H, tau'), first.about),
      el('div', {class: 'bar thin'}, el('i', {style: `width:${100 * first.progress}%;background:var(--ink)`})), el('p', {}, first.began_s == null ? '' : now), el('div', {class: 'cards'},
        ...figures(first).map(([name, value, more]) => el('div', title(name), el('small', {}, name), el('b', {}, value), el('small', {}, more || ''))))],
    head(`Loss${unit} against tokens of all learners`, 'thin: training; thick, dots: held-out; ✖ killed or lost'));
  drawLoss(runs);
  const kept = [...document.querySelectorAll('ol[id], details[id]')].map(one => [one.id, one.scrollTop, one.scrollHeight, one.open]), focus = document.activeElement?.id;
  $('runs').className = many ? 'many' : '';
  const width = (many && innerWidth > 1000 ? $('runs').clientWidth / 2 - 12 : $('runs').clientWidth) - LEFT - RIGHT;
  $('runs').replaceChildren(...runs.map((run, r) => drawRun(run, r, many, width)));
  runs.forEach((run, r) => run.merges[0].length && drawMerges(run, r, width));
  for (const [id, top, height, open] of kept)  // who reads an event goes on reading it
    if ($(id)) Object.assign($(id), {open, scrollTop: top && top + $(id).scrollHeight - height});
  if (focus && $(focus) != document.activeElement) $(focus)?.focus({preventScroll: true});
}

let shown = $('data') && JSON.parse($('data').textContent);
const live = !shown, again = () => shown && draw(shown);
const notice = (...lines) => { $('notice').hidden = !lines.some(Boolean); $('notice').textContent = lines.filter(Boolean).join('\n'); };
$('words').append(el('dl', {}, ...Object.entries(WORDS).flatMap(([name, words]) => [el('dt', {}, name), el('dd', {}, words)])));
$('explain').addEventListener('click', () => { $('words').open = true; });
addEventListener('resize', again);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', again);
again();
if (shown?.length == 1)
  notice(...shown[0].notices, (shown[0].progress ?? 1) < 1 && shown[0].began_s != null && `The records end ${date(shown[0].began_s + shown[0].end_s)}, before the last step.`);
if (live) {
  const source = new EventSource('events');
  source.onerror = () => notice('This page has lost its server: what is below is old. A run that has ended has it as report/index.html in its folder.');
  source.onmessage = event => {
    draw(shown = JSON.parse(event.data));
    notice(...shown[0].notices);
  };
}
