// Small charts in SVG, drawn to the width they have. Every one has its data in words or in a table as well.

import { change, draw, list, setText } from './nodes.js';
import { adapterName, gain, moment } from './text.js';

const LEFT = 44;
const RIGHT = 12;
const TOP = 30;
const BOTTOM = 22;
const ROW = 22;
const SERIES = 4;

// Class of a series by its adapter's place among those that are shown, the newest first: the same in all charts.
export const seriesClass = (place) => `series-${Math.min(place, SERIES - 1)}`;

const layers = (svg, ...names) =>
  names.map((name) => svg.querySelector(`:scope > .${name}`) ?? svg.appendChild(draw('g', { class: name })));

function sized(svg, height) {
  const width = Math.max(svg.parentElement.clientWidth, 240);
  change(svg, { viewBox: `0 0 ${width} ${height}`, width, height });
  return width;
}

const line = () => draw('line');
const text = () => draw('text');

function titled(tag) {
  const node = draw(tag);
  node.append(draw('title'));
  return node;
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step) found.push(at);
  return found;
}

// series: [{place, name, points: [{x, y}]}], x in milliseconds. marks: [{x, label, back}]: lines across. Points that are
// farther apart than `gap` are not joined.
export function timeChart(svg, { series, marks, from, to, low, high, gap, format, label }) {
  const height = 190;
  const width = sized(svg, height);
  const span = Math.max(to - from, 1);
  const x = (at) => LEFT + ((at - from) / span) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (value - low) / (high - low || 1)) * (height - TOP - BOTTOM);
  const [grid, lines, markers, paths, dots] = layers(svg, 'grid', 'lines', 'markers', 'paths', 'dots');
  const levels = ticks(low, high, 4);
  list(lines, levels, line, (node, value) => change(node, { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
  const times = Array.from({ length: width < 480 ? 3 : 5 }, (_, i, n = width < 480 ? 2 : 4) => from + (span * i) / n);
  const labels = [
    ...levels.map((value) => ({ x: LEFT - 6, y: y(value) + 4, anchor: 'end', text: format(value) })),
    ...times.map((at, i) => ({
      x: x(at),
      y: height - 5,
      anchor: i === 0 ? 'start' : i === times.length - 1 ? 'end' : 'middle',
      text: moment(at, span),
    })),
  ];
  list(grid, labels, text, (node, one) => {
    change(node, { x: one.x, y: one.y, 'text-anchor': one.anchor });
    setText(node, one.text);
  });
  list(markers, marks, () => {
    const group = draw('g');
    group.append(draw('line'), draw('text'));
    return group;
  }, (node, mark, index) => {
    change(node, { class: mark.back ? 'mark back' : 'mark' });
    change(node.children[0], { x1: x(mark.x), x2: x(mark.x), y1: index % 2 ? 25 : 13, y2: height - BOTTOM });
    // Neighbours are written in two rows.
    change(node.children[1], { x: x(mark.x), y: index % 2 ? 22 : 10, 'text-anchor': 'middle' });
    setText(node.children[1], mark.label);
  });
  list(paths, series, () => draw('path'), (node, one) => {
    let last = null;
    const steps = one.points.map((point) => {
      const move = last === null || point.x - last > gap;
      last = point.x;
      return `${move ? 'M' : 'L'}${x(point.x).toFixed(1)} ${y(point.y).toFixed(1)}`;
    });
    change(node, { d: steps.join('') || 'M0 0', class: seriesClass(one.place) });
  });
  const points = series.flatMap((one) => one.points.map((point) => ({ ...point, one })));
  list(dots, points, () => titled('circle'), (node, point) => {
    change(node, { cx: x(point.x).toFixed(1), cy: y(point.y).toFixed(1), r: 2.5, class: seriesClass(point.one.place) });
    setText(node.firstChild, `${point.one.name}: ${format(point.y)}, ${moment(point.x, span)}`);
  });
  change(svg, { 'aria-label': label });
}

// series: [{place, name, rates: [0..1]}], by place in the draft.
export function depthChart(svg, { series, label, format }) {
  const height = 190;
  const width = sized(svg, height);
  const depth = Math.max(...series.map((one) => one.rates.length), 1);
  const x = (place) => LEFT + ((place + 0.5) / depth) * (width - LEFT - RIGHT);
  const y = (value) => 12 + (1 - value) * (height - 12 - BOTTOM);
  const [grid, lines, paths, dots] = layers(svg, 'grid', 'lines', 'paths', 'dots');
  const levels = [0, 0.25, 0.5, 0.75, 1];
  list(lines, levels, line, (node, value) => change(node, { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
  const every = Math.ceil(depth / 16);
  const places = Array.from({ length: depth }, (_, place) => place).filter((place) => place % every === 0);
  const labels = [
    ...levels.map((value) => ({ x: LEFT - 6, y: y(value) + 4, anchor: 'end', text: format(value) })),
    ...places.map((place) => ({ x: x(place), y: height - 5, anchor: 'middle', text: String(place + 1) })),
  ];
  list(grid, labels, text, (node, one) => {
    change(node, { x: one.x, y: one.y, 'text-anchor': one.anchor });
    setText(node, one.text);
  });
  list(paths, series, () => draw('path'), (node, one) => {
    const steps = one.rates.map((rate, place) => `${place ? 'L' : 'M'}${x(place).toFixed(1)} ${y(rate).toFixed(1)}`);
    change(node, { d: steps.join('') || 'M0 0', class: seriesClass(one.place) });
  });
  const points = series.flatMap((one) => one.rates.map((rate, place) => ({ one, rate, place })));
  list(dots, points, () => titled('circle'), (node, { one, rate, place }) => {
    change(node, { cx: x(place).toFixed(1), cy: y(rate).toFixed(1), r: 3, class: seriesClass(one.place) });
    setText(node.firstChild, `${one.name}, token ${place + 1}: ${format(rate)}`);
  });
  change(svg, { 'aria-label': label });
}

// rows: [{id, gain, low, high, good}], one below the other around a line at 0.
export function gainChart(svg, { rows, label }) {
  const height = rows.length * ROW + BOTTOM + 4;
  const width = sized(svg, height);
  const left = 84;
  const right = 74;
  const values = rows.flatMap((row) => [row.low, row.high, row.gain]).filter(Number.isFinite);
  const low = Math.min(0, ...values);
  const high = Math.max(0.01, ...values);
  const x = (value) => left + ((value - low) / (high - low)) * (width - left - right);
  const [lines, grid, names] = layers(svg, 'lines', 'grid', 'rows');
  const levels = ticks(low, high, width < 480 ? 2 : 4);
  list(lines, levels, line, (node, value) =>
    change(node, { x1: x(value), x2: x(value), y1: 2, y2: height - BOTTOM, class: Math.abs(value) < 1e-9 ? 'zero' : '' }));
  list(grid, levels, text, (node, value) => {
    change(node, { x: x(value), y: height - 5, 'text-anchor': 'middle' });
    setText(node, Math.abs(value) < 1e-9 ? '0' : gain(value).replace('.0', ''));
  });
  list(names, rows, () => {
    const group = draw('g');
    group.append(draw('text'), draw('line'), draw('circle'), draw('text'));
    return group;
  }, (node, row, index) => {
    const middle = index * ROW + ROW / 2 + 2;
    const [name, interval, dot, value] = node.children;
    change(node, { class: row.good ? 'good' : 'bad' });
    change(name, { x: 0, y: middle + 4 });
    setText(name, adapterName(row.id));
    change(interval, { x1: x(row.low), x2: x(row.high), y1: middle, y2: middle });
    change(dot, { cx: x(row.gain), cy: middle, r: 4 });
    change(value, { x: width, y: middle + 4, 'text-anchor': 'end' });
    setText(value, gain(row.gain));
  });
  change(svg, { 'aria-label': label });
}

// values: a number each second, the newest last.
export function sparkline(svg, values, most) {
  const height = 44;
  const width = sized(svg, height);
  const high = Math.max(...values, 1);
  const x = (index) => width - ((values.length - 1 - index) / (most - 1)) * width;
  const steps = values.map((value, index) => `${index ? 'L' : 'M'}${x(index).toFixed(1)} ${(height - 2 - (value / high) * (height - 6)).toFixed(1)}`);
  const [paths] = layers(svg, 'paths');
  list(paths, [steps.join('')], () => draw('path'), (node, d) => change(node, { d: d || 'M0 0', class: seriesClass(0) }));
}
