// What the parts of the page share: elements, lists that change, and words.

// h makes an element.
export function h(tag, props = {}, ...children) {
  const e = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === false) continue;
    if (name === 'class') e.className = value;
    else if (name.startsWith('on')) e.addEventListener(name.slice(2), value);
    else e.setAttribute(name, value === true ? '' : value);
  }
  e.append(...children);
  return e;
}

export const $ = id => document.getElementById(id);

// text changes the text of an element, if it is another one.
export function text(e, s) {
  if (e.textContent !== s) e.textContent = s;
}

// show shows an element, or hides it.
export function show(e, shown) {
  if (e.hidden === shown) e.hidden = !shown;
}

// keyed makes the children of an element those of some items, in their order. Elements of items that stay are kept, so that focus and selection are.
export function keyed(parent, items, key, make, fill) {
  const old = parent.keyed ?? new Map(), now = new Map();
  for (const item of items) now.set(key(item), item);
  for (const [k, e] of old) if (!now.has(k)) e.remove();
  let at = parent.firstElementChild;
  for (const [k, item] of now) {
    const e = old.get(k) ?? make(item);
    fill(e, item);
    now.set(k, e);
    if (e === at) at = at.nextElementSibling;
    else parent.insertBefore(e, at);
  }
  parent.keyed = now;
}

// table makes a table of rows, which have keys. A column has a title, and a cell: a text, or {text, mark, title, since, part} with the mark bad, good or dim, a time
// since when it is so, and a part of a whole. A column that is optional is only there if a row has something in it.
export function table(e, columns, rows) {
  const kind = c => `${c.number ? 'number' : ''} ${c.optional ? 'optional' : ''}`.trim();
  if (!e.tHead) {
    e.append(h('thead', {}, h('tr', {}, ...columns.map(c => h('th', { scope: 'col', class: kind(c) }, c.title)))), h('tbody'));
  }
  e.classList.toggle('lean', !rows.some(([, row]) => columns.some(c => c.optional && c.cell(row))));
  keyed(e.tBodies[0], rows, ([key]) => key, ([key]) => {
    const tr = h('tr', { 'data-key': key });
    columns.forEach((c, i) => tr.append(h(i === 0 ? 'th' : 'td', { scope: i === 0 ? 'row' : undefined, class: kind(c), 'data-title': c.title })));
    return tr;
  }, (tr, [, row]) => columns.forEach((c, i) => cell(tr.cells[i], c.cell(row))));
}

// cell fills an element with a cell. What has changed is marked for a moment.
export function cell(td, value) {
  const c = typeof value === 'object' ? value : { text: String(value) };
  const is = JSON.stringify(c);
  if (td.is === is) return;
  const before = td.is;
  td.is = is;
  td.replaceChildren();
  td.classList.toggle('bad', c.mark === 'bad');
  td.classList.toggle('good', c.mark === 'good');
  td.classList.toggle('dim', c.mark === 'dim');
  if (c.mark === 'bad' || c.mark === 'good') td.append(h('span', { class: 'mark', 'aria-hidden': 'true' }, c.mark === 'bad' ? '✗' : '✓'));
  if (c.part !== undefined) td.append(meter(c.part));
  if (c.text) td.append(c.part === undefined ? c.text : h('span', { class: 'beside' }, c.text));
  if (c.since) td.append(c.text ? ' ' : '', since(c.since, c.prefix));
  if (c.title) td.title = c.title;
  if (before !== undefined) flash(td);
}

// meter shows a part of a whole. Its text is beside it.
export function meter(part) {
  const fill = h('i');
  fill.style.width = `${Math.round(Math.min(1, part) * 100)}%`;
  return h('span', { class: part >= 1 ? 'meter full' : part > 0.9 ? 'meter high' : 'meter', 'aria-hidden': 'true' }, fill);
}

export function flash(e) {
  e.classList.remove('changed');
  void e.offsetWidth; // so that the animation begins anew
  e.classList.add('changed');
}

// clock is the difference between the clock of the program and that of the browser, in milliseconds.
export const clock = { ahead: 0 };

// since is an element with the age of a time.
export function since(at, prefix = '') {
  const e = h('time', { datetime: at, title: new Date(at).toLocaleString() });
  e.lead = prefix;
  tick(e);
  return e;
}

function tick(e) {
  if (!e.dateTime) return; // it isn't known
  text(e, (e.lead ?? '') + age(Date.now() + clock.ahead - Date.parse(e.dateTime)));
}

setInterval(() => document.querySelectorAll('time').forEach(tick), 5000);

// age is a duration as kubectl writes it.
export function age(ms) {
  const s = Math.max(0, Math.round(ms / 1000));
  if (s < 120) return `${s}s`;
  if (s < 3 * 3600) return `${Math.floor(s / 60)}m`;
  if (s < 2 * 86400) return `${Math.floor(s / 3600)}h`;
  if (s < 2 * 365 * 86400) return `${Math.floor(s / 86400)}d`;
  return `${Math.floor(s / (365 * 86400))}y`;
}

export const number = n => n.toLocaleString('en');

// count is such as "1 block" or "2 blocks".
export function count(n, one, many = one + 's') {
  return `${number(n)} ${n === 1 ? one : many}`;
}

// of is such as "3 of 16".
export const of = u => `${number(u.used)} of ${number(u.total)}`;

export const share = u => u.total > 0 ? u.used / u.total : 0;

const collator = new Intl.Collator('en', { numeric: true });

// sorted are the entries of a map by their keys, as people count.
export function sorted(map) {
  return [...map].sort((a, b) => collator.compare(a[0], b[0]));
}
