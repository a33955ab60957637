// Requests to this server, and its server-sent events. Where it asks for a key, the log-in form shows itself.

import { byId, setId } from './nodes.js';
import { visible } from './text.js';

let loggingIn = null;

// A response of status 2xx. Throws an Error with the server's own message otherwise.
export async function ask(path, options = {}) {
  for (;;) {
    const response = await fetch(path, { credentials: 'same-origin', ...options });
    if (response.ok) return response;
    if (response.status === 401) {
      await logIn();
      continue;
    }
    throw new Error(await message(response));
  }
}

export const read = async (path) => (await ask(path)).json();

export const post = (path, options = {}) => ask(path, { method: 'POST', ...options });

export const postJson = (path, body, options = {}) =>
  post(path, { headers: { 'content-type': 'application/json' }, body: JSON.stringify(body), ...options });

export const putJson = (path, body) =>
  ask(path, { method: 'PUT', headers: { 'content-type': 'application/json' }, body: JSON.stringify(body) });

async function message(response) {
  try {
    return visible((await response.json()).error.message);
  } catch {
    return `the server answered ${response.status}`;
  }
}

// Resolves once the server has taken a key. It goes into the request alone: the session is the browser's cookie.
function logIn() {
  loggingIn ??= new Promise((resolve) => {
    const form = byId('login');
    const key = byId('login-key');
    form.hidden = false;
    key.focus();
    form.onsubmit = async (event) => {
      event.preventDefault();
      const body = JSON.stringify({ key: key.value });
      key.value = '';
      setId('login-error', '');
      try {
        const headers = { 'content-type': 'application/json' };
        const response = await fetch('session', { method: 'POST', credentials: 'same-origin', headers, body });
        if (!response.ok) {
          setId('login-error', response.status === 401 ? 'The server does not know this key.' : await message(response));
          key.focus();
          return;
        }
      } catch {
        setId('login-error', 'The server does not answer.');
        return;
      }
      form.hidden = true;
      form.onsubmit = null;
      loggingIn = null;
      resolve();
    };
  });
  return loggingIn;
}

// The token of this address (`#token=...`), as in the link that `redraft serve` prints, or null. Browsers send the part behind # to no
// server; it is removed here, so that neither the address bar nor the history shows it.
export function takeToken() {
  const token = new URLSearchParams(location.hash.slice(1)).get('token');
  if (token !== null) history.replaceState(null, '', location.pathname + location.search);
  return token;
}

// The events of a response: {event, data}. Comments are passed over.
export async function* events(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let text = '';
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += decoder.decode(value, { stream: true });
      const blocks = text.split('\n\n');
      text = blocks.pop();
      for (const block of blocks) {
        const found = { event: 'message', data: '' };
        for (const line of block.split('\n')) {
          const at = line.indexOf(': ');
          const field = line.slice(0, at);
          if (field === 'event' || field === 'data') found[field] = line.slice(at + 2);
        }
        if (found.data !== '') yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
