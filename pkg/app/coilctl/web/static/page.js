// The page of "coilctl serve": it keeps the rows that the program tells of, draws the parts that have changed, and searches.
import { $, clock, count, flash, h, keyed, show, text } from './dom.js';
import * as parts from './parts.js';

// state has the rows of each section by their keys.
const state = Object.fromEntries(['sources', 'sections', 'kinds', 'findings', 'pools', 'forecasts', 'maps', 'nodes', 'egresses', 'policies', 'addresses', 'services', 'gateways'].map(s => [s, new Map()]));

// Each part is drawn when one of its sections has changed.
const drawn = [
  [parts.overview, ['sources', 'kinds', 'findings']],
  [parts.pools, ['sources', 'sections', 'pools', 'forecasts', 'maps']],
  [parts.nodes, ['sources', 'sections', 'nodes']],
  [parts.out, ['sources', 'sections', 'egresses', 'policies', 'addresses']],
  [parts.inward, ['sources', 'sections', 'services', 'gateways']],
];

const dirty = new Set();
// pinned is the row that somebody looks for.
let pinned = '', scheduled = false;

function redraw(sections) {
  sections.forEach(s => dirty.add(s));
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(draw);
}

function draw() {
  scheduled = false;
  const changed = new Set(dirty);
  dirty.clear();
  for (const [part, of] of drawn) if (of.some(s => changed.has(s))) part(state, find, pinned);
  // It is complete when each kind was read, or can't be. Tests measure until then.
  const sources = [...state.sources.values()];
  if (!document.body.dataset.drawn && sources.length && sources.every(s => s.known || s.problem)) {
    document.body.dataset.drawn = 'true';
    requestAnimationFrame(() => setTimeout(() => performance.mark('drawn')));
  }
  showState();
}

function apply(update) {
  clock.ahead = Date.parse(update.now) - Date.now();
  const changed = new Set();
  if (update.all) {
    for (const [s, rows] of Object.entries(state)) {
      rows.clear();
      changed.add(s);
    }
  }
  for (const [s, rows] of Object.entries(update.rows ?? {})) {
    if (!state[s]) continue; // of a newer program
    for (const [key, row] of Object.entries(rows)) state[s].set(key, row);
    changed.add(s);
  }
  for (const [s, keys] of Object.entries(update.gone ?? {})) {
    keys.forEach(key => state[s]?.delete(key));
    changed.add(s);
  }
  redraw(changed);
  if (changed.size && !$('found').hidden) again();
}

// The connection to the program. A page that nobody sees asks for nothing.
const patience = 30000, silence = 40000;
let events = null, lost = null, hiddenSince, heard = 0, retry;

function connect() {
  clearTimeout(retry);
  events?.close();
  heard = Date.now();
  events = new EventSource('events');
  const alive = () => {
    heard = Date.now();
    if (lost) {
      lost = null;
      showState();
    }
  };
  events.addEventListener('alive', e => {
    alive();
    const title = JSON.parse(e.data);
    text($('cluster'), title);
    document.title = title ? `Coil – ${title}` : 'Coil';
  });
  events.onmessage = e => {
    alive();
    apply(JSON.parse(e.data));
  };
  events.onerror = () => {
    lost ??= new Date();
    showState();
    if (events.readyState === EventSource.CLOSED) retry = setTimeout(connect, 2000); // it was refused
  };
}

function showState() {
  const e = $('state'), old = [...state.sources.values()].filter(s => s.problem && s.known).map(s => s.since).sort();
  let says = 'live', kind = 'good';
  if (lost) [says, kind] = [`disconnected since ${lost.toLocaleTimeString()}: coilctl doesn't answer`, 'bad'];
  else if (old.length) [says, kind] = [`the API server doesn't answer since ${new Date(old[0]).toLocaleTimeString()}`, 'bad'];
  else if (!document.body.dataset.drawn) [says, kind] = ['reading…', ''];
  text(e, says);
  e.className = `state ${kind}`;
  document.body.classList.toggle('old', Boolean(lost));
}

setInterval(() => {
  if (events && Date.now() - heard > silence) {
    lost ??= new Date(heard);
    connect();
    showState();
  }
}, 5000);

document.addEventListener('visibilitychange', () => {
  clearTimeout(hiddenSince);
  if (document.hidden) {
    hiddenSince = setTimeout(() => {
      clearTimeout(retry);
      events?.close();
      events = null;
    }, patience);
  } else if (!events) {
    connect();
  }
});

// Searches.
let typed, asked = 0, due;

function find(query) {
  $('query').value = query;
  search();
  $('found').scrollIntoView({ block: 'nearest' });
}

async function search() {
  const query = $('query').value.trim(), mine = ++asked;
  if (!query) {
    show($('found'), false);
    return;
  }
  let result, says;
  try {
    const answer = await fetch(`find?q=${encodeURIComponent(query)}`);
    if (!answer.ok) throw new Error(await answer.text());
    result = await answer.json();
    const n = result.found.length;
    says = n ? `${count(n + (result.more ?? 0), 'object')} for ${query}${result.more ? `; the first ${n} are here` : ''}` : `Nothing has ${query}: neither a range nor a name.`;
  } catch (e) {
    result = { found: [] };
    says = `Not now: ${e.message}`;
  }
  if (mine !== asked) return; // somebody went on typing
  show($('found'), true);
  text($('found-says'), says);
  keyed($('found-list'), result.found, f => `${f.kind} ${f.name}`, () => h('li', {}, h('button', { type: 'button' }, h('small'), ' ', h('b'), ' ', h('span'))), (li, f) => {
    const [kind, name, about] = li.firstChild.children;
    text(kind, f.kind);
    text(name, f.name);
    text(about, f.says);
    li.firstChild.disabled = !f.section;
    li.firstChild.onclick = () => go(f);
  });
}

// again searches again after changes, once a second at most.
function again() {
  due ??= setTimeout(() => {
    due = undefined;
    if (!$('found').hidden) search();
  }, 1000);
}

// go shows the row of an object.
function go(f) {
  pinned = f.key;
  for (const [part, of] of drawn) if (of.includes(f.section)) part(state, find, pinned);
  if (f.kind === 'Node') find(f.name);
  const root = $(`${f.section}-table`) ?? $(`${f.section}-list`);
  const e = root?.querySelector(`[data-key="${CSS.escape(f.key)}"]`);
  if (!e) return;
  e.scrollIntoView({ block: 'center', behavior: matchMedia('(prefers-reduced-motion: reduce)').matches ? 'auto' : 'smooth' });
  flash(e);
}

$('query').addEventListener('input', () => {
  clearTimeout(typed);
  typed = setTimeout(search, 150);
});
$('search').addEventListener('submit', e => {
  e.preventDefault();
  search();
});
$('found-close').addEventListener('click', () => {
  $('query').value = '';
  search();
});
document.addEventListener('keydown', e => {
  if (e.key === '/' && document.activeElement !== $('query')) {
    e.preventDefault();
    $('query').focus();
  } else if (e.key === 'Escape' && !$('found').hidden) {
    $('query').value = '';
    search();
  }
});

connect();
