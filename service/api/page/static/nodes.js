// Elements of the page. Lists reuse their nodes: a page that is open for hours holds as many as it shows.

const SVG = 'http://www.w3.org/2000/svg';

export const byId = (id) => document.getElementById(id);

export function setText(node, text) {
  const shown = String(text);
  if (node.textContent !== shown) node.textContent = shown;
}

export const setId = (id, text) => setText(byId(id), text);

export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function draw(tag, attributes = {}) {
  const node = document.createElementNS(SVG, tag);
  change(node, attributes);
  return node;
}

export function change(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
  }
}

// As many children as items, made once and updated from then on.
export function list(parent, items, create, update) {
  while (parent.childElementCount > items.length) parent.lastElementChild.remove();
  items.forEach((item, index) => {
    const node = parent.children[index] ?? parent.appendChild(create());
    update(node, item, index);
  });
}
