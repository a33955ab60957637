// Text that anyone may have written, and figures, as they are shown. Nothing here makes HTML: pages set textContent.

const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

// Control characters, and those that reorder or hide text, by their numbers: a text must not change how others read.
export function visible(text) {
  return String(text).replace(CONTROL, (character) => {
    const code = character.charCodeAt(0);
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, '0')}⟩`;
  });
}

// A token alone: its white space shows too.
export function visibleToken(text) {
  const shown = visible(text).replaceAll('\n', '↵').replaceAll('\t', '⇥').replaceAll(' ', '␣');
  return shown === '' ? '(nothing)' : shown;
}

export function number(value, digits = 1) {
  return Number.isFinite(value) ? value.toLocaleString('en', { minimumFractionDigits: digits, maximumFractionDigits: digits }) : '–';
}

export function percent(value, digits = 0) {
  return Number.isFinite(value) ? `${number(100 * value, digits)} %` : '–';
}

export function gain(value) {
  return Number.isFinite(value) ? `${value < 0 ? '−' : '+'}${number(Math.abs(100 * value))} %` : '–';
}

export function bytes(value) {
  const units = ['B', 'KB', 'MB', 'GB', 'TB'];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${number(value, unit < 3 ? 0 : 1)} ${units[unit]}`;
}

export function duration(seconds) {
  if (!Number.isFinite(seconds)) return '–';
  if (seconds < 90) return `${number(seconds, seconds < 10 ? 1 : 0)} s`;
  return seconds < 5400 ? `${number(seconds / 60, 0)} min` : `${number(seconds / 3600)} h`;
}

const CLOCK = new Intl.DateTimeFormat(undefined, { hour: '2-digit', minute: '2-digit' });
const SECONDS = new Intl.DateTimeFormat(undefined, { hour: '2-digit', minute: '2-digit', second: '2-digit' });
const DAY = new Intl.DateTimeFormat(undefined, { month: 'short', day: 'numeric' });

// A moment, in milliseconds, as short as `span` milliseconds around it allow.
export function moment(at, span) {
  if (span <= 6e5) return SECONDS.format(at);
  if (span <= 36e5 * 26) return CLOCK.format(at);
  return span <= 36e5 * 24 * 3 ? `${DAY.format(at)} ${CLOCK.format(at)}` : DAY.format(at);
}

export function when(text) {
  const at = new Date(text);
  return `${DAY.format(at)} ${CLOCK.format(at)}`;
}

export function adapterName(id) {
  return id === 0 ? 'bare draft' : `adapter ${id}`;
}
