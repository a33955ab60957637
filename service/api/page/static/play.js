// The box to try the server with: an answer whose drafted tokens are coloured as they arrive, and a race with and without draft.

import { byId, make, setId } from './nodes.js';
import { events, postJson } from './server.js';
import { adapterName, duration, number, percent, visible } from './text.js';

let running = null;

// Writes an answer into a node: drafted text marked, neighbours of one kind in one element.
class Writer {
  constructor(node) {
    this.node = node;
    node.replaceChildren();
  }

  write(text, drafted) {
    if (text === '') return;
    const last = this.node.lastElementChild;
    if (last !== null && (last.tagName === 'MARK') === drafted) last.firstChild.appendData(visible(text));
    else this.node.append(make(drafted ? 'mark' : 'span', {}, document.createTextNode(visible(text))));
    this.node.scrollTop = this.node.scrollHeight;
  }

  // A round's text is split where the draft's part ends, in proportion to its tokens.
  delta({ text, tokens, drafted = [] }) {
    const characters = Array.from(text);
    const guessed = drafted.filter(Boolean).length;
    const cut = Math.floor((characters.length * guessed) / Math.max(tokens.length, 1));
    this.write(characters.slice(0, cut).join(''), true);
    this.write(characters.slice(cut).join(''), false);
  }
}

// One answer, streamed into a node; resolves to the summary at its end.
async function generate(body, node, signal) {
  const writer = new Writer(node);
  const response = await postJson('generate', { ...body, stream: true, return_tokens: true }, { signal });
  let summary = null;
  for await (const { event, data } of events(response)) {
    if (data === '[DONE]') continue;
    const found = JSON.parse(data);
    if (event === 'error') throw new Error(visible(found.error.message));
    if ('timings' in found) summary = found;
    else writer.delta(found);
  }
  if (summary === null) throw new Error('the answer was cut off');
  return summary;
}

function figures({ timings }) {
  const parts = [`${timings.predicted_n} tokens in ${duration(timings.predicted_ms / 1000)}`, `${number(timings.predicted_per_second)} tokens/s`];
  if (timings.draft_n > 0) {
    parts.push(`${percent(timings.draft_n_accepted / timings.draft_n)} of ${timings.draft_n} drafted tokens accepted`);
    parts.push(timings.adapters.map(adapterName).join(', '));
  }
  return parts.filter(Boolean).join(' · ');
}

function asked() {
  return { prompt: byId('prompt').value, max_tokens: Number(byId('most').value) };
}

// Runs one job at a time; its buttons are off meanwhile.
async function run(job) {
  if (running !== null || !byId('ask').reportValidity()) return;
  running = new AbortController();
  const switches = [byId('generate'), byId('race')];
  for (const button of switches) button.setAttribute('aria-disabled', 'true');
  byId('stop').disabled = false;
  setId('try-result', 'Generating');
  for (const id of ['answer-figures', 'plain-figures']) setId(id, '');
  try {
    setId('try-result', await job(running.signal));
  } catch (error) {
    setId('try-result', error.name === 'AbortError' ? 'Stopped.' : `It failed: ${error.message}`);
  } finally {
    running = null;
    for (const button of switches) button.removeAttribute('aria-disabled');
    byId('stop').disabled = true;
  }
}

async function single(signal) {
  byId('plain-figure').hidden = true;
  setId('answer-title', 'Answer');
  const body = { ...asked(), temperature: Number(byId('temperature').value), store: byId('store').checked };
  const done = await generate(body, byId('answer'), signal);
  return `${figures(done)}.`;
}

// With the draft first: afterwards the answer could be looked up in what was said before.
async function race(signal) {
  byId('plain-figure').hidden = false;
  setId('answer-title', 'With draft');
  byId('plain').replaceChildren();
  const body = { ...asked(), temperature: 0, store: false };
  const drafted = await generate(body, byId('answer'), signal);
  setId('answer-figures', figures(drafted));
  const plain = await generate({ ...body, num_draft_tokens: 0 }, byId('plain'), signal);
  setId('plain-figures', figures(plain));
  const ratio = plain.timings.predicted_ms / drafted.timings.predicted_ms;
  return `${sameness(drafted.tokens, plain.tokens)} With the draft ${number(ratio, 2)} times as fast.`;
}

function sameness(one, other) {
  const length = Math.max(one.length, other.length);
  for (let at = 0; at < length; at += 1) {
    if (one[at] !== other[at]) return `Different from token ${at + 1} on (in half precision, two tokens that tie may change places).`;
  }
  return `Identical: all ${length} tokens.`;
}

export function startPlay(after) {
  byId('ask').addEventListener('submit', (event) => {
    event.preventDefault();
    run(single).then(after);
  });
  byId('race').addEventListener('click', () => run(race).then(after));
  byId('stop').addEventListener('click', () => running?.abort());
}
