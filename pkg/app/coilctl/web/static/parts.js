// The parts of the page: each shows some sections of the state, which are maps of rows by their keys.
import { $, age, count, h, keyed, meter, number, of, share, show, since, sorted, table, text } from './dom.js';
import { PoolMap } from './map.js';

// step is how many rows of a table are shown, and how many more when somebody asks.
const step = 100;

const limits = {};

// limited are the first rows, and a button for more. What somebody looks for is there, wherever it is.
function limited(id, all, redraw, pinned) {
  const limit = limits[id] ??= step, shown = all.slice(0, limit), button = $(`${id}-more`);
  if (pinned && !shown.some(([key]) => key === pinned)) shown.unshift(...all.filter(([key]) => key === pinned));
  show(button, all.length > shown.length);
  text(button, `Show more: ${number(shown.length)} of ${number(all.length)} are here`);
  button.onclick = () => {
    limits[id] = limit + 10 * step;
    redraw();
  };
  return shown;
}

// note says why there is nothing.
function note(id, state, section, none) {
  const lacks = state.sections.get(section)?.lacks ?? [], rows = state[section].size;
  const refused = lacks.map(r => state.sources.get(r)).filter(s => s?.problem);
  let says = rows ? '' : none;
  if (refused.length) says = `Can't be shown: ${refused.map(s => `${s.resource}: ${s.problem}`).join('; ')}`;
  else if (lacks.length) says = 'Being read…';
  text($(id), says);
  show($(id), says !== '');
}

const badge = (says, kind = '') => h('span', { class: `badge ${kind}` }, says);

// badges replaces the badges of an element, if they are others.
function badges(e, all) {
  const is = JSON.stringify(all);
  if (e.is === is) return;
  e.is = is;
  e.replaceChildren(...all.map(b => badge(...b)));
}

// messages shows what somebody should look at.
function messages(e, all = []) {
  keyed(e, all, m => m, m => h('li', {}, h('span', { class: 'mark', 'aria-hidden': 'true' }, '⚠'), h('span', {}, m)), () => {});
}

export function overview(state) {
  const known = [...state.sources.values()];
  keyed($('problems'), known.filter(s => s.problem), s => s.resource, () => h('li', {}, h('b'), ' ', h('span'), ' ', h('time')), (li, s) => {
    text(li.children[0], s.known ? `${s.resource} may be old` : `${s.resource} can't be read`);
    text(li.children[1], s.problem);
    if (li.since !== s.since) {
      li.since = s.since;
      li.lastChild.replaceWith(since(s.since, 'for '));
    }
  });
  keyed($('kinds'), sorted(state.kinds), ([key]) => key, () => h('li', {}, h('b'), ' ', h('span'), h('small')), (li, [, k]) => {
    text(li.children[0], number(k.count));
    text(li.children[1], k.kind);
    text(li.children[2], k.attention ? `${number(k.attention)} ${k.attention === 1 ? 'needs' : 'need'} attention` : '');
    li.className = k.attention ? 'bad' : k.count ? '' : 'dim';
  });
  const findings = sorted(state.findings);
  text($('count-findings'), findings.length ? number(findings.length) : '');
  show($('fine'), known.length > 0 && known.every(s => s.known) && findings.length === 0);
  keyed($('findings'), limited('findings', findings, () => overview(state)), ([key]) => key, ([, f]) => h('li', {},
    h('p', {}, h('span', { class: 'mark', 'aria-hidden': 'true' }, '⚠'), h('b', {}, `${f.kind} ${f.namespace ? f.namespace + '/' : ''}${f.name}`), ' ', badge(f.reason, 'bad'), ' ', h('time')),
    h('p', { class: 'says' })), (li, [, f]) => {
    text(li.lastChild, f.message);
    if (li.since !== f.since && f.since) li.querySelector('time').replaceWith(since(f.since, 'for '));
    li.since = f.since;
  });
}

const maps = new Map();

export function pools(state, find) {
  const all = sorted(state.pools);
  text($('count-pools'), all.length ? number(all.length) : '');
  note('pools-note', state, 'pools', 'There is no AddressPool.');
  show($('legend'), all.length > 0);
  const strips = stripsOf(state.maps);
  for (const name of maps.keys()) if (!state.pools.has(name)) maps.delete(name);
  keyed($('pools-list'), all, ([key]) => key, ([key]) => {
    const drawn = h('div', { class: 'maps' });
    maps.set(key, new PoolMap(drawn, find));
    return h('article', { class: 'pool', 'data-key': key }, h('h3', {}, h('span', {}, key), ' ', h('span', { class: 'badges' })), h('dl', { class: 'facts' }),
      h('ul', { class: 'messages' }), drawn, h('p', { class: 'note' }));
  }, (article, [key, p]) => {
    const map = state.maps.get(key), f = state.forecasts.get(key);
    badges(article.querySelector('.badges'), [
      [p.announce || 'Route'], ...(p.floatingOnly ? [['floating addresses only']] : []), ...(p.drains ? [['drains', 'bad']] : []),
    ]);
    facts(article.querySelector('dl'), [
      ['Blocks', of(p.blocks), share(p.blocks)], ['Addresses of pods', of(p.addresses), share(p.addresses)],
      ['Floating', number(p.floating)], ['Cooling down', number(p.cooling)], ['Block', count(2 ** p.blockSizeBits, 'address', 'addresses')], ...forecast(f),
      ...(p.excluded ? [['Excluded', p.excluded.join(', ')]] : []),
    ]);
    messages(article.querySelector('.messages'), p.attention);
    const says = [];
    if (map?.problem) says.push(map.problem);
    if (map?.blocksPerCell > 1) says.push(`Each cell is ${number(map.blocksPerCell)} blocks.`);
    if (map?.lost) says.push(`In no subnet of the pool: ${map.lost.join(', ')}`);
    text(article.lastChild, says.join(' '));
    show(article.lastChild, says.length > 0);
    // Only what has changed is drawn.
    if (map && (article.map !== map || article.strips !== strips.version(key))) {
      article.map = map;
      article.strips = strips.version(key);
      maps.get(key).update(map, strips.cells(key));
    }
  });
}

// stripsOf sorts the strips of maps by their pools. Strips are new objects when they have changed.
let versions = new WeakMap(), versionCount = 0;

function stripsOf(rows) {
  const of = new Map();
  for (const s of rows.values()) {
    if (!s.cells) continue;
    if (!versions.has(s)) versions.set(s, ++versionCount);
    if (!of.has(s.pool)) of.set(s.pool, []);
    of.get(s.pool).push(s);
  }
  return {
    version: pool => (of.get(pool) ?? []).reduce((v, s) => Math.max(v, versions.get(s)), 0) + ' ' + (of.get(pool)?.length ?? 0),
    cells(pool) {
      const subnets = [];
      for (const s of of.get(pool) ?? []) s.cells.forEach((c, i) => (subnets[s.subnet] ??= [])[s.from + i] = c);
      return subnets;
    },
  };
}

function forecast(f) {
  if (!f) return [];
  const taken = `${number(f.taken)} taken in ${age(f.seconds * 1000)}, ${number(f.free)} free`;
  return [['Full not before', f.fullInSeconds === undefined ? '–' : age(f.fullInSeconds * 1000), undefined, taken]];
}

// facts fills a list of names and values.
function facts(dl, all) {
  keyed(dl, all, f => f[0], f => h('div', {}, h('dt', {}, f[0]), h('dd')), (e, [, says, part, more]) => {
    const is = JSON.stringify([says, part, more]);
    if (e.is === is) return;
    e.is = is;
    e.lastChild.replaceChildren(...(part === undefined ? [] : [meter(part)]), says, ...(more ? [h('small', {}, more)] : []));
  });
}

const truth = (yes, title) => ({ text: yes ? 'ready' : 'not ready', mark: yes ? 'good' : 'bad', title });

const nodeColumns = [
  { title: 'Name', cell: n => n.name }, { title: 'Node', cell: n => truth(n.ready, 'what kubelet says') }, { title: 'coild', cell: n => truth(n.coild) },
  { title: 'Blocks', number: true, cell: n => number(n.blocks) },
  { title: 'Addresses', number: true, cell: n => ({ text: `${number(n.allocated)} of ${number(n.addresses)}`, part: n.addresses ? n.allocated / n.addresses : 0 }) },
  { title: 'Cooling', number: true, cell: n => number(n.cooling) }, { title: 'Floating', number: true, cell: n => number(n.floating) },
  { title: 'InternalIP', cell: n => (n.internalIPs ?? []).join(', ') },
];

export function nodes(state, find, pinned) {
  const all = sorted(state.nodes), wrong = ([, n]) => !n.ready || !n.coild;
  text($('count-nodes'), all.length ? number(all.length) : '');
  note('nodes-note', state, 'nodes', 'There is no Node.');
  show($('nodes-table'), all.length > 0);
  const first = [...all.filter(wrong), ...all.filter(n => !wrong(n))];
  table($('nodes-table'), nodeColumns, limited('nodes', first, () => nodes(state, find, pinned), pinned));
}

const place = a => a.state === 'held' ? { text: a.holder } : { text: a.state, mark: a.state === 'no holder' ? 'bad' : 'dim' };

const addressColumns = [
  { title: 'Address', cell: a => a.address.replace(',', ', ') }, { title: 'Pool', cell: a => a.pool }, { title: 'Owner', cell: a => a.owner }, { title: 'Holder', cell: place },
  { title: 'Since', cell: a => a.since ? { since: a.since } : '' }, { title: 'Ports', cell: a => (a.ports ?? []).join(', ') },
  { title: 'Attention', optional: true, cell: a => a.attention ? { text: a.attention.join('; '), mark: 'bad' } : '' },
];

export function out(state, find, pinned) {
  const all = sorted(state.egresses);
  text($('count-egresses'), all.length ? number(all.length) : '');
  note('egresses-note', state, 'egresses', 'There is no Egress: pods leave by the addresses of their nodes, or their own.');
  const policies = groups(state.policies, p => p.egress), addresses = groups(state.addresses, a => a.owner);
  keyed($('egresses-list'), limited('egresses', all, () => out(state, find, pinned), pinned), ([key]) => key, ([key]) => h('article', { class: 'way', 'data-key': key },
    h('h3', {}, h('span', {}, key), ' ', h('span', { class: 'badges' })), h('ul', { class: 'messages' }),
    h('div', { class: 'flow' }, ...['Pods', 'Routers', 'Leave by', 'To'].map(title => h('section', {}, h('h4', {}, title), h('p'), h('ul'))))), (article, [key, e]) => {
    const up = e.routers >= e.wanted && e.available;
    badges(article.querySelector('.badges'), [[e.available ? 'available' : 'not available', e.available ? 'good' : 'bad'], [`peering ${e.peering}`], ...(e.default ? [['default']] : [])]);
    messages(article.querySelector('.messages'), e.attention);
    const [who, routers, by, to] = article.querySelectorAll('.flow section');
    lines(who, count(e.clients, 'pod'), (policies.get(key) ?? []).map(([, p]) => [
      p.namespace ? `${p.namespace}/${p.name}` : `${p.name} (cluster)`, [count(p.clients, 'pod'), p.address ? `by ${p.address.split(',')[0]}` : ''].filter(Boolean).join(', '), p.attention?.join('; '),
    ]));
    routers.classList.toggle('bad', !up);
    lines(routers, `${number(e.routers)} of ${number(e.wanted)}`, (e.at ?? []).map(a => [a.router, `on ${a.node}`]));
    const held = addresses.get(`Egress ${key}`) ?? [];
    if (e.use === 'Node') lines(by, 'addresses of nodes', (e.at ?? []).map(a => [a.address.replace(',', ', '), `of ${a.node}`]));
    else if (held.length || e.use) lines(by, count(held.length, 'floating address', 'floating addresses'), held.map(([, a]) => [a.address.split(',')[0], `${a.state === 'held' ? `on ${a.holder}` : a.state}${a.address.includes(',') ? `, also ${a.address.split(',')[1]}` : ''}`, a.state === 'no holder' ? 'no node has it' : a.attention?.join('; ')]));
    else lines(by, 'addresses of the routers', []);
    lines(to, '', (e.destinations ?? []).map(d => [d, '']));
  });
  const floating = sorted(state.addresses);
  note('addresses-note', state, 'addresses', 'There is none.');
  show($('addresses-table'), floating.length > 0);
  table($('addresses-table'), addressColumns, limited('addresses', floating, () => out(state, find, pinned), pinned));
}

// groups are rows by what they belong to.
function groups(rows, by) {
  const of = new Map();
  for (const r of sorted(rows)) {
    const key = by(r[1]);
    if (!of.has(key)) of.set(key, []);
    of.get(key).push(r);
  }
  return of;
}

// maxLines is how many lines of a list are shown.
const maxLines = 12;

// lines fills a step of a way: how much there is, and what. A line has a name, what is said of it, and what is wrong.
function lines(section, says, all) {
  text(section.children[1], says);
  show(section.children[1], says !== '');
  const shown = all.length > maxLines ? [...all.slice(0, maxLines - 1), [`… and ${number(all.length - maxLines + 1)} more`, '']] : all;
  keyed(section.children[2], shown, l => l[0], () => h('li', {}, h('b'), ' ', h('span'), h('em')), (li, [name, more, wrong]) => {
    text(li.children[0], name);
    text(li.children[1], more);
    text(li.children[2], wrong ? `⚠ ${wrong}` : '');
  });
}

const serviceColumns = [
  { title: 'Service', cell: s => `${s.namespace}/${s.name}` }, { title: 'Addresses', cell: s => s.addresses.length ? s.addresses.join(', ') : { text: 'none yet', mark: 'dim' } },
  { title: 'Arrive at', cell: s => (s.at ?? []).join(', ') }, { title: 'Ports', cell: s => s.ports.join(', ') },
  { title: 'Status', cell: s => ({ text: s.reason, mark: s.waits ? 'bad' : 'good' }) }, { title: 'Since', cell: s => ({ since: s.created }) }, { title: 'Message', cell: s => s.message },
];

const gatewayColumns = [
  { title: 'Name', cell: g => g.name }, { title: 'Pools', cell: g => g.pools.join(', ') }, { title: 'Services', number: true, cell: g => number(g.services) },
  { title: 'Ports', number: true, cell: g => number(g.ports) }, { title: 'Endpoints', number: true, cell: g => number(g.endpoints) },
  { title: 'Heard', cell: g => g.heard ? { since: g.heard } : { text: 'never', mark: 'bad' } }, { title: 'Attention', optional: true, cell: g => g.attention ? { text: g.attention.join('; '), mark: 'bad' } : '' },
];

export function inward(state, find, pinned) {
  for (const [id, columns, none] of [['services', serviceColumns, 'Coil serves no Service of the type LoadBalancer.'], ['gateways', gatewayColumns, 'There is none.']]) {
    let all = sorted(state[id]);
    note(`${id}-note`, state, id, none);
    show($(`${id}-table`), all.length > 0);
    all = [...all.filter(([, s]) => s.waits), ...all.filter(([, s]) => !s.waits)];
    table($(`${id}-table`), columns, limited(id, all, () => inward(state, find, pinned), pinned));
  }
  text($('count-services'), state.services.size ? number(state.services.size) : '');
}
