"use strict";
// The picture of the network: draw, zoom, pan, search, color, select. It works with a mouse, fingers and the keyboard.

const NARROWEST = 92, WIDEST = 200, LETTER = 6.9, SMALL_LETTER = 6.0, TALL = 44, FAR = 0.42, MOST_ZOOM = 3;
const SVG = "http://www.w3.org/2000/svg";

function svgElement(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function shortened(text, width, letter) {
  const most = Math.floor(width / letter);
  return text.length <= most ? text : `${text.slice(0, Math.ceil((most - 1) * 0.4))}…${text.slice(-Math.floor((most - 1) * 0.6))}`;
}

class NetworkView {
  constructor(data) {
    Object.assign(this, data); // nodes, edges, modes, texts
    const at = (id) => document.getElementById(id);
    this.svg = at("canvas");
    this.panel = at("facts");
    this.search = at("search");
    this.matches = at("matches");
    this.legend = at("legend");
    this.mode = at("mode");
    this.readers = this.nodes.map(() => []);
    this.sources = this.nodes.map(() => []);
    for (const [from, to] of this.edges) { this.readers[from].push(to); this.sources[to].push(from); }
    this.found = [];
    this.current = -1;
    this.pointers = new Map();
  }

  async start() {
    const box = this.svg.getBoundingClientRect();
    const boxes = this.nodes.map((node) => ({ height: node.role === "operator" ? TALL : 30,
      width: Math.min(WIDEST, Math.max(NARROWEST, 24 + LETTER * node.label.length, node.role === "operator" ? 24 + SMALL_LETTER * Math.min(18, node.name.length) : 0)) }));
    this.size = await layOut(boxes, this.edges, Math.max(0.5, box.width / box.height));
    this.boxes = boxes;
    this.draw();
    for (const mode of this.modes) this.mode.append(new Option(mode.title, mode.key));
    this.color();
    this.fit();
    this.listen();
    this.svg.classList.add("ready");
  }

  draw() {
    this.view = svgElement("g", {});
    const lines = svgElement("g", { class: "edges", "aria-hidden": "true" }), marks = svgElement("g", {});
    this.lines = this.size.lines.map(({ from, to, path, far }) => {
      const line = svgElement("path", { d: path, class: far ? "edge far-edge" : "edge" });
      lines.append(line);
      return { from, to, line };
    });
    this.marks = this.nodes.map((node, k) => {
      const { x, y, width, height } = this.boxes[k], operator = node.role === "operator";
      const told = [node.label, node.name, node.time, operator ? "" : node.role].filter(Boolean).join(", ");
      const mark = svgElement("g", { class: `node ${node.role}`, transform: `translate(${x - width / 2} ${y - height / 2})`,
                                     tabindex: k ? -1 : 0, role: "button", "aria-label": told, "data-id": k });
      const label = svgElement("text", { x: width / 2, y: operator ? 19 : 20, class: "label" });
      label.textContent = shortened(node.label, width - 14, LETTER);
      mark.append(svgElement("rect", { width, height, rx: operator ? 7 : 15 }), label);
      if (operator) {
        const name = svgElement("text", { x: width / 2, y: 34, class: "name" });
        name.textContent = shortened(node.name, width - 12, SMALL_LETTER);
        mark.append(name);
      }
      marks.append(mark);
      return mark;
    });
    this.view.append(lines, marks);
    this.svg.replaceChildren(this.view);
  }

  color() {
    const mode = this.modes.find((m) => m.key === this.mode.value) || this.modes[0];
    this.marks.forEach((mark, k) => {
      mark.classList.remove(...[...mark.classList].filter((c) => /^[qdc]\d$/.test(c)));
      if (mode.classes[k]) mark.classList.add(mode.classes[k]);
    });
    this.legend.replaceChildren(...mode.legend.map(([name, text]) => element("li", {}, element("i", { class: name }), text)));
    document.querySelectorAll("#timeline [data-node]").forEach((bar) => {
      bar.setAttribute("class", `bar ${mode.classes[Number(bar.dataset.node)]}`);
    });
  }

  // ---------------------------------------------------------------- where one looks

  show() {
    this.view.setAttribute("transform", `translate(${this.x} ${this.y}) scale(${this.scale})`);
    this.svg.classList.toggle("far", this.scale < FAR);
  }

  fit(ids = null) {
    const boxes = ids === null ? this.boxes : ids.map((k) => this.boxes[k]);
    const low = (side, axis) => Math.min(...boxes.map((b) => b[axis] - b[side] / 2));
    const high = (side, axis) => Math.max(...boxes.map((b) => b[axis] + b[side] / 2));
    const [left, right, top, bottom] = [low("width", "x"), high("width", "x"), low("height", "y"), high("height", "y")];
    const frame = this.svg.getBoundingClientRect(), margin = 24;
    const scale = Math.min((frame.width - margin) / (right - left), (frame.height - margin) / (bottom - top), ids ? 1 : 1.25);
    this.scale = scale;
    this.x = frame.width / 2 - scale * (left + right) / 2;
    this.y = frame.height / 2 - scale * (top + bottom) / 2;
    this.show();
  }

  zoom(factor, x = null, y = null) {
    const frame = this.svg.getBoundingClientRect(), cx = x ?? frame.width / 2, cy = y ?? frame.height / 2;
    const scale = Math.min(MOST_ZOOM, Math.max(0.02, this.scale * factor)), ratio = scale / this.scale;
    this.x = cx - (cx - this.x) * ratio;
    this.y = cy - (cy - this.y) * ratio;
    this.scale = scale;
    this.show();
  }

  bringIn(k) {
    const { x, y } = this.boxes[k], frame = this.svg.getBoundingClientRect();
    if (this.scale < 0.7) this.scale = 0.9;
    const [at, up] = [this.x + this.scale * x, this.y + this.scale * y];
    if (at < 90 || at > frame.width - 90 || up < 50 || up > frame.height - 50 || this.scale === 0.9) {
      this.x = frame.width / 2 - this.scale * x;
      this.y = frame.height / 2 - this.scale * y;
    }
    this.show();
  }

  // ---------------------------------------------------------------- what is chosen

  select(k, { move = true, focus = false } = {}) {
    if (this.current >= 0) {
      this.marks[this.current].classList.remove("current");
      this.marks[this.current].removeAttribute("aria-current");
    }
    this.marks.forEach((mark) => { if (mark.tabIndex === 0) mark.tabIndex = -1; });
    this.current = k;
    const mark = this.marks[k];
    mark.classList.add("current");
    mark.setAttribute("aria-current", "true");
    mark.tabIndex = 0;
    for (const { from, to, line } of this.lines) line.classList.toggle("touched", from === k || to === k);
    const named = (ids) => ids.map((id) => this.nodes[id]);
    showFacts(this.panel, this.nodes[k], this.texts, [["reads", named(this.sources[k])], ["read by", named(this.readers[k])]],
              (id) => this.select(id, { focus: true }));
    if (move) this.bringIn(k);
    if (focus) mark.focus({ preventScroll: true });
  }

  // Let only these stand out; none: all of them.
  highlight(ids) {
    const chosen = new Set(ids);
    this.svg.classList.toggle("searching", ids !== null);
    this.marks.forEach((mark, k) => mark.classList.toggle("hit", ids !== null && chosen.has(k)));
  }

  find(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) {
      this.found = [];
      this.highlight(null);
      this.matches.textContent = "";
      return;
    }
    const told = (node) => [node.label, node.name, ...node.facts.map((f) => f[1])].join(" ").toLowerCase();
    this.searched ??= this.nodes.map(told);
    this.found = this.nodes.map((_, k) => k).filter((k) => words.every((word) => this.searched[k].includes(word)));
    this.highlight(this.found);
    this.matches.textContent = `${this.found.length} of ${this.nodes.length}`;
  }

  next() {
    if (this.found.length) this.select(this.found[(this.found.indexOf(this.current) + 1) % this.found.length]);
  }

  walk(key) {
    const k = this.current, count = this.nodes.length;
    const to = { ArrowDown: this.readers[k]?.[0], ArrowUp: this.sources[k]?.[0], ArrowRight: k + 1, ArrowLeft: k - 1, Home: 0, End: count - 1 }[key];
    if (to !== undefined && to >= 0 && to < count) this.select(to, { focus: true });
  }

  // ---------------------------------------------------------------- hands

  listen() {
    const on = (id, kind, act) => document.getElementById(id).addEventListener(kind, act);
    on("mode", "change", () => this.color());
    on("search", "input", () => this.find(this.search.value));
    on("search", "keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); this.next(); } });
    on("zoom-in", "click", () => this.zoom(1.4));
    on("zoom-out", "click", () => this.zoom(1 / 1.4));
    on("zoom-fit", "click", () => { this.highlight(null); this.fit(); });
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("focusin", (event) => {
      const mark = event.target.closest(".node");
      if (mark && Number(mark.dataset.id) !== this.current && !this.pointers.size) this.select(Number(mark.dataset.id));
    });
    this.svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY / 300), event.offsetX, event.offsetY);
    }, { passive: false });
    for (const kind of ["pointerdown", "pointermove", "pointerup", "pointercancel"])
      this.svg.addEventListener(kind, (event) => this[kind](event));
    document.addEventListener("click", (event) => this.choose(event));
  }

  key(event) {
    const zooms = { "+": 1.4, "=": 1.4, "-": 1 / 1.4 };
    if (event.key in zooms) this.zoom(zooms[event.key]);
    else if (event.key === "0") this.fit();
    else if (event.key === "Enter" || event.key === " ") this.panel.focus();
    else if (/^(Arrow|Home|End)/.test(event.key)) this.walk(event.key);
    else return;
    event.preventDefault();
  }

  pointerdown(event) {
    this.pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    this.moved = 0;
    this.pressed = event.target.closest(".node");
  }

  pointermove(event) {
    const before = this.pointers.get(event.pointerId);
    if (!before) return;
    const now = { x: event.clientX, y: event.clientY };
    const other = [...this.pointers].find(([id]) => id !== event.pointerId)?.[1];
    this.moved += Math.hypot(now.x - before.x, now.y - before.y);
    if (this.moved > 4 && !this.svg.hasPointerCapture(event.pointerId)) this.svg.setPointerCapture(event.pointerId);
    if (other) {
      const frame = this.svg.getBoundingClientRect(), apart = (p) => Math.hypot(p.x - other.x, p.y - other.y) || 1;
      this.zoom(apart(now) / apart(before), other.x - frame.left, other.y - frame.top);
    } else {
      this.x += now.x - before.x;
      this.y += now.y - before.y;
      this.show();
    }
    this.pointers.set(event.pointerId, now);
  }

  pointerup(event) {
    this.pointers.delete(event.pointerId);
    if (this.moved <= 4 && this.pressed) this.select(Number(this.pressed.dataset.id), { move: false, focus: true });
    this.pressed = null;
  }

  pointercancel(event) {
    this.pointers.delete(event.pointerId);
  }

  // Findings, bars and rows elsewhere on the page point to operators.
  choose(event) {
    const one = event.target.closest("[data-node]"), several = event.target.closest("[data-nodes]");
    if (one === null && several === null) return;
    document.getElementById("network").scrollIntoView({ block: "start" });
    if (one !== null) { this.select(Number(one.dataset.node)); return; }
    const ids = several.dataset.nodes.split(" ").map(Number);
    this.highlight(ids);
    this.fit(ids.length > 1 ? null : ids);
    this.select(ids[0], { move: false });
  }
}

new NetworkView(JSON.parse(document.getElementById("data").textContent)).start();
