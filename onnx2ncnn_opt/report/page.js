
"use strict";
// Names come from untrusted models: they reach the page only as text nodes and attributes, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("main"), panel = document.getElementById("panel");
const said = document.getElementById("said");

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined));
  return element;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const name = text => h("span", {class: "name"}, text);

// Number formats.
const scaled = (units, base) => value => {
  if (value === null || value === undefined) return "–";
  let unit = 0;
  while (Math.abs(value) >= base && unit < units.length - 1) { value /= base; unit++; }
  const digits = unit === 0 && Number.isInteger(value) ? 0 : value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)}${units[unit] && " " + units[unit]}`;
};
const bytes = scaled(["B", "kB", "MB", "GB"], 1000);
const count = scaled(["", "k", "M", "G", "T"], 1000);
const time = value => value === null || value === undefined ? "–" : scaled(["µs", "ms", "s"], 1000)(value * 1e6);
const error = value => value === null || value === undefined ? "–" : typeof value === "string" ? value
  : value === 0 ? "0" : value.toExponential(1);
const times = (number, one, many) => `${number} ${number === 1 ? one : many}`;
const sum = values => values.some(value => value === null) ? null : values.reduce((a, b) => a + b, 0);
const narrow = matchMedia("(max-width: 40rem)");
// The end of a long name, because names of one model often start alike.
const lastOf = text => (most => text.length > most ? "…" + text.slice(1 - most) : text)(narrow.matches ? 21 : 46);

const STATUS = {
  right: "as in the reference", reordered: "the same numbers in another order", wrong: "differs from the reference",
  unknown: "the reference has no such value",
};
// The charts and columns of costs: label, field, format, and title.
const COSTS = [
  ["time", "seconds", time, "measured time"],
  ["MACs", "macs", count, "multiply-adds"],
  ["weights", "weight_bytes", bytes, "in the file"],
  ["blobs", "blob_bytes", bytes, "read and written"],
];
const errorOf = (layer, mode) => layer.errors[mode] || null;
const largest = layer => Object.values(layer.errors).reduce((most, found) =>
  typeof found.max_rel === "number" ? Math.max(most, found.max_rel) : found.max_rel === null ? most : Infinity, -1);

// A list with elements only for the visible rows; it is one stop of the Tab key.
class List {
  constructor(label, height, render, choose) {
    this.height = height; this.render = render; this.choose = choose; this.at = -1; this.count = 0;
    this.rows = new Map();
    this.inside = h("div", {class: "inside", role: "presentation"});
    this.element = h("div", {
      class: "list", tabindex: 0, role: "listbox", "aria-label": label,
      onscroll: () => this.later(true), onkeydown: event => this.key(event),
      onclick: event => {
        const row = event.target.closest(".row");
        if (row && !event.target.closest("button")) this.go(Number(row.dataset.at), event.target);
      },
    }, this.inside);
    this.id = `list-${List.made = (List.made || 0) + 1}`;
    new ResizeObserver(() => this.later(true)).observe(this.element);
  }
  show(count) {
    this.count = count; this.at = -1;
    this.inside.style.height = `${count * this.height}px`;
    this.element.scrollTop = 0;
    this.later();
  }
  // Draw with the next frame; existing rows `stay` if only their place has changed.
  later(stay) {
    if (!stay) this.rows.clear();
    if (this.waits) return;
    this.waits = requestAnimationFrame(() => { this.waits = 0; this.draw(); });
  }
  draw() {
    const top = this.element.scrollTop - (this.above || 0);
    const first = Math.max(0, Math.floor(top / this.height) - 4);
    const last = Math.min(this.count, Math.ceil((top + this.element.clientHeight) / this.height) + 4);
    const rows = new Map();
    for (let at = first; at < last; at++) rows.set(at, this.rows.get(at) || this.row(at));
    for (const row of [...this.inside.children]) if (rows.get(Number(row.dataset.at)) !== row) row.remove();
    let next = this.inside.firstChild;
    for (const row of rows.values()) {
      if (row === next) next = next.nextSibling;
      else this.inside.insertBefore(row, next);
    }
    this.rows = rows;
    if (this.at >= first && this.at < last) this.element.setAttribute("aria-activedescendant", `${this.id}-${this.at}`);
    else this.element.removeAttribute("aria-activedescendant");
  }
  row(at) {
    const row = this.render(at);
    row.classList.add("row");
    row.classList.toggle("chosen", at === this.at && this.marks !== false);
    row.dataset.at = at;
    fill(row, {id: `${this.id}-${at}`, role: "option", "aria-selected": String(at === this.at),
      "aria-posinset": at + 1, "aria-setsize": this.count}, []);
    row.style.top = `${at * this.height}px`;
    row.style.height = `${this.height}px`;
    return row;
  }
  reveal(at) {
    this.at = at;
    const top = at * this.height, seen = this.element.clientHeight - (this.above || 0);
    if (top < this.element.scrollTop || top + this.height > this.element.scrollTop + seen)
      this.element.scrollTop = Math.max(0, top - seen / 2);
    this.later();
  }
  go(at, target) {
    if (at < 0 || at >= this.count) return;
    this.reveal(at);
    this.choose(at, target);
  }
  key(event) {
    const page = Math.max(1, Math.floor(this.element.clientHeight / this.height) - 1);
    const to = {ArrowDown: this.at + 1, ArrowUp: this.at - 1, PageDown: this.at + page, PageUp: this.at - page,
      Home: 0, End: this.count - 1}[event.key];
    if (to === undefined || event.target !== this.element) return;
    event.preventDefault();
    this.go(Math.min(this.count - 1, Math.max(0, to)));
  }
}

// One net on the page, with the chosen layer: its side ("before" or "after") and number.
class View {
  constructor(net) {
    this.net = net; this.chosen = null; this.listeners = [];
    this.groupOf = {before: new Map(), after: new Map()};
    net.groups.forEach((group, number) => {
      for (const side of ["before", "after"]) for (const at of group[side]) this.groupOf[side].set(at, number);
    });
    this.rowOf = {before: new Map(), after: new Map()};
    net.rows.forEach(([left, right], row) => {
      if (left !== null) this.rowOf.before.set(left, row);
      if (right !== null) this.rowOf.after.set(right, row);
    });
    this.readers = {};
    for (const side of ["before", "after"]) {
      this.readers[side] = net[side].map(() => []);
      net[side].forEach((layer, at) => layer.reads.forEach(read => this.readers[side][read].push(at)));
    }
  }
  choose(side, at, by) {
    this.chosen = {side, at};
    this.showPanel();
    for (const listener of this.listeners) listener(side, at, by);
  }
  close() {
    this.chosen = null;
    panel.hidden = true;
    document.body.classList.remove("with-panel");
    for (const listener of this.listeners) listener(null, null, null);
  }
  // The corresponding layers of the other side.
  mates(side, at) {
    const other = side === "before" ? "after" : "before", group = this.groupOf[side].get(at);
    if (group !== undefined) return this.net.groups[group][other];
    const row = this.net.rows[this.rowOf[side].get(at)], mate = row && row[side === "before" ? 1 : 0];
    return mate === null || mate === undefined || this.groupOf[other].has(mate) ? [] : [mate];
  }
  link(side, at) {
    const layer = this.net[side][at];
    return h("button", {class: "link", type: "button", onclick: () => this.choose(side, at)}, `${layer.type} `, name(layer.name));
  }
  showPanel() {
    const {side, at} = this.chosen, net = this.net, layer = net[side][at];
    const group = this.groupOf[side].get(at), other = side === "before" ? "after" : "before";
    const label = net.names[side === "before" ? 0 : 1];
    const rows = [];
    const row = (title, ...content) => { if (content.flat(Infinity).length) rows.push(h("dt", {}, title), h("dd", {}, ...content)); };
    const lines = texts => texts.map(text => h("span", {}, text));
    row("name", name(layer.name));
    if (layer.params) row("parameters", name(layer.params));
    row("output", layer.blobs.map(name));
    row("reads", layer.reads.map(read => this.link(side, read)));
    row("read by", this.readers[side][at].slice(0, 12).map(reader => this.link(side, reader)));
    row("ONNX nodes", layer.origin.map(node => h("button", {class: "link", type: "button", onclick: () => this.find(node)}, name(node))));
    if (group !== undefined) row("passes", lines(net.groups[group].passes));
    row(net.names[side === "before" ? 1 : 0], this.mates(side, at).map(mate => this.link(other, mate)));
    for (const [mode, found] of Object.entries(layer.errors)) {
      const text = found.status === "right" ? error(found.max_rel) : `${error(found.max_rel)}, ${STATUS[found.status]}`;
      row(`error, ${mode}`, lines([text]), found.message && found.status !== "unknown" ? h("span", {class: "quiet"}, found.message) : [],
        found.value ? [h("span", {class: "quiet"}, "compared with"), name(found.value)] : []);
    }
    for (const [title, key, format, about] of COSTS)
      if (layer[key] !== null && (layer[key] || key === "seconds")) row(title, lines([`${format(layer[key])} ${key === "seconds" ? "" : about}`]));
    if (layer.mask) row("feature mask", lines([layer.mask]));
    if (side === "after") row("near misses", lines(net.near_misses.filter(miss => miss.layers.includes(at))
      .map(miss => `${miss.pass_name}: ${miss.reason}`)));
    panel.replaceChildren(
      h("header", {}, h("h2", {}, `${layer.type} `, h("span", {class: "quiet"}, `${label}, ${at + 1} of ${net[side].length}`)),
        h("button", {class: "close", type: "button", onclick: () => this.close()}, "Close")),
      h("dl", {}, ...rows));
    panel.hidden = false;
    panel.scrollTop = 0;
    document.body.classList.add("with-panel");
    said.textContent = `${label} ${at + 1}: ${layer.type} ${layer.name}`;
  }
}

function section(id, title, ...content) {
  return h("section", {id, "aria-labelledby": `${id}-title`}, h("h2", {id: `${id}-title`}, title), ...content);
}

const VERDICTS = {ok: "✓ verified", wrong: "✗ wrong", unverified: "? not verified"};
const badge = net => h("span", {class: `badge ${net.verdict}`}, VERDICTS[net.verdict]);

function summary(net) {
  const {after, before, memory} = net, peak = course => course ? bytes(Math.max(0, ...course.bytes)) : "–";
  const seconds = sum(after.map(layer => layer.seconds || 0));
  const facts = [
    ...net.facts,
    ...(after.length ? [
      [`layers`, `${before.length} ${net.names[0]}, ${after.length} ${net.names[1]}`],
      ["multiply-adds", count(sum(after.map(layer => layer.macs)))],
      ["weights", bytes(sum(after.map(layer => layer.weight_bytes)))],
      ["peak memory of blobs", memory[0] ? `${peak(memory[0])} → ${peak(memory[1])}` : peak(memory[1])],
      ["time of all layers", net.timing ? time(seconds) : "not measured"],
    ] : []),
  ];
  return h("section", {"aria-label": "Summary"},
    h("h1", {}, net.title),
    h("p", {}, badge(net), " ", net.headline),
    h("dl", {class: "facts"}, facts.map(([label, text]) => h("div", {}, h("dt", {}, label), h("dd", {}, text)))),
    net.notes.length ? h("ul", {class: "notes"}, net.notes.map(note => h("li", {}, note))) : null);
}

// Decades that the errors cover, for a logarithmic axis.
function decades(values) {
  const logs = values.filter(value => typeof value === "number" && value > 0 && Number.isFinite(value)).map(Math.log10);
  const low = Math.floor(Math.min(-7, ...logs)), high = Math.ceil(Math.max(-2, ...logs));
  return {low: Math.max(low, -12), high: Math.min(high, 6)};
}
function position(value, {low, high}) {
  if (value === null) return null;
  if (typeof value === "string") return 1;
  return value <= 0 ? 0 : Math.min(1, Math.max(0, (Math.log10(value) - low) / (high - low)));
}

function outputs(net) {
  const range = decades(net.outputs.flatMap(output => [output.max_rel, output.allowed])), tick = at => `M${4 + at * 152} 2V18`;
  const scale = output => {
    const at = position(output.max_rel, range);
    if (at === null) return null;
    const x = 4 + at * 152, mode = net.modes.indexOf(output.mode);
    return s("svg", {class: "scale", viewBox: "0 0 160 20", "aria-hidden": "true"},
      s("path", {class: "rule", d: Array.from({length: range.high - range.low + 1}, (_, i) =>
        `M${4 + 152 * i / (range.high - range.low)} 4V16`).join("")}),
      s("path", {d: `M4 10H${x}`, stroke: `var(--mode-${Math.max(0, mode)})`, "stroke-width": 3}),
      mark(mode, x, 10, output.status === "ok" ? "" : "fill"),
      output.allowed === null ? null : s("path", {class: "allowed", d: tick(position(output.allowed, range))}));
  };
  return section("outputs", "Outputs",
    h("p", {class: "quiet"}, `The bar is the relative error, on a logarithmic scale from 1e${range.low} to 1e${range.high}: the largest error `,
      "of the output, divided by its largest element.",
      net.outputs.some(output => output.allowed !== null) ? " The line across it is the error that the rule allows." : ""),
    h("div", {class: "wide", tabindex: 0, role: "region", "aria-label": "Outputs"}, h("table", {},
      h("thead", {}, h("tr", {}, ["output", "mode", "result"].map(text => h("th", {scope: "col"}, text)),
        ["max error", "relative error"].map(text => h("th", {scope: "col", class: "number"}, text)), h("th", {scope: "col"}, ""),
        h("th", {scope: "col", class: "number"}, "cosine"), h("th", {scope: "col"}, "rule"), h("th", {scope: "col"}, ""))),
      h("tbody", {}, net.outputs.map(output => h("tr", {class: output.status === "ok" ? "" : "bad"},
        h("td", {}, name(output.name)), h("td", {}, output.mode), h("td", {class: "status"}, output.status === "ok" ? "✓ ok" : `✗ ${output.status}`),
        h("td", {class: "number"}, error(output.max_abs)), h("td", {class: "number"}, error(output.max_rel)), h("td", {}, scale(output)),
        h("td", {class: "number"}, typeof output.cosine === "number" ? output.cosine.toFixed(6) : "–"),
        h("td", {title: output.inputs}, output.rule || "–", typeof output.allowed === "number" ? h("div", {class: "quiet"}, `${error(output.allowed)} allowed`) : null),
        h("td", {}, output.message)))))));
}

// The mark of a mode: each has its own form, for readers who cannot distinguish colours.
const SHAPES = [
  (x, y, r = 3) => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`,
  (x, y, r = 3) => `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}z`,
  (x, y, r = 3) => `M${x} ${y - r * 1.2}l${r * 1.15} ${2 * r}h${-2.3 * r}z`,
];
const CROSS = (x, y, r = 3) => `M${x - r} ${y - r}l${2 * r} ${2 * r}m0 ${-2 * r}l${-2 * r} ${2 * r}`;
const shape = mode => SHAPES[Math.max(0, mode) % SHAPES.length];
const mark = (mode, x, y, fills) => s("path", {d: shape(mode)(x, y), stroke: `var(--mode-${Math.max(0, mode)})`, "stroke-width": 1.5,
  fill: fills ? `var(--mode-${Math.max(0, mode)})` : "var(--back)"});
const key = (path, colour, text) => h("span", {class: "key"}, s("svg", {viewBox: "0 0 12 12", "aria-hidden": "true"},
  s("path", {d: path(6, 6), stroke: colour, fill: "none", "stroke-width": 1.5})), ` ${text}`);

const LEFT = 56, RIGHT = 12;

// Charts over one axis of positions: a slider for the keyboard, one cursor through all of them.
class Strips {
  constructor(label, count, strips, describe, choose) {
    this.count = count; this.strips = strips; this.describe = describe; this.choose = choose; this.at = -1;
    this.cursor = h("div", {class: "cursor", hidden: true});
    this.readout = h("div", {class: "readout"}, h("span", {class: "quiet"}, "Point at a layer, or use the arrow keys."));
    this.boxes = strips.map(strip => s("svg", {height: strip.height, "aria-hidden": "true"}));
    this.element = h("div", {
      class: "strips", tabindex: 0, role: "slider", "aria-label": label, "aria-valuemin": 1, "aria-valuemax": count,
      "aria-valuenow": 1, "aria-valuetext": "none chosen",
      onkeydown: event => this.key(event),
      onpointermove: event => { if (event.pointerType === "mouse") this.point(this.under(event), false); },
      onpointerleave: () => this.point(this.fixed === undefined ? -1 : this.fixed, false),
      onclick: event => this.point(this.under(event), true),
    }, strips.map((strip, number) => [h("div", {class: "strip-name"}, strip.name), this.boxes[number]]), this.cursor);
    new ResizeObserver(() => this.draw()).observe(this.element);
  }
  x(at) { return LEFT + (at + .5) * (this.width - LEFT - RIGHT) / this.count; }
  under(event) {
    const x = event.clientX - this.element.getBoundingClientRect().left;
    return Math.min(this.count - 1, Math.max(0, Math.floor((x - LEFT) * this.count / (this.width - LEFT - RIGHT))));
  }
  draw() {
    const width = this.element.clientWidth;
    if (!width || width === this.width) return;
    this.width = width;
    this.strips.forEach((strip, number) => {
      this.boxes[number].setAttribute("viewBox", `0 0 ${width} ${strip.height}`);
      this.boxes[number].replaceChildren(...strip.draw(at => this.x(at), width, strip.height));
    });
    this.point(this.at, false);
  }
  point(at, picks) {
    this.at = at;
    this.cursor.hidden = at < 0;
    if (at < 0) return;
    this.cursor.style.left = `${this.x(at)}px`;
    const parts = this.describe(at);
    this.readout.replaceChildren(...parts.map(part => h("span", {}, part)));
    this.element.setAttribute("aria-valuenow", at + 1);
    this.element.setAttribute("aria-valuetext", this.readout.innerText || this.readout.textContent);
    if (picks) { this.fixed = at; this.choose(at); }
  }
  fix(at) { this.fixed = at < 0 ? undefined : at; this.point(at, false); }
  key(event) {
    const page = Math.max(1, Math.round(this.count / 20));
    const to = {ArrowRight: this.at + 1, ArrowUp: this.at + 1, ArrowLeft: this.at - 1, ArrowDown: this.at - 1,
      PageUp: this.at + page, PageDown: this.at - page, Home: 0, End: this.count - 1}[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.point(Math.min(this.count - 1, Math.max(0, to)), true);
  }
}
// Points [x, value]: only the largest in each column of pixels.
function points(values, x) {
  const found = new Map();
  values.forEach((value, at) => {
    const column = values.length > 400 ? Math.round(x(at)) : x(at);
    if (!(found.get(column) >= value)) found.set(column, value);
  });
  return [...found];
}
const axis = (x, y, text, anchor) => s("text", {class: "axis", x, y, "text-anchor": anchor || "end"}, text);

function errorStrip(net) {
  const all = net.after.flatMap(layer => Object.values(layer.errors).map(found => found.max_rel));
  const range = decades(all), present = new Set(net.after.flatMap(layer => Object.values(layer.errors).map(found => found.status)));
  const legend = [
    net.modes.map((mode, number) => key(shape(number), `var(--mode-${number})`, mode)),
    present.has("wrong") ? key(CROSS, "var(--bad)", "differs") : null,
  ];
  return {
    height: 140,
    name: [h("span", {}, "relative error"), ...legend.flat().filter(Boolean)],
    draw(x, width, height) {
      const y = value => 8 + (1 - position(value, range)) * (height - 24), found = [];
      const step = Math.max(1, Math.ceil((range.high - range.low) / 5));
      for (let decade = range.low; decade <= range.high; decade += step)
        found.push(s("path", {class: "rule", d: `M${LEFT} ${y(10 ** decade)}H${width - RIGHT}`}), axis(LEFT - 8, y(10 ** decade) + 4, `1e${decade}`));
      net.modes.forEach((mode, number) => {
        const paths = {right: "", wrong: ""}, size = x(1) - x(0) < 3 ? 1.5 : 3;
        net.after.forEach((layer, at) => {
          const seen = errorOf(layer, mode);
          if (!seen || seen.status === "unknown") return;
          const value = seen.max_rel === null ? (seen.status === "wrong" ? "none" : null) : seen.max_rel;
          if (value === null) return;
          if (seen.status === "wrong") paths.wrong += CROSS(x(at), y(value), size);
          else paths.right += shape(number)(x(at), y(value), size);
        });
        found.push(s("path", {class: "dots", d: paths.right, stroke: `var(--mode-${number})`}), s("path", {class: "dots", d: paths.wrong, stroke: "var(--bad)"}));
      });
      return found;
    },
  };
}

function costStrip(net, [title, field, format, about]) {
  const values = net.after.map(layer => layer[field]), most = Math.max(0, ...values.map(value => value || 0));
  if (!most) return null;
  return {
    height: 76,
    name: [h("span", {}, title), h("span", {class: "quiet"}, `${about}, up to ${format(most)}`)],
    draw(x, width, height) {
      const floor = height - 8, wide = Math.max(1, (x(1) - x(0)) * .7);
      const bars = points(values, x).map(([column, value]) => value ? `M${column} ${floor}V${floor - value / most * (height - 20)}` : "").join("");
      return [s("path", {class: "rule", d: `M${LEFT} 12H${width - RIGHT}M${LEFT} ${floor}H${width - RIGHT}`}),
        axis(LEFT - 8, 16, format(most)), axis(LEFT - 8, floor, "0"),
        s("path", {class: "bars", d: bars, "stroke-width": wide})];
    },
  };
}

function costs(view) {
  const net = view.net, strips = [];
  if (net.modes.length) strips.push(errorStrip(net));
  strips.push(...COSTS.map(cost => costStrip(net, cost)).filter(Boolean));
  if (!strips.length) return null;
  const widget = new Strips("Layers by error and cost", net.after.length, strips, at => {
    const layer = net.after[at];
    return [h("b", {}, `${at + 1} ${layer.type}`), name(layer.name),
      ...Object.entries(layer.errors).filter(([, found]) => found.status !== "unknown")
        .map(([mode, found]) => `error ${error(found.max_rel)}${net.modes.length > 1 ? ` in ${mode}` : ""}`),
      ...COSTS.filter(([, field]) => layer[field]).map(([title, field, format]) => `${format(layer[field])} ${title}`)];
  }, at => view.choose("after", at, widget));
  view.listeners.push((side, at, by) => { if (by !== widget) widget.fix(side === "after" ? at : -1); });
  return section("costs", "Error and cost of each layer",
    h("p", {class: "quiet"}, "Layers from left to right, in the order of the file."),
    !net.modes.length && net.errors ? h("p", {}, net.errors) : null,
    net.modes.length && (net.errors || net.timing) ? h("details", {class: "quiet"}, h("summary", {}, "How this was measured"), [net.errors, net.timing].filter(Boolean).map(text => h("p", {}, text))) : null,
    widget.element, widget.readout);
}

function memoryOver(view) {
  const net = view.net, [before, after] = net.memory;
  if (!after || !after.bytes.length) return null;
  const most = Math.max(...after.bytes, ...(before ? before.bytes : [])), peak = after.bytes.indexOf(Math.max(...after.bytes));
  const strip = {
    height: 190,
    name: [key((x, y) => `M${x - 6} ${y}H${x + 6}`, "var(--mode-0)", net.names[1]),
      before ? h("span", {class: "key"}, s("svg", {viewBox: "0 0 12 12", "aria-hidden": "true"}, s("path", {d: "M0 6H12", class: "earlier"})), ` ${net.names[0]}`) : null].filter(Boolean),
    draw(x, width, height) {
      const floor = height - 22, y = value => floor - value / most * (height - 40), right = width - RIGHT;
      const line = (values, place) => points(values, place).map(([column, value], at) => `${at ? "L" : "M"}${column} ${y(value)}`).join("");
      const found = [s("path", {class: "rule", d: `M${LEFT} ${y(most)}H${right}M${LEFT} ${y(most / 2)}H${right}M${LEFT} ${floor}H${right}`}),
        axis(LEFT - 8, y(most) + 4, bytes(most)), axis(LEFT - 8, y(most / 2) + 4, bytes(most / 2)), axis(LEFT - 8, floor + 4, "0"),
        axis(LEFT, height - 6, "first layer to run", "start"), axis(right, height - 6, "last", "end"),
        s("path", {class: "area", d: `${line(after.bytes, x)}L${x(after.bytes.length - 1)} ${floor}L${x(0)} ${floor}Z`})];
      if (before) found.push(s("path", {class: "earlier", d: line(before.bytes, at => LEFT + (at + .5) * (right - LEFT) / before.bytes.length)}));
      found.push(s("circle", {class: "peak", cx: x(peak), cy: y(after.bytes[peak]), r: 4}));
      return found;
    },
  };
  const widget = new Strips("Memory over the evaluation order", after.bytes.length, [strip], at => {
    const layer = net.after[after.layers[at]];
    return [h("b", {}, bytes(after.bytes[at])), `while ${layer.type} runs,`, name(layer.name), `step ${at + 1} of ${after.bytes.length}`];
  }, at => view.choose("after", after.layers[at], widget));
  const step = new Map(after.layers.map((layer, at) => [layer, at]));
  view.listeners.push((side, at, by) => { if (by !== widget) widget.fix(side === "after" && step.has(at) ? step.get(at) : -1); });
  const most_at = net.after[after.layers[peak]];
  return section("memory", "Memory while the net runs",
    h("p", {class: "quiet"}, `Bytes of all blobs that exist while each layer runs, in the order in which ncnn runs them (an estimate for float32, `,
      `without workspace and weights)${before ? `; the line of ${net.names[0]} is stretched to the same width` : ""}. The peak is ${bytes(after.bytes[peak])}, at ${most_at.type} `, name(most_at.name), "."),
    widget.element, widget.readout);
}

// The edges in a column's margin, for each row: the line to the next layer, and at most `limit` lanes for longer edges.
function margins(layers, readers, rowOf, count, limit) {
  const rows = Array.from({length: count}, () => ({up: false, down: false, lanes: []})), free = [], ends = layers.map(() => []);
  let made = 0, wide = 0;
  layers.forEach((layer, at) => {
    free.push(...ends[at]);
    const own = rowOf.get(at), next = rowOf.get(at + 1), last = Math.max(at, ...readers[at]);
    if (readers[at].includes(at + 1))
      for (let row = own; row <= next; row++) { rows[row].up ||= row > own; rows[row].down ||= row < next; }
    if (last <= at + 1) return;
    const lane = free.length ? free.splice(free.indexOf(Math.min(...free)), 1)[0] : made++;
    ends[last].push(lane);
    if (lane >= limit) return;
    wide = Math.max(wide, lane + 1);
    const reads = new Set(readers[at].filter(reader => reader > at + 1).map(reader => rowOf.get(reader)));
    for (let row = own; row <= rowOf.get(last); row++)
      rows[row].lanes.push({lane, starts: row === own, ends: row === rowOf.get(last), joins: reads.has(row)});
  });
  return {rows, wide: wide ? 20 + 9 * wide : 18};
}
const ROW = 40;
function edges(margin, has) {
  const x = lane => 20 + 9 * lane, middle = ROW / 2;
  let path = `${margin.up ? `M8 0V${middle}` : ""}${margin.down ? `M8 ${middle}V${ROW}` : ""}`;
  for (const {lane, starts, ends, joins} of margin.lanes) {
    if (starts) path += `M8 ${middle}C8 ${middle + 10} ${x(lane)} ${middle + 6} ${x(lane)} ${ROW}`;
    else if (!ends) path += `M${x(lane)} 0V${ROW}`;
    if (joins) path += `M${x(lane)} 0C${x(lane)} ${middle - 6} 8 ${middle - 10} 8 ${middle}`;
  }
  return s("svg", {class: "edges", width: 20, height: ROW, "aria-hidden": "true"}, s("path", {d: path}),
    has ? s("circle", {cx: 8, cy: middle, r: 3.5}) : null);
}

function graph(view) {
  const net = view.net, sides = ["before", "after"];
  if (!net.rows.length) return null;
  const margin = Object.fromEntries(sides.map(side =>
    [side, margins(net[side], view.readers[side], view.rowOf[side], net.rows.length, 5)]));
  // Adjacent groups have different colours, and each group has a number for readers who cannot distinguish colours.
  let shown = net.rows.map((_, row) => row), side = "after";
  const bandOf = row => {
    const numbers = net.rows[row].map((at, which) => at === null ? undefined : view.groupOf[sides[which]].get(at));
    return numbers[0] !== undefined ? numbers[0] : numbers[1];
  };
  const cell = (row, which) => {
    const own = sides[which], at = net.rows[row][which];
    if (at === null) return h("div", {class: "cell"});
    const layer = net[own][at], number = view.groupOf[own].get(at), group = net.groups[number];
    const tells = group && (own === "after" ? group.after[0] === at : !group.after.length && group.before[0] === at);
    const element = h("div", {class: "cell", "data-side": own, title: `${layer.type} ${layer.name}`},
      h("b", {}, layer.type, tells ? h("span", {class: "pass"}, `${own === "before" ? "removed: " : ""}${group.passes.join(", ")}`) : null),
      h("i", {}, lastOf(layer.name)));
    if (group) {
      element.classList.add("held");
      element.style.setProperty("--hue", `var(--hue-${number % 6})`);
    }
    const chosen = view.chosen;
    if (chosen) {
      const isIt = chosen.side === own && chosen.at === at;
      element.classList.toggle("active", isIt);
      element.classList.toggle("mate", !isIt && (chosen.side === own
        ? number !== undefined && number === view.groupOf[own].get(chosen.at) : view.mates(chosen.side, chosen.at).includes(at)));
    }
    return element;
  };
  const list = new List("The two nets side by side", ROW, at => {
    const row = shown[at], number = bandOf(row), band = h("div", {class: number === undefined ? "" : "band"});
    if (number !== undefined) band.style.setProperty("--hue", `var(--hue-${number % 6})`);
    const drawn = shown.length === net.rows.length;
    const margins = sides.map((own, which) => drawn ? edges(margin[own].rows[row], net.rows[row][which] !== null) : h("div", {}));
    return h("div", {"aria-label": sides.map((own, which) => net.rows[row][which] === null ? "" :
      `${net.names[which]}: ${net[own][net.rows[row][which]].type} ${net[own][net.rows[row][which]].name}`).filter(Boolean).join("; ")},
    margins[0], cell(row, 0), band, margins[1], cell(row, 1));
  }, (at, target) => {
    const touched = target && target.closest("[data-side]"), [left, right] = net.rows[shown[at]];
    if (touched) side = touched.dataset.side;
    const own = (side === "before" ? left : right) !== null ? side : left !== null ? "before" : "after";
    view.choose(own, own === "before" ? left : right, list);
  });
  list.marks = false;
  list.element.addEventListener("keydown", event => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight" || list.at < 0) return;
    event.preventDefault();
    side = event.key === "ArrowLeft" ? "before" : "after";
    list.go(list.at);
  });
  const size = h("output", {});
  const search = h("input", {type: "search", "aria-label": "Find layers by type, name or ONNX node", placeholder: "type, name or ONNX node", oninput: () => filter()});
  const changed = h("input", {type: "checkbox", onchange: () => filter()});
  const text = (layer) => `${layer.type} ${layer.name} ${layer.origin.join(" ")}`.toLowerCase();
  const texts = {before: net.before.map(text), after: net.after.map(text)};
  const filter = () => {
    const wanted = search.value.trim().toLowerCase();
    shown = [];
    net.rows.forEach((row, number) => {
      if (changed.checked && bandOf(number) === undefined && row[0] !== null && row[1] !== null) return;
      if (!wanted || row.some((at, which) => at !== null && texts[sides[which]][at].includes(wanted))) shown.push(number);
    });
    size.textContent = shown.length === net.rows.length ? "" : `${times(shown.length, "row", "rows")} of ${net.rows.length}`;
    list.show(shown.length);
  };
  view.find = node => {
    search.value = node;
    filter();
    document.getElementById("net").scrollIntoView();
    search.focus({preventScroll: true});
  };
  view.listeners.push((own, at, by) => {
    if (own && by !== list) {
      const place = shown.indexOf(view.rowOf[own].get(at));
      side = own;
      if (place >= 0) list.reveal(place);
    }
    list.later();
  });
  const element = section("net", `${net.names[0][0].toUpperCase()}${net.names[0].slice(1)} and ${net.names[1]}`,
    h("p", {class: "quiet"}, net.names[0] === "before"
      ? "On the left the net before the passes, on the right after them. Layers of one colour correspond: the named passes replaced the left ones by the right ones. Lines connect a layer and its consumers."
      : "The model's nodes on the left, the net's layers on the right. A layer is next to the node that computes the same value."),
    h("div", {class: "tools"}, search, h("label", {}, changed, " only what differs"), size),
    h("div", {class: "heads", "aria-hidden": "true"}, h("span", {}, `${net.names[0]} (${net.before.length})`), h("span", {}, `${net.names[1]} (${net.after.length})`)),
    list.element);
  element.classList.add("net");
  element.style.setProperty("--left-edges", `${margin.before.wide}px`);
  element.style.setProperty("--right-edges", `${margin.after.wide}px`);
  list.show(shown.length);
  return element;
}

// Noise over time: points for layers in the order of their noise per saved time, and the chosen net.
function int8(net) {
  const found = net.int8;
  if (!found) return null;
  const decibels = noise => noise > 0 ? -10 * Math.log10(noise) : null, saved = row => row.seconds[0] - row.seconds[1];
  const about = noise => noise === null || decibels(noise) === null ? "–" : decibels(noise).toFixed(1);
  const tried = found.layers.filter(row => row.noise !== null && row.seconds);
  const price = row => row.noise / Math.max(saved(row), 1e-9);
  const all = sum(tried.map(row => row.seconds[0]));
  const point = rows => [all - sum(rows.map(saved)), sum(rows.map(row => row.noise))];
  const order = [...tried].sort((a, b) => price(a) - price(b));
  const course = order.map((_, at) => point(order.slice(0, at + 1))).filter(([, noise]) => noise > 0);
  const chosen = [point(tried.filter(row => !row.reason))[0], found.decibels === null ? 0 : 10 ** (-found.decibels / 10)];
  const parts = [];
  if (course.length && chosen[1] > 0) {
    const xs = [...course, chosen].map(([x]) => x), ys = [...course, chosen].map(([, noise]) => decibels(noise));
    const [left, right, low, high] = [Math.min(...xs), Math.max(...xs, all), Math.min(...ys), Math.max(...ys)];
    const x = value => LEFT + (value - left) / (right - left || 1) * (640 - LEFT - 24), y = value => 200 - (value - low) / (high - low || 1) * 170;
    const at = ([time, noise]) => `${x(time).toFixed(1)} ${y(decibels(noise)).toFixed(1)}`;
    parts.push(h("div", {class: "wide"}, s("svg", {viewBox: "0 0 640 236", width: 640, height: 236, role: "img", "aria-label": "noise against time"},
      s("path", {class: "rule", d: `M${LEFT} 20V206M${LEFT} 206H630`}), s("path", {class: "earlier", d: course.map((each, number) => `${number ? "L" : "M"}${at(each)}`).join("")}),
      course.map(each => s("circle", {class: "peak", cx: x(each[0]), cy: y(decibels(each[1])), r: 2})),
      s("circle", {class: "peak", cx: x(chosen[0]), cy: y(decibels(chosen[1])), r: 6}, s("title", {}, `chosen: ${about(chosen[1])} dB, ${time(chosen[0])}`)),
      axis(LEFT - 6, y(high) + 4, `${high.toFixed(0)} dB`), axis(LEFT - 6, y(low) + 4, `${low.toFixed(0)} dB`),
      axis(LEFT, 226, time(left), "start"), axis(628, 226, `${time(right)} for these layers`))),
    h("p", {class: "quiet"}, "Each small point adds one more layer in int8, first the layers that save most time for their noise. Their noise is the sum of single layers. The large point is the measured net."));
  }
  let summed = 0;
  const sums = new Map([...found.layers].filter(row => !row.reason && row.noise !== null).sort((a, b) => a.noise - b.noise).map(row => [row.layer, summed += row.noise]));
  const heads = ["layer", "type", "int8", "bits", "dB alone", "dB summed", "float", "int8", "largest input", "saturate"];
  const rows = [...found.layers].sort((a, b) => (b.noise || 0) - (a.noise || 0)).map(row => h("tr", {}, h("td", {}, name(row.layer)), h("td", {}, row.type),
    h("td", {}, row.reason ? `float: ${row.reason}` : row.form), [row.bits || "–", about(row.noise), sums.has(row.layer) ? about(sums.get(row.layer)) : "–",
      ...(row.seconds || [null, null]).map(time), row.largest === null ? "–" : row.largest.toPrecision(3), row.cut === null ? "–" : `${(row.cut * 100).toFixed(2)} %`]
      .map(text => h("td", {class: "number"}, String(text)))));
  const distance = found.decibels === null ? "Nothing" : `${found.decibels.toFixed(1)} dB`;
  return section("int8", "Layers in int8", h("p", {}, `${distance} between this net and the float net over ${times(found.samples, "sample", "samples")}`,
    found.top1 === null ? "" : `; ${(found.top1 * 100).toFixed(1)} % of rows have the same largest entry`, `. Times are ${found.times}.`), parts,
    h("div", {class: "wide"}, h("table", {}, h("thead", {}, h("tr", {}, heads.map((text, at) => h("th", {scope: "col", class: at > 2 ? "number" : null}, text)))), h("tbody", {}, rows))));
}

function rewrites(view) {
  const net = view.net, passes = new Map();
  net.near_misses.forEach(miss => passes.set(miss.pass_name, [...passes.get(miss.pass_name) || [], miss]));
  if (!net.rewrites.length && !passes.size) return null;
  const misses = [...passes].sort((a, b) => a[1].length - b[1].length).map(([pass, found]) => {
    const items = h("ul", {});
    const element = h("details", {class: "misses", ontoggle: () => {
      if (items.childElementCount) return;
      items.append(...found.map(miss => h("li", {}, `${miss.reason} `, h("span", {class: "quiet"},
        miss.layers.length ? miss.layers.map(at => [view.link("after", at), " "]) : name(miss.text)))));
    }}, h("summary", {}, pass, h("span", {class: "quiet"}, ` ${times(found.length, "near miss", "near misses")}`)), items);
    return element;
  });
  return section("passes", "Passes",
    net.rewrites.length ? h("div", {class: "wide"}, h("table", {}, h("thead", {}, h("tr", {}, h("th", {scope: "col"}, "pass"), h("th", {scope: "col", class: "number"}, "rewrites"))),
      h("tbody", {}, net.rewrites.map(([pass, number]) => h("tr", {}, h("td", {}, pass), h("td", {class: "number"}, String(number))))))) : h("p", {}, "No pass has changed the net."),
    misses.length ? [h("h3", {}, "Near misses"), h("p", {class: "quiet"}, "Patterns that matched but could not be rewritten, with the reason."), ...misses] : []);
}

function layers(view) {
  const net = view.net;
  if (!net.after.length) return null;
  const columns = [["#", (_, at) => at, (_, at) => String(at + 1)], ["type", layer => layer.type, layer => layer.type], ["name", layer => layer.name, null],
    ["error", layer => largest(layer), layer => largest(layer) < 0 ? "–" : error(largest(layer) === Infinity ? "inf" : largest(layer))],
    ...COSTS.map(([title, field, format]) => [title, layer => layer[field] === null ? -1 : layer[field], layer => format(layer[field])])];
  let order = net.after.map((_, at) => at), sorted = 0, falls = false;
  const list = new List("Layers", 28, row => {
    const at = order[row], layer = net.after[at];
    return h("div", {"aria-label": columns.map(([title, , format]) => `${title} ${format ? format(layer, at) : layer.name}`).join(", ")},
      columns.map(([, , format], column) => column === 2 ? name(layer.name) : h("span", {class: column > 2 ? "number" : ""}, format(layer, at))));
  }, row => view.choose("after", order[row], list));
  const sort = column => {
    falls = column === sorted ? !falls : column > 2;
    sorted = column;
    const value = columns[column][1];
    order.sort((a, b) => {
      const x = value(net.after[a], a), y = value(net.after[b], b);
      return (x < y ? -1 : x > y ? 1 : 0) * (falls ? -1 : 1) || a - b;
    });
    buttons.forEach((button, number) => {
      button.setAttribute("aria-pressed", String(number === sorted));
      button.textContent = `${columns[number][0]}${number === sorted ? (falls ? " ↓" : " ↑") : ""}`;
    });
    list.show(order.length);
  };
  const buttons = columns.map(([title], column) => h("button", {type: "button", class: column > 2 ? "number" : "", onclick: () => sort(column),
    "aria-label": `sort by ${title === "#" ? "order" : title}`}, title));
  list.element.prepend(h("div", {class: "layer-heads"}, buttons));
  list.above = 32;
  view.listeners.push((side, at, by) => {
    if (side === "after" && by !== list) list.reveal(order.indexOf(at));
    if (side === null) { list.at = -1; list.later(); }
  });
  falls = true;
  sort(0);
  const element = section("layers", "Layers", h("p", {class: "quiet"}, "Press a heading to sort by its column."), list.element);
  element.classList.add("layers");
  return element;
}

function changes(net) {
  if (!net.comparison) return null;
  const {about, rows} = net.comparison;
  const list = new List("Differences", 28, at => h("div", {}, rows[at].map((text, column) => column ? h("span", {title: text}, text) : h("span", {class: "name", title: text}, text))), () => {});
  list.show(rows.length);
  const element = section("differences", "Differences", h("p", {class: "quiet"}, `${rows.length ? times(rows.length, "difference", "differences") : "No differences"} between ${about}, by what the layers are and where they stand; names aside.`),
    rows.length ? list.element : null);
  element.classList.add("changes");
  return element;
}

function show(net) {
  const view = new View(net);
  panel.hidden = true;
  document.body.classList.remove("with-panel");
  const parts = [net.outputs.length ? outputs(net) : null, int8(net), costs(view), memoryOver(view), graph(view), rewrites(view), layers(view), changes(net)].filter(Boolean);
  const way = h("nav", {"aria-label": "Sections"}, parts.map(part => h("a", {href: `#${part.id}`}, part.querySelector("h2").textContent)));
  page.replaceChildren(summary(net), parts.length ? way : "", ...parts,
    h("p", {class: "quiet"}, `Written by ${data.tool}.`));
  document.onkeydown = event => { if (event.key === "Escape" && view.chosen) view.close(); };
}

const page = h("div", {});
if (data.nets.length > 1)
  main.append(h("section", {class: "nets", "aria-label": "Nets"}, h("h1", {}, `${data.nets.length} nets`), h("div", {class: "wide"}, h("table", {},
    h("thead", {}, h("tr", {}, h("th", {scope: "col"}, "net"), h("th", {scope: "col"}, "result"), h("th", {scope: "col"}, ""))),
    h("tbody", {}, data.nets.map(net => h("tr", {}, h("td", {}, h("button", {class: "link", type: "button", onclick: () => { show(net); page.scrollIntoView(); }}, net.title)),
      h("td", {}, badge(net)), h("td", {}, net.headline))))))));
main.append(page);
show(data.nets[0]);
