// The page: what the server says each second (GET /events), what it recorded (GET /history, /cases), buttons and a switch.

import { depthChart, gainChart, seriesClass, sparkline, timeChart } from './charts.js';
import { byId, list, make, setId, setText } from './nodes.js';
import { startPlay } from './play.js';
import { ask, events, post, putJson, read, takeToken } from './server.js';
import { adapterName, bytes, duration, gain, number, percent, visible, visibleToken, when } from './text.js';

const SECONDS = 300; // of speeds that are shown, and of counters that are held
const RATE_SECONDS = 10;
const MINUTE = 60;
const RETRY = 2000;
const PAUSE = 2000; // after a switch of adapters
const REFRESH = 10_000; // between two reads of the history while something happens
const IDLE_REFRESH = 30_000;
const MARKS = 24;

// {at, tokens, rounds, drafted, accepted}, one a second: one without a snapshot is one in which nothing changed.
const counters = [];
const speeds = [];
let latest = null;
let past = null;
let refreshedAt = 0;
let changed = true;
let refreshing = false;
let token = takeToken();

// ------------------------------------------------------------------------------------------------------------- live

async function follow() {
  for (;;) {
    try {
      const response = await ask('events');
      refresh();
      for await (const { event, data } of events(response)) if (event === 'snapshot') show(JSON.parse(data));
      state('The connection ended', false);
    } catch (error) {
      state(error instanceof TypeError ? 'The server does not answer' : error.message, false);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY));
  }
}

function state(text, ready) {
  setId('state', text);
  byId('state').classList.toggle('ready', ready);
}

function show(snapshot) {
  const before = latest;
  latest = snapshot;
  state(snapshot.ready ? 'Serving' : `Not ready: ${visible(snapshot.reason)}`, snapshot.ready);
  setId('model', visible(snapshot.model));
  if (before === null || moved(before) !== moved(snapshot)) changed = true;
  setId('requests', `${snapshot.rows} running`);
  setId('requests-note', `${snapshot.waiting} waiting, ${number(snapshot.totals.requests_started_total, 0)} since the start`);
  setId('memory', bytes(snapshot.memory.active));
  setId('memory-note', `${percent(snapshot.kv_cache_usage)} of the room for keys and values in use`);
  setId('adapter', snapshot.adapter === 0 ? 'none' : snapshot.adapter);
  const failures = snapshot.draft_failures ? `, ${snapshot.draft_failures} failures of the draft` : '';
  setId('adapter-note', `${snapshot.adapter === 0 ? 'the bare draft serves' : 'drafts now'}${failures}`);
  // Unknown where the costs of rounds are not measured.
  byId('speedup-tile').hidden = !(snapshot.speedup > 0);
  setId('speedup', `${number(snapshot.speedup, 2)} ×`);
  showRun(snapshot.run);
  showPractice(snapshot.practice);
  showRollback();
  showRates();
}

// What tells that the history has something new.
const moved = ({ totals, adapter, run }) =>
  [totals.generation_tokens_total, totals.adapter_promotions_total, totals.adapter_rollbacks_total, adapter, run?.state].join();

function countersNow() {
  const { totals } = latest;
  return {
    at: performance.now() / 1000,
    tokens: totals.generation_tokens_total,
    rounds: totals.rounds_total,
    drafted: totals.spec_decode_num_draft_tokens_total,
    accepted: totals.spec_decode_num_accepted_tokens_total,
  };
}

function showRates() {
  const now = countersNow();
  // After a restart of the server they begin again.
  if (counters.length > 0 && now.tokens < counters.at(-1).tokens) counters.length = 0;
  const since = (seconds) => counters.find((one) => one.at >= now.at - seconds) ?? now;
  const recent = since(RATE_SECONDS);
  setId('speed', number(now.at > recent.at ? (now.tokens - recent.tokens) / (now.at - recent.at) : 0));
  ratio('acceptance', since(MINUTE), now, 'accepted', 'drafted', (value) => percent(value, 1));
  ratio('per-call', since(MINUTE), now, 'tokens', 'rounds', (value) => number(value, 2));
}

// Of the last minute, or since the start where nothing happened in it.
function ratio(id, then, now, over, under, format) {
  const here = now[under] > then[under];
  const base = here ? then : { [over]: 0, [under]: 0 };
  const value = (now[over] - base[over]) / (now[under] - base[under]);
  setId(id, format(value));
  setId(`${id}-note`, here ? 'last minute' : now[under] > 0 ? 'since the start' : 'nothing yet');
}

function eachSecond() {
  if (latest !== null) {
    showRates();
    const [last, now] = [counters.at(-1), countersNow()];
    counters.push(now);
    if (counters.length > SECONDS) counters.shift();
    speeds.push(last === undefined ? 0 : (now.tokens - last.tokens) / (now.at - last.at));
    if (speeds.length > SECONDS) speeds.shift();
    sparkline(byId('speed-chart'), speeds, SECONDS);
    setId('speed-peak', `Peak ${number(Math.max(...speeds), 0)}.`);
  }
  const age = performance.now() - refreshedAt;
  if (!document.hidden && latest !== null && ((changed && age > REFRESH) || age > IDLE_REFRESH)) refresh();
}

// ---------------------------------------------------------------------------------------------------------- training

function showRun(run) {
  const here = run !== null;
  const over = here && run.finished_at !== null;
  byId('run-box').hidden = !here || over;
  byId('run-figures').hidden = !here || over;
  if (!here) return;
  const { progress } = run;
  const why = { cases: 'enough failure cases', manual: 'asked for', practice: 'practice' }[run.trigger];
  setId('run-line', `Run ${run.id}: ${run.state.replaceAll('_', ' ')}${progress.paused && !over ? `, paused: ${visible(progress.paused)}` : ''}.`);
  setId('run-steps', `${progress.writing ? 'The target writes: piece' : 'Step'} ${progress.step} of ${progress.steps || '?'}`);
  byId('run-progress').max = progress.steps || 1;
  byId('run-progress').value = progress.step;
  setId('run-loss', number(progress.loss, 3));
  setId('run-norm', number(progress.grad_norm, 2));
  setId('run-speed', number(progress.tokens_per_second, 0));
  setId('run-left', progress.seconds_left === null ? '–' : duration(progress.seconds_left));
  const outcome = run.error ?? run.verdict?.reason ?? '';
  const back = run.texts_given_back ? ' Its texts were given back.' : '';
  const ended = over ? ` Ended ${when(run.finished_at)}: ${visible(outcome)}.${back}` : '';
  const from = run.trigger === 'practice' ? 'text written like' : `${run.cases} failure cases of`;
  setId('run-note', `On top of ${run.parent === 0 ? 'the bare draft' : adapterName(run.parent)}, on ${from} ${run.generations} answers (${why}).${ended}`);
}

// One key until the server has answered: a second click asks for the same run.
let trainingKey = null;

async function train() {
  trainingKey ??= Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, '0')).join('');
  try {
    const run = await (await post('train', { headers: { 'idempotency-key': trainingKey } })).json();
    setId('train-result', `Run ${run.id} was started.`);
    setTimeout(() => {
      trainingKey = null;
    }, RETRY);
  } catch (error) {
    trainingKey = null;
    setId('train-result', `Not started: ${error.message}.`);
  }
}

// Whether the switch waits for an answer: what a snapshot says of it meanwhile is old.
let choosing = false;

function showPractice({ on, fixed, waits }) {
  const box = byId('practice');
  if (choosing) return;
  box.checked = on;
  box.disabled = fixed !== null;
  const why = [fixed && `Fixed: ${visible(fixed)}.`, waits && `Waits: ${visible(waits)}.`];
  setId('practice-why', why.filter(Boolean).join(' '));
}

async function choosePractice() {
  if (choosing) return;
  choosing = true;
  const { checked: on } = byId('practice');
  let now = null;
  try {
    now = await (await putJson('practice', { on })).json();
    setId('practice-result', now.on ? 'Practice is on, after a restart too.' : 'Practice is off, after a restart too.');
  } catch (error) {
    setId('practice-result', `Nothing was changed: ${error.message}.`);
  } finally {
    choosing = false;
    if (now !== null) latest.practice = now;
    showPractice(latest.practice);
  }
}

// ---------------------------------------------------------------------------------------------------------- adapters

function showRollback() {
  const active = latest?.adapter ?? 0;
  byId('rollback').disabled = active === 0;
  setText(byId('rollback'), active === 0 ? 'Roll back' : `Roll back adapter ${active}`);
  const what = 'What it learnt from is put aside, and its parent serves again.';
  setId('rollback-note', active === 0 ? 'The bare draft serves.' : what);
}

// Says which version it means: where another one serves by now, the server refuses.
async function rollback() {
  await adapterAction(`adapters/rollback?expected=${latest.adapter}`);
}

// When buttons of adapters act again: the second click of a double one means no second switch.
let actAgainAt = 0;

async function adapterAction(path) {
  if (performance.now() < actAgainAt) return;
  actAgainAt = Infinity;
  try {
    const { active } = await (await post(path)).json();
    setId('adapter-result', `${active === 0 ? 'The bare draft' : `Adapter ${active}`} serves now.`);
    latest.adapter = active;
    showRollback();
    // Until then the server may show the history that it read before.
    setTimeout(refresh, PAUSE);
  } catch (error) {
    setId('adapter-result', `Nothing was changed: ${error.message}.`);
  } finally {
    actAgainAt = performance.now() + PAUSE;
  }
}

const SERVABLE = ['active', 'retired', 'rolled_back'];

function showAdapters({ adapters }) {
  byId('adapters-empty').hidden = adapters.length > 0;
  byId('adapters-box').hidden = adapters.length === 0;
  const judged = adapters.filter(({ gate }) => gate !== null && Number.isFinite(gate.verdict.gain)).slice(0, 12);
  const rows = judged.map(({ id, state: now, gate: { verdict } }) => ({
    id,
    gain: verdict.gain,
    low: verdict.low90 ?? verdict.gain,
    high: verdict.high90 ?? verdict.gain,
    good: verdict.promoted && now !== 'rolled_back',
  }));
  const said = rows.map((row) => `${adapterName(row.id)} ${gain(row.gain)}, from ${gain(row.low)} to ${gain(row.high)}`);
  gainChart(byId('gain-chart'), { rows, label: `Gain of each adapter: ${said.join('; ') || 'none was judged yet'}` });
  list(byId('adapters-table'), adapters, adapterRow, (node, one) => {
    const { gate, watch } = one;
    const verdict = gate?.verdict;
    const reason = watch !== null && !watch.verdict.promoted ? watch.verdict.reason : (verdict?.reason ?? 'not judged yet');
    const interval = verdict ? `${gain(verdict.gain)} (${gain(verdict.low90)} to ${gain(verdict.high90)})` : '–';
    const cells = [
      one.id,
      one.state.replace('_', ' '),
      interval,
      verdict ? `${verdict.prompts} prompts` : '–',
      visible(reason),
      when((watch ?? gate)?.at ?? one.created_at),
    ];
    cells.forEach((cell, index) => setText(node.children[index], cell));
    node.className = one.state;
    const button = node.lastElementChild.firstElementChild;
    button.dataset.adapter = one.id;
    button.setAttribute('aria-label', `Activate adapter ${one.id}`);
    button.disabled = !SERVABLE.includes(one.state) || one.id === latest?.adapter;
  });
}

function adapterRow() {
  const row = make('tr', {}, make('th', { scope: 'row' }));
  for (let cell = 0; cell < 5; cell += 1) row.append(make('td'));
  row.append(make('td', {}, make('button', { type: 'button' }, 'Activate')));
  return row;
}

// ----------------------------------------------------------------------------------------------------------- history

async function refresh() {
  if (refreshing) return;
  refreshing = true;
  changed = false;
  refreshedAt = performance.now();
  try {
    if (token !== null) await openSession();
    past = await read(`history?hours=${byId('hours').value}`);
    showHistory();
    showGains(await read('gains'));
    await refreshCases();
  } catch (error) {
    if (error instanceof TypeError) return;
    setId('cases-empty', error.message);
    byId('cases-empty').hidden = false;
  } finally {
    refreshing = false;
  }
  if (token !== null) refresh();
}

// Trades the token for a session.
async function openSession() {
  const body = JSON.stringify({ key: token });
  token = null;
  await fetch('session', { method: 'POST', credentials: 'same-origin', headers: { 'content-type': 'application/json' }, body });
}

// A server without API keys shows texts only in a session that was opened with its token.
async function refreshCases() {
  const { role } = await read('session');
  if (role !== 'local') {
    showCases(await read('cases?limit=12'));
    return;
  }
  showCases({ cases: [] });
  setId('cases-empty', 'Only the user who runs this server sees texts: open the link that redraft serve prints, or add #token= and the token in the file "token" of its home folder to this address.');
}

// What the adapter that serves has gained against the base draft, or why nothing has been gained yet.
function showGains({ measured, measured_at, reason }) {
  setId('gain-line', measured === null ? `Nothing gained yet: ${visible(reason)}.` : `Your draft: ${measured.summary}.`);
  const notes = [];
  if (measured?.speed_gain) {
    const [change, low, high] = measured.speed_gain;
    notes.push(`${number(measured.speed_before, 1)} → ${number(measured.speed_after, 1)} tokens per second of one request while it drafts, ${gain(change)} (${gain(low)} to ${gain(high)}).`);
  }
  if (measured?.realised) notes.push(`Realised ${number(measured.realised, 2)} tokens a call where the scores predict ${number(measured.predicted, 2)}.`);
  if (measured_at) notes.push(`Measured ${when(measured_at)}; intervals are of 90 %.`);
  setId('gain-note', notes.join(' '));
}

function showHistory() {
  showAdapters(past);
  showTimes(past);
  showDepths(past);
}

function showTimes({ points, adapters }) {
  byId('history-empty').hidden = points.length > 0;
  byId('history-charts').hidden = points.length === 0;
  if (points.length === 0) return;
  const ids = [...new Set(points.map((point) => point.adapter))].sort((a, b) => b - a);
  const at = (point) => Date.parse(point.at);
  const from = Math.min(...points.map(at));
  const to = Math.max(...points.map(at), from + 10_000);
  const marks = adapters
    .flatMap(({ id, gate, watch }) => [
      gate?.verdict.promoted && { x: Date.parse(gate.at), label: `▲ ${id}`, words: `adapter ${id} promoted`, back: false },
      watch && !watch.verdict.promoted && { x: Date.parse(watch.at), label: `▼ ${id}`, words: `adapter ${id} rolled back`, back: true },
    ])
    .filter((mark) => mark && mark.x >= from && mark.x <= to)
    .sort((a, b) => a.x - b.x)
    .slice(-MARKS);
  const series = (y) =>
    ids.map((id, place) => ({
      place,
      name: adapterName(id),
      points: points.filter((point) => point.adapter === id).map((point) => ({ x: at(point), y: y(point) })).filter((point) => Number.isFinite(point.y)),
    }));
  const rate = (point) => point.accepted / point.drafted;
  const perCall = (point) => point.tokens / point.rounds;
  const shared = { marks, from, to, gap: (to - from) / 20 };
  const swaps = marks.map((mark) => mark.words).join(', ') || 'no swap';
  const highest = Math.max(...points.map(perCall).filter(Number.isFinite), 1.5);
  timeChart(byId('acceptance-chart'), {
    ...shared, series: series(rate), low: 0, high: 1, format: (value) => percent(value), label: `Acceptance rate over time. ${spoken(points, ids, rate, percent)}; ${swaps}.`,
  });
  timeChart(byId('per-call-chart'), {
    ...shared, series: series(perCall), low: 1, high: Math.ceil(highest * 2) / 2, format: (value) => number(value, 1), label: `Tokens per target call over time. ${spoken(points, ids, perCall, (value) => number(value, 2))}.`,
  });
  legend('history-legend', ids);
  list(byId('history-table'), points.slice(-200).reverse(), tableRow(5), (node, point) => {
    const cells = [when(point.at), adapterName(point.adapter), percent(rate(point), 1), number(perCall(point), 2), point.generations];
    cells.forEach((cell, index) => setText(node.children[index], cell));
  });
}

// The last figure of each adapter, for those who do not see the chart.
function spoken(points, ids, value, format) {
  return ids.slice(0, 4).map((id) => `${adapterName(id)}: last ${format(value(points.findLast((point) => point.adapter === id)))}`).join('; ');
}

function showDepths({ depths }) {
  byId('depth-empty').hidden = depths.length > 0;
  byId('depth-figure').hidden = depths.length === 0;
  if (depths.length === 0) return;
  const series = depths.map((one, place) => ({
    place,
    name: adapterName(one.adapter),
    rates: one.drafted.map((drafted, index) => one.accepted[index] / drafted),
  }));
  const said = series.map((one) => `${one.name}: ${one.rates.map((rate) => percent(rate)).join(', ')}`).join('; ');
  depthChart(byId('depth-chart'), { series, format: (value) => percent(value), label: `Acceptance by depth. ${said}` });
  legend('depth-legend', depths.map((one) => one.adapter));
}

function legend(id, adapters) {
  list(byId(id), adapters.slice(0, 12), () => make('li'), (node, adapter, place) => {
    node.className = seriesClass(place);
    setText(node, adapterName(adapter));
  });
}

function tableRow(cells) {
  return () => {
    const row = make('tr', {}, make('th', { scope: 'row' }));
    for (let cell = 1; cell < cells; cell += 1) row.append(make('td'));
    return row;
  };
}

// ------------------------------------------------------------------------------------------------------------- cases

function showCases({ cases }) {
  byId('cases-empty').hidden = cases.length > 0;
  setId('cases-empty', 'None yet.');
  list(byId('cases-list'), cases, caseItem, (node, one) => {
    const [context, drafted, target] = node.firstElementChild.children;
    setText(context, visible(one.context));
    setText(drafted, visibleToken(one.drafted));
    setText(target, visibleToken(one.target));
    const origin = [
      one.adapter === null ? null : adapterName(one.adapter),
      one.domain && `domain ${visible(one.domain)}`,
      one.client && `client ${visible(one.client)}`,
      when(one.created_at),
    ];
    setText(node.lastElementChild, `Draft ${percent(one.q)} sure, target ${percent(one.p, 1)} · ${origin.filter(Boolean).join(' · ')}`);
  });
}

function caseItem() {
  const text = make('p', { class: 'case' }, make('bdi', { class: 'context' }), make('del', { class: 'drafted' }), make('ins', { class: 'target' }));
  return make('li', {}, text, make('p', { class: 'note' }));
}

// ------------------------------------------------------------------------------------------------------------- start

byId('train').addEventListener('click', train);
byId('rollback').addEventListener('click', rollback);
byId('practice').addEventListener('change', choosePractice);
byId('adapters-table').addEventListener('click', ({ target }) => {
  if (target.dataset.adapter) adapterAction(`adapters/${target.dataset.adapter}/activate`);
});
byId('hours').addEventListener('change', refresh);
startPlay(() => {
  changed = true;
});

// The link was opened where the page is open already.
window.addEventListener('hashchange', () => {
  token = takeToken() ?? token;
  if (token !== null) refresh();
});

let redraw = 0;
window.addEventListener('resize', () => {
  cancelAnimationFrame(redraw);
  redraw = requestAnimationFrame(() => past !== null && showHistory());
});

setInterval(eachSecond, 1000);
follow();
