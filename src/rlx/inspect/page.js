'use strict';
// The explorer: columns of rows, of which only the visible ones are in the document. All text of a graph goes through
// textContent. Rows are numbered in tree order; `inside` is the number of descendants of a row.
const data = JSON.parse(document.getElementById('data').textContent);
const ROW = 20, SPARE = 8;
const OPENS = 1, IS_OPEN = 2, IS_FOLD = 4, NEW = 8, GONE = 16, IS_STAGE = 32;
const narrow = matchMedia('(max-width: 700px)');

function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}
function button(text, label, action) {
  const node = element('button', '', text);
  node.type = 'button';
  if (label) { node.title = label; node.setAttribute('aria-label', label); }
  node.addEventListener('click', action);
  return node;
}

// -- columns ----------------------------------------------------------------------------------------------------------
class Column {
  constructor(columnData, number) {
    this.number = number;
    this.active = 0;
    this.drawn = new Map();
    this.spare = [];
    this.linkedRows = [];
    this.take(columnData);
    this.build();
    this.lay();
  }

  // The rows and their attributes.
  take(columnData) {
    Object.assign(this, columnData);
    const count = this.count = this.text.length;
    this.open = Uint8Array.from(this.flags, f => (f & IS_OPEN) ? 1 : 0);
    this.linked = new Uint8Array(count);
    this.linkedBefore = new Int32Array(count + 1);
    this.hit = new Uint8Array(count);
    this.hitBefore = new Int32Array(count + 1);
    this.parent = new Int32Array(count).fill(-1);
    this.widest = 0;
    const around = [];
    for (let row = 0; row < count; row++) {
      const depth = this.depth[row];
      this.parent[row] = depth ? around[depth - 1] : -1;
      around[depth] = row;
      const width = this.text[row].length + 1.5 * depth + (row in this.note ? this.note[row].length + 3 : 0);
      if (width > this.widest) this.widest = width;
    }
    this.isTimed = Object.keys(this.micros).length > 0;
  }

  // Rows of an initially hidden column are parsed when it is shown.
  load() {
    const later = this.later && document.getElementById(this.later);
    if (!later) return;
    this.later = '';
    this.take(JSON.parse(later.textContent));
    this.size();
    this.lay();
    if (find.value.trim()) search();
  }

  size() { this.space.style.width = `calc(${this.widest}ch + ${this.isTimed ? 10 : 4}em)`; }

  build() {
    this.section = element('section', this.number ? '' : 'stages shown');
    const title = element('h2', '', this.title);
    title.id = `title${this.number}`;
    title.append(element('small', '', this.about),
      button('+', `${this.title}: open all`, () => this.setAll(true)),
      button('−', `${this.title}: fold`, () => this.setAll(false)));
    this.view = element('div', 'view');
    this.view.tabIndex = 0;
    this.view.setAttribute('role', 'tree');
    this.view.setAttribute('aria-labelledby', title.id);
    this.space = element('div', 'space');
    this.space.setAttribute('role', 'presentation');
    this.size();
    this.view.append(this.space);
    this.section.append(title, this.view);
    this.view.addEventListener('scroll', () => this.draw(), { passive: true });
    this.view.addEventListener('keydown', event => this.key(event));
    this.space.addEventListener('click', event => {
      const node = event.target.closest('.row');
      if (!node) return;
      this.activate(node.number);
      if (event.target.className === 'arrow' || this.flags[node.number] & IS_FOLD) this.toggle(node.number);
      else pick(this, node.number);
    });
    this.space.addEventListener('dblclick', event => {
      const node = event.target.closest('.row');
      if (node && event.target.className !== 'arrow') this.toggle(node.number);
    });
    new ResizeObserver(() => this.draw()).observe(this.view);
  }

  // The visible rows.
  lay() {
    const visible = [];
    for (let row = 0; row < this.count; row += this.open[row] ? 1 : 1 + this.inside[row]) visible.push(row);
    this.visible = visible;
    this.space.style.height = `${visible.length * ROW}px`;
    this.clear();
    this.draw();
  }

  clear() {
    for (const node of this.drawn.values()) { node.remove(); this.spare.push(node); }
    this.drawn.clear();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.view.scrollTop / ROW) - SPARE);
    const last = Math.min(this.visible.length, Math.ceil((this.view.scrollTop + this.view.clientHeight) / ROW) + SPARE);
    for (const [at, node] of this.drawn)
      if (at < first || at >= last) { node.remove(); this.drawn.delete(at); this.spare.push(node); }
    const added = document.createDocumentFragment();
    for (let at = first; at < last; at++)
      if (!this.drawn.has(at)) {
        const node = this.fill(this.spare.pop() || this.blank(), at);
        this.drawn.set(at, node);
        added.append(node);
      }
    this.space.append(added);
    this.point();
  }

  blank() {
    const node = element('div', 'row');
    node.setAttribute('role', 'treeitem');
    node.append(element('span', 'time'), element('span', 'arrow'), element('span', 'label'), element('span', 'note'));
    node.firstChild.hidden = !this.isTimed;
    return node;
  }

  fill(node, at) {
    const row = this.visible[at], flags = this.flags[row], inside = this.inside[row];
    const [time, arrow, label, note] = node.children;
    node.number = row;
    node.id = `r${this.number}-${row}`;
    node.style.top = `${at * ROW}px`;
    node.setAttribute('aria-level', this.depth[row] + 1);
    if (flags & OPENS) node.setAttribute('aria-expanded', this.open[row] ? 'true' : 'false');
    else node.removeAttribute('aria-expanded');
    arrow.textContent = flags & OPENS ? (this.open[row] ? '▾' : '▸') : '';
    arrow.style.marginLeft = `${this.depth[row] * 1.1}em`;
    label.textContent = this.text[row];
    note.textContent = this.note[row] || '';
    const micros = this.micros[row];
    if (this.isTimed) {
      const part = (micros || 0) / total, isLaunch = this.links === 'launches' && !this.isTitle(row);
      const heat = isLaunch ? (micros || 0) / hottest : part;  // launches relative to the slowest, the rest to the total
      time.textContent = micros === undefined ? '' : `${(100 * part).toFixed(part < .0995 ? 1 : 0)} %`;
      time.title = micros === undefined ? '' : `${micros} µs`;
      time.style.setProperty('--share', `${100 * Math.min(1, heat)}%`);
      time.style.setProperty('--hue', `${Math.round(55 - 55 * Math.min(1, heat))}`);
    }
    const holds = (before) => inside && !this.open[row] && before[row + 1 + inside] > before[row + 1];
    const names = { opens: flags & OPENS, fold: flags & IS_FOLD, stage: flags & IS_STAGE, new: flags & NEW,
      gone: flags & GONE, linked: this.linked[row], within: holds(this.linkedBefore), hit: this.hit[row],
      holds: holds(this.hitBefore), picked: picked && picked.column === this && picked.row === row };
    for (const name in names) node.classList.toggle(name, Boolean(names[name]));
    node.setAttribute('aria-selected', names.picked ? 'true' : 'false');
    return node;
  }

  refresh() { for (const [at, node] of this.drawn) this.fill(node, at); this.point(); }

  point() {
    for (const node of this.drawn.values()) node.classList.toggle('active', node.number === this.active);
    const id = `r${this.number}-${this.active}`;
    if (document.getElementById(id)) this.view.setAttribute('aria-activedescendant', id);
    else this.view.removeAttribute('aria-activedescendant');
  }

  activate(row) { this.active = row; this.point(); }

  toggle(row) {
    if (!(this.flags[row] & OPENS)) return;
    this.open[row] ^= 1;
    this.lay();
  }

  setAll(open) {
    this.open = Uint8Array.from(this.flags, f => open ? f & OPENS : (f & IS_OPEN) ? 1 : 0);
    this.lay();
    if (this.place(this.active) < 0) this.active = this.closedAround(this.active);
    this.reveal(this.active);
  }

  // The outermost closed row around one, or the row itself.
  closedAround(row) {
    let outermost = row;
    for (let up = this.parent[row]; up >= 0; up = this.parent[up]) if (!this.open[up]) outermost = up;
    return outermost;
  }

  place(row) {
    let low = 0, high = this.visible.length - 1;
    while (low <= high) {
      const middle = (low + high) >> 1;
      if (this.visible[middle] === row) return middle;
      if (this.visible[middle] < row) low = middle + 1; else high = middle - 1;
    }
    return -1;
  }

  // Open the ancestors of a row, and scroll to it.
  reveal(row) {
    let changed = false;
    for (let up = this.parent[row]; up >= 0; up = this.parent[up])
      if (!this.open[up]) { this.open[up] = 1; changed = true; }
    if (changed) this.lay();
    const top = this.place(row) * ROW, height = this.view.clientHeight;
    if (top < this.view.scrollTop || top + ROW > this.view.scrollTop + height)
      this.view.scrollTop = Math.max(0, top - height / 3);
    this.draw();
  }

  move(row) {
    this.active = row;
    const top = this.place(row) * ROW, view = this.view;
    if (top < view.scrollTop) view.scrollTop = top;
    else if (top + ROW > view.scrollTop + view.clientHeight) view.scrollTop = top + ROW - view.clientHeight;
    this.draw();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.count) return;
    const row = this.active, at = Math.max(0, this.place(row)), last = this.visible.length - 1;
    const page = Math.max(1, Math.floor(this.view.clientHeight / ROW) - 1);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: last, PageDown: at + page, PageUp: at - page };
    if (event.key in to) this.move(this.visible[Math.min(last, Math.max(0, to[event.key]))]);
    else if (event.key === 'ArrowRight' && this.flags[row] & OPENS) {
      if (this.open[row]) this.move(row + 1); else this.toggle(row);
    } else if (event.key === 'ArrowLeft') {
      if (this.flags[row] & OPENS && this.open[row]) this.toggle(row);
      else if (this.parent[row] >= 0) this.move(this.parent[row]);
    } else if (event.key === 'Enter' || event.key === ' ') pick(this, row);
    else return;
    event.preventDefault();
  }

  // Rows by op, built on first use.
  index() {
    if (this.byOp || this.links === 'kernel') return;
    this.byOp = new Map();
    for (let row = 0; row < this.count; row++)
      if (this.set[row] >= 0 && !this.isTitle(row))
        for (const op of opsOf(this.set[row])) {
          const rows = this.byOp.get(op);
          if (rows) rows.push(row); else this.byOp.set(op, [row]);
        }
  }

  of(ops) {
    this.index();
    const rows = new Set();
    for (const op of ops) for (const row of this.byOp.get(op) || []) rows.add(row);
    return [...rows].sort((a, b) => a - b);
  }

  // Stages and sections are titles; in the tree of stages, the innermost stages are rows.
  isTitle(row) {
    if (this.number === 0) return this.inside[row] > 0;
    return Boolean(this.flags[row] & OPENS) && (this.flags[row] & (IS_STAGE | IS_FOLD) || this.note[row] !== undefined);
  }

  // The linked rows to jump to: launches rather than their buffers.
  targets() {
    const launches = this.linkedRows.filter(row => this.kernel[row] >= 0);
    return launches.length ? launches : this.linkedRows;
  }

  setFlags(kind, rows) {
    const flags = this[kind], before = this[`${kind}Before`];
    flags.fill(0);
    for (const row of rows) flags[row] = 1;
    for (let row = 0; row < this.count; row++) before[row + 1] = before[row] + flags[row];
    this[`${kind}Rows`] = rows;
    this.stepped = false;
  }
}

const unpacked = new Map();
function opsOf(number) {
  if (number < 0) return [];
  let ops = unpacked.get(number);
  if (!ops) {
    ops = [];
    const ranges = data.sets[number];
    for (let i = 0; i < ranges.length; i += 2)
      for (let op = ranges[i]; op < ranges[i] + ranges[i + 1]; op++) ops.push(op);
    unpacked.set(number, ops);
  }
  return ops;
}

// -- links ------------------------------------------------------------------------------------------------------------
// Graphs and launches are linked by ops, launches and code by kernel.
function related(column, row) {
  const ops = opsOf(column.set[row]), linked = columns.map(() => []);
  const launching = columns.find(c => c.links === 'launches');
  const title = column.isTitle(row), end = row + column.inside[row];
  let launches;
  if (column.links === 'kernel') {
    launches = [];
    for (let i = 0; i < launching.count; i++)
      if (column.kernel[row] >= 0 && launching.kernel[i] === column.kernel[row]) launches.push(i);
  } else if (column === launching && title) {
    launches = [];
    for (let i = row + 1; i <= end; i++) if (launching.set[i] >= 0 && !launching.isTitle(i)) launches.push(i);
  } else launches = column === launching && column.kernel[row] >= 0 ? [row] : launching.of(ops);
  const kernels = new Set(launches.map(i => launching.kernel[i]).filter(k => k >= 0));
  for (const other of columns) {
    if (other === launching) linked[other.number] = launches;
    else if (other.links === 'kernel') {
      const rows = [];
      for (let i = 0; i < other.count; i++) if (kernels.has(other.kernel[i]) && other.isTitle(i)) rows.push(i);
      linked[other.number] = rows;
    } else if (other === column) linked[other.number] = title ? [] : [row];
    else linked[other.number] = other.of(ops);
  }
  return linked;
}

let picked = null;
function pick(column, row) {
  if (picked && picked.column === column && picked.row === row) return unpick();
  picked = { column, row };
  column.active = row;
  const linked = related(column, row);
  for (const other of columns) other.setFlags('linked', linked[other.number]);
  describe();  // first, because it shrinks the columns
  for (const other of columns) {
    if (other !== column && other.linkedRows.length) other.active = other.targets()[0];
    if (other === column || other.linkedRows.length) other.reveal(other.active);
    other.refresh();
  }
}
function unpick() {
  picked = null;
  for (const column of columns) { column.setFlags('linked', []); column.refresh(); }
  describe();
}

function describe() {
  if (!picked) {
    what.textContent = narrow.matches ? 'Tap a line to see what it came from and what became of it.'
      : 'Click a line, or press Enter on it, to see what it came from and what became of it. Arrow keys move and unfold, '
        + 'Tab goes to the next level, / searches, Escape ends.';
    from.textContent = '';
    links.replaceChildren();
    return;
  }
  const { column, row } = picked, ops = opsOf(column.set[row]);
  what.textContent = column.text[row] + (column.note[row] ? `  (${column.note[row]})` : '');
  const places = [...new Set(ops.map(op => data.places.text[data.places.of[op]]))].filter(Boolean);
  const micros = column.micros[row];
  from.textContent = [micros ? `${micros} µs, ${(100 * micros / total).toFixed(1)} % of the launches` : '',
    places.slice(0, 4).join(' · ') + (places.length > 4 ? ` · and ${places.length - 4} more` : '')]
    .filter(Boolean).join(' · ');
  links.replaceChildren(...columns.filter(c => c.linkedRows.length && c !== column).map(c =>
    button(`${c.title}: ${c.targets().length}`, `show in ${c.title}, again for the next`, () => step(c))));
}
function step(column) {
  show(column);
  const rows = column.targets(), at = rows.indexOf(column.active);
  column.active = column.stepped ? rows[(at + 1) % rows.length] : rows[0];
  column.stepped = true;
  column.reveal(column.active);
  column.view.focus({ preventScroll: true });
}

// -- search -----------------------------------------------------------------------------------------------------------
let hits = [], hitAt = -1;
function lowered(column) { return column.text.map(text => text.toLowerCase()); }
function search() {
  const word = find.value.trim().toLowerCase();
  hits = []; hitAt = -1;
  for (const column of columns) {
    const rows = [];
    if (word && !column.section.hidden) {
      column.lower ||= lowered(column);
      for (let row = 0; row < column.count; row++) if (column.lower[row].includes(word)) rows.push(row);
    }
    column.setFlags('hit', rows);
    for (const row of rows) hits.push([column, row]);
    column.refresh();
  }
  tell();
}
function tell() {
  const number = hits.length.toLocaleString('en');
  state.textContent = !find.value.trim() ? '' : hitAt < 0 ? `${number} found` : `${hitAt + 1} of ${number}`;
  for (const each of [previous, following]) each.disabled = !hits.length;
}
function go(by) {
  if (!hits.length) return;
  hitAt = hitAt < 0 ? (by > 0 ? 0 : hits.length - 1) : (hitAt + by + hits.length) % hits.length;
  const [column, row] = hits[hitAt];
  show(column);
  column.active = row;
  column.reveal(row);
  tell();
}

// -- the page ---------------------------------------------------------------------------------------------------------
function show(column) {
  column.section.hidden = false;
  column.load();
  for (const other of columns) other.section.classList.toggle('shown', other === column);  // matters on narrow screens
  if (!narrow.matches) column.section.scrollIntoView({ block: 'nearest', inline: 'nearest' });
  column.tab.scrollIntoView({ block: 'nearest', inline: 'nearest' });
  tabs();
  column.draw();
}
function tabs() {
  for (const column of columns) {
    const on = narrow.matches ? column.section.classList.contains('shown') : !column.section.hidden;
    column.tab.setAttribute('aria-pressed', on ? 'true' : 'false');
  }
}
const launched = data.columns.find(c => c.links === 'launches');
let total = 0, hottest = 0;
launched.text.forEach((_, row) => {
  const micros = launched.kernel[row] >= 0 ? launched.micros[row] || 0 : 0;
  total += micros;
  hottest = Math.max(hottest, micros);
});
const columns = [];
const header = element('header'), nav = element('nav'), main = element('main'), aside = element('aside');
const search_ = element('div', 'find'), find = element('input'), state = element('output');
find.type = 'search';
find.placeholder = 'search all levels';
find.setAttribute('aria-label', 'search all levels');
const previous = button('↑', 'previous', () => go(-1)), following = button('↓', 'next', () => go(1));
search_.setAttribute('role', 'search');
search_.append(find, state, previous, following);
header.append(element('h1', '', data.name), element('p', '', data.about), search_);
nav.setAttribute('aria-label', 'levels');
const what = element('p', 'what'), from = element('p', 'from'), links = element('div', 'links');
aside.setAttribute('aria-live', 'polite');
aside.append(what, from, links);
data.columns.forEach((columnData, number) => {
  const column = new Column(columnData, number);
  columns.push(column);
  column.section.hidden = Boolean(columnData.later) || (number === 0 && !columnData.text.length);
  column.tab = button(columnData.title, '', () => {
    if (narrow.matches) show(column);
    else if (column.section.hidden) show(column);
    else { column.section.hidden = true; tabs(); }
  });
  nav.append(column.tab);
  main.append(column.section);
});
if (!columns[0].count) { columns[0].section.classList.remove('shown'); columns[1].section.classList.add('shown'); }
document.body.append(header, nav, main, aside);
for (const column of columns) column.draw();
tabs();
tell();
describe();

let waiting = 0;
find.addEventListener('input', () => { clearTimeout(waiting); waiting = setTimeout(search, 60); });
find.addEventListener('keydown', event => {
  if (event.key !== 'Enter') return;
  event.preventDefault();
  clearTimeout(waiting);
  if (!hits.length) search();
  go(event.shiftKey ? -1 : 1);
});
document.addEventListener('keydown', event => {
  if (event.key === 'Escape') {
    if (find.value) { find.value = ''; search(); } else if (picked) unpick();
  } else if (event.key === '/' && document.activeElement !== find) { find.focus(); event.preventDefault(); }
});
// Indexes for links and search are built while the page is idle.
function prepare(rest) {
  const [column, ...others] = rest;
  if (!column) return;
  (window.requestIdleCallback || setTimeout)(() => {
    column.index();
    if (!column.later) column.lower ||= lowered(column);
    prepare(others);
  });
}
prepare(columns);
narrow.addEventListener('change', () => { tabs(); describe(); for (const column of columns) column.draw(); });

// page.html#%12 selects node 12, page.html#layers.3 a stage.
let start = location.hash.slice(1);
try { start = decodeURIComponent(start); } catch { /* a lone % is part of a node's name */ }
if (start) {
  for (const column of columns) {
    const row = column.text.findIndex(text => text === start || text.startsWith(`${start} `));
    if (row >= 0) { pick(column, row); column.reveal(row); break; }
  }
}
