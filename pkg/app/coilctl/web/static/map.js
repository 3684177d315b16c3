// Maps of address spaces, drawn on canvases: a cell for each block, or for some.
import { $, count, h, keyed, number, show, text } from './dom.js';

const maxColumns = 64;

// colours are those of the theme.
let colours = {};

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ['free', 'held-back', 'held', 'full', 'floating', 'cooling', 'excluded', 'letter', 'dim', 'focus']) colours[name] = style.getPropertyValue(`--${name}`).trim();
}

matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
  readColours();
  document.querySelectorAll('.maps').forEach(e => e.drawing.draw());
});

// PoolMap draws the subnets of one pool.
export class PoolMap {
  constructor(into, find) {
    this.find = find;
    this.subnets = [];
    this.into = into;
    into.drawing = this;
    new ResizeObserver(() => this.draw()).observe(into);
  }

  // update shows a map with the cells of each subnet.
  update(map, cells) {
    this.map = map;
    keyed(this.into, (map.subnets ?? []).map((s, i) => ({ ...s, i })), s => s.i, s => this.make(s.i), (e, s) => {
      text(e.querySelector('.range'), s.name);
      text(e.querySelector('.says'), s.says);
      this.subnets[s.i].cells = cells[s.i];
      this.subnets[s.i].canvas.setAttribute('aria-label', `Map of ${s.name}: ${s.says}. Arrow keys go from cell to cell, Enter finds what is in one.`);
    });
    this.draw();
  }

  make(i) {
    const canvas = h('canvas', { tabindex: '0', role: 'img' }), says = h('output', { class: 'unseen', 'aria-live': 'polite' });
    const subnet = this.subnets[i] = { canvas, says, at: -1 };
    const move = (at, from) => this.point(subnet, at, from);
    canvas.addEventListener('pointermove', e => move(this.cellAt(subnet, e)));
    canvas.addEventListener('pointerleave', () => move(-1));
    canvas.addEventListener('blur', () => move(-1));
    canvas.addEventListener('focus', () => canvas.matches(':focus-visible') && move(0, canvas));
    canvas.addEventListener('click', e => this.choose(subnet, this.cellAt(subnet, e)));
    canvas.addEventListener('keydown', e => {
      const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -subnet.columns, ArrowDown: subnet.columns, Home: -subnet.cells.length, End: subnet.cells.length };
      if (e.key in steps) {
        e.preventDefault();
        move(Math.max(0, Math.min(subnet.cells.length - 1, subnet.at + steps[e.key])), canvas);
      } else if (e.key === 'Enter') {
        this.choose(subnet, subnet.at);
      }
    });
    return h('figure', {}, h('figcaption', {}, h('b', { class: 'range' }), ' ', h('span', { class: 'says' })), canvas, says);
  }

  cellAt(s, e) {
    const column = Math.floor((e.offsetX - s.label) / s.step), line = Math.floor(e.offsetY / s.step);
    const at = line * s.columns + column;
    return column >= 0 && column < s.columns && at < s.cells.length ? at : -1;
  }

  // choose finds what is in a cell.
  choose(s, at) {
    const c = s.cells[at];
    if (c) this.find(c.first === c.last ? c.first : `${c.first}-${c.last}`);
  }

  // point shows what is in a cell, -1 for none. Keys come from an element.
  point(s, at, from) {
    if (at === s.at) return;
    s.at = at;
    this.drawSubnet(s);
    const tip = $('tip'), c = s.cells[at];
    show(tip, Boolean(c));
    if (!c) return;
    const says = tells(c, this.map);
    text(tip, says);
    if (from) text(s.says, says);
    const box = s.canvas.getBoundingClientRect();
    const x = box.left + s.label + (at % s.columns) * s.step, y = box.top + Math.floor(at / s.columns) * s.step + s.step + 6;
    tip.style.left = `${Math.max(8, Math.min(x, document.documentElement.clientWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${y + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - s.step - 12 : y}px`;
  }

  draw() {
    if (!colours.free) readColours();
    this.subnets.forEach(s => s.cells && this.drawSubnet(s));
  }

  drawSubnet(s) {
    const { canvas, cells } = s, width = this.into.clientWidth;
    if (!width || !cells?.length) return;
    const c = canvas.getContext('2d'), ratio = devicePixelRatio || 1, font = '11px ui-monospace, monospace';
    c.font = font;
    s.label = Math.ceil(Math.max(c.measureText(cells[0].first).width, c.measureText(cells.at(-1).first).width)) + 10;
    // On a phone cells are smaller, for lines that aren't too short.
    s.step = Math.min(cells.length > 512 ? 12 : 16, Math.max(9, Math.floor((width - s.label) / 16)));
    s.columns = Math.min(maxColumns, 2 ** Math.floor(Math.log2(Math.max(4, (width - s.label) / s.step))));
    const lines = Math.ceil(cells.length / s.columns), w = s.label + Math.min(s.columns, cells.length) * s.step, height = lines * s.step;
    if (canvas.width !== Math.round(w * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(w * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = `${w}px`;
      canvas.style.height = `${height}px`;
    }
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, w, height);
    c.font = font;
    c.textBaseline = 'middle';
    c.fillStyle = colours.dim;
    for (let line = 0; line < lines; line++) c.fillText(cells[line * s.columns].first, 0, line * s.step + s.step / 2);
    c.textAlign = 'center';
    cells.forEach((cell, i) => drawCell(c, cell, this.map.blockSize, s.label + (i % s.columns) * s.step, Math.floor(i / s.columns) * s.step, s.step - 2));
    if (s.at >= 0) {
      c.strokeStyle = colours.focus;
      c.lineWidth = 2;
      c.strokeRect(s.label + (s.at % s.columns) * s.step - 1, Math.floor(s.at / s.columns) * s.step, s.step, s.step - 1);
    }
    c.textAlign = 'start';
  }
}

function drawCell(c, cell, blockSize, x, y, size) {
  const fill = (colour, height = size) => {
    c.fillStyle = colours[colour];
    c.fillRect(x, y + size - height, size, height);
  };
  const letter = l => {
    c.fillStyle = colours.letter;
    c.font = `bold ${size - 3}px ui-monospace, monospace`;
    c.fillText(l, x + size / 2, y + size / 2 + 0.5);
  };
  if (cell.held) {
    const part = (cell.allocated ?? 0) / (cell.blocks * blockSize);
    fill('held-back');
    if (part >= 1) fill('full');
    else if (part > 0) fill('held', Math.max(2, Math.round(part * size)));
  } else if (cell.floating) {
    fill('floating');
    letter('F');
  } else if (cell.cooling) {
    fill('cooling');
    letter('c');
  } else if (cell.excluded === cell.blocks) {
    fill('excluded');
    letter('×');
  } else {
    fill('free');
  }
}

// tells is all that is known of a cell.
function tells(c, map) {
  const parts = [`${number(c.held ?? 0)} of ${count(c.blocks, 'block')} held`];
  if (c.held) parts.push(`${number(c.allocated ?? 0)} of their ${count(c.held * map.blockSize, 'address', 'addresses')} in use`);
  if (c.floating) parts.push(`${number(c.floating)} floating`);
  if (c.cooling) parts.push(`${number(c.cooling)} cooling down`);
  if (c.excluded) parts.push(`${number(c.excluded)} excluded`);
  const holders = c.holders ? '\n' + c.holders.join(', ') + (c.more ? ` and ${number(c.more)} more` : '') : '';
  return `${c.first}${c.last === c.first ? '' : ' to ' + c.last}\n${parts.join(', ')}${holders}`;
}
